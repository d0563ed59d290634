"""Run tests on a CUDA device that is emulated: its memory is the host's, its kernels are the CPU's.

    python scripts/emulated_cuda.py -m cuda tests/test_cuda.py          arguments are pytest's
    python scripts/emulated_cuda.py -p on_cuda tests/test_spills.py     written for the CPU
    python scripts/emulated_cuda.py run scripts/model_report.py --device cuda   a script

It needs a CUDA build of PyTorch, gcc and nm, and no GPU. PyTorch's own code for a CUDA device runs,
such as autograd's thread for it, and so does all of this package's: what mixes devices fails, and
numbers are right. Inductor compiles for CUDA, and Triton's interpreter runs its kernels (some only
with NumPy before 2.4); CUDA graphs are kernels that are run again. There is nothing of cuDNN, NCCL
or Inductor's own CUDA graphs, and no work that is still under way when a call returns: tests of
these fail, and no race shows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
LIBRARIES = Path(torch.__file__).parent / "lib"
RUNTIME = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so")
DRIVER = """
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1; /* whether it is in use, which PyTorch asks */
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 32; return 0; }
"""

# Of a script, as pytest's plugins are of tests.
RUN = """
import os, runpy, sys
import cuda_on_cpu, triton_on_cpu
del sys.argv[0]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def called(libraries: Iterable[str], prefix: str) -> set[str]:
    """Functions of other libraries, of names that begin so, that these call."""
    paths = [str(LIBRARIES / name) for name in libraries]
    command = ["nm", "--dynamic", "--undefined-only", *paths]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    names = {line.split()[-1].split("@")[0] for line in lines if " U " in line}
    return {name for name in names if name.startswith(prefix)}


def called_by_triton() -> set[str]:
    """Functions of the driver that Triton's own code names, which it compiles when it is used."""
    triton = find_spec("triton")
    folder = Path(triton.origin).parent if triton and triton.origin else HERE
    files = folder.glob("backends/nvidia/*.c")
    return {name for file in files for name in re.findall(r"\bcu[A-Z]\w+", file.read_text())}


def build(source: str, names: Iterable[str], to: Path) -> None:
    """Compile functions, and those among `names` that are not there as ones that do nothing."""
    missing = [name for name in sorted(names) if f" {name}(" not in source.replace("*", " ")]
    source += "".join(f"int {name}() {{ return 0; }}\n" for name in missing)
    command = ["gcc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(to)]
    subprocess.run(command, check=True, input=source, text=True)


def main() -> int:
    if not torch.version.cuda:
        print(f"PyTorch {torch.__version__} is no CUDA build", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        runtime = Path(folder) / "runtime.so"
        build((HERE / "emulated_cuda.c").read_text(), called(RUNTIME, "cuda"), runtime)
        driver = called(["libcaffe2_nvrtc.so"], "cu") | called_by_triton()
        build(DRIVER, driver, Path(folder) / "libcuda.so.1")
        paths = [str(HERE.parent), str(HERE.parent / "tests"), os.environ.get("PYTHONPATH")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"LD_LIBRARY_PATH": folder, "LD_PRELOAD": str(runtime)}
        environment |= {"TRITON_INTERPRET": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, *arguments(sys.argv[1:])]
        return subprocess.run(command, env=os.environ | environment).returncode


def arguments(given: list[str]) -> list[str]:
    """What Python is given to run a script, or tests, on the emulated device."""
    if given[:1] == ["run"] and given[1:]:
        return ["-c", RUN, *given[1:]]
    return ["-m", "pytest", "-q", "-p", "cuda_on_cpu", "-p", "triton_on_cpu", *given]


if __name__ == "__main__":
    sys.exit(main())
