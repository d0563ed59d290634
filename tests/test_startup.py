"""How amp_graph starts in processes of others: the .pth file, installs whole and broken, ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from running import Run, python, run, run_plain

from amp_graph.autopatch.settings import NO

ROOT = Path(__file__).parent.parent
PIP = "-m pip -q --disable-pip-version-check install --no-deps --no-build-isolation"
PIP += " --ignore-installed --prefix"  # else pip takes this environment's own install out

# As Python starts where `place` is its only folder of packages with .pth files.
START = "import runpy, site, sys; site.addsitedir({place!r}); sys.argv = sys.argv[1:]; "
START += "runpy.run_path(sys.argv[0], run_name='__main__')"

TRAIN = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
print("trained", "amp_graph" in sys.modules)
"""
REPORT = (
    "amp_graph: Sequential: 6 of 6 operators on bfloat16 tensors, 4 casts moving 216 B, in 2 runs"
)


@pytest.fixture
def script(tmp_path):
    """Writes a script that trains and then does what is given."""

    def write(ending: str = "", beginning: str = "", train: str = TRAIN) -> Path:
        file = tmp_path / "train.py"
        file.write_text(beginning + train + ending)
        return file

    return write


def install(tmp_path: Path, *how: str) -> tuple[Path, Path]:
    """A copy of the checkout, and the packages folder that it was installed into."""
    copy = tmp_path / "checkout"
    for folder in ("amp_graph", "allow_deny_lists"):
        shutil.copytree(ROOT / folder, copy / folder)
    files = "pyproject.toml setup.py README.md LICENSE _amp_graph_startup.py amp_graph_startup.pth"
    for file in files.split():
        shutil.copy(ROOT / file, copy)
    prefix = tmp_path / "prefix"
    subprocess.check_call([sys.executable, *PIP.split(), prefix, *how, copy])
    return copy, next(prefix.glob("lib/python*/site-packages"))


def run_in(place: Path, file: Path, **variables: str) -> Run:
    """Run a script where nothing but torch and what is installed in `place` can be imported."""
    libraries = sysconfig.get_path("purelib")  # a plain path: its .pth files are not read
    command = python("-S", "-c", START.format(place=str(place)), file)
    return run(command, cwd=file.parent, PYTHONPATH=f"{place}{os.pathsep}{libraries}", **variables)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return install(tmp_path_factory.mktemp("wheel"))[1]


def test_this_environment_starts_it_by_its_pth_file():
    assert (Path(sysconfig.get_path("purelib")) / "amp_graph_startup.pth").is_file(), (
        "install amp_graph into this environment first: scripts/setup test"
    )


@pytest.mark.parametrize("variables", [{}, {"AMP_GRAPH_ENABLE": ""}, {"AMP_GRAPH_ENABLE": "0"}])
def test_without_the_variable_nothing_is_imported_or_patched(script, variables):
    ending = """
print([m for m in sys.modules if "amp_graph" in m and not m.startswith("__editable__")])
print([f for f in sys.meta_path if "amp_graph" in f.__class__.__module__])
print(nn.Module.__dict__["_compiled_call_impl"])
"""
    done = run(python(script(ending)), **variables, AMP_GRAPH_DTYPE="float8")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == ["trained False", "[]", "[]", "None"]


def test_a_script_that_needs_no_torch_waits_for_no_import():
    code = "import os, sys; before = {*sys.modules}; import _amp_graph_startup; "
    code += "print(*sorted({*sys.modules} - before))"
    ended = run(python("-S", "-c", code), cwd=ROOT, AMP_GRAPH_ENABLE="1", PYTHONPATH=str(ROOT))
    assert ended.out.split() == ["_amp_graph_startup", "atexit"]


@pytest.mark.parametrize("off", [*NO[2:], "False", " OFF "])
def test_off_leaves_everything_alone_and_imports_nothing(script, off):
    ending = "print([name for name in sys.modules if name.startswith('amp_graph')])\n"
    done = run(python(script(ending)), AMP_GRAPH_ENABLE=off, AMP_GRAPH_DTYPE="float8")
    assert (done.code, done.err, done.out) == (0, "", "trained False\n[]\n")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"AMP_GRAPH_ENABLE": "2"}, "AMP_GRAPH_ENABLE=2: choose one of 1, true, yes, on, 0"),
        (
            {"AMP_GRAPH_ENABLE": "1", "AMP_GRAPH_DTYPE": "int8"},
            "AMP_GRAPH_DTYPE=int8: choose one of float16, bfloat16",
        ),
    ],
)
def test_a_wrong_value_ends_the_process_in_one_line_before_training(script, variables, message):
    file = script(beginning="print('began', flush=True)\n")
    done = run(python(file), **variables)
    assert (done.code, done.out) == (2, "began\n")
    assert done.err.startswith(f"amp_graph: {message}") and done.err.count("\n") == 1


def test_a_wheel_starts_it(wheel, script):
    assert (wheel / "amp_graph_startup.pth").is_file()
    installed = (next(wheel.glob("amp_graph-*.dist-info")) / "RECORD").read_text()
    assert "\namp_graph_startup.pth," in f"\n{installed}"  # so that pip takes it out again
    assert run_in(wheel, script()).out == "trained False\n"
    done = run_in(wheel, script(), AMP_GRAPH_ENABLE="1")
    assert (done.code, done.out) == (0, "trained True\n")
    assert done.said[0].startswith(REPORT)


@pytest.mark.parametrize("first", ["import amp_graph", "from amp_graph.autopatch import install"])
def test_it_starts_in_a_script_that_imports_it_before_torch(wheel, script, first):
    done = run_in(wheel, script(beginning=f"{first}\n"), AMP_GRAPH_ENABLE="1")
    assert (done.code, done.out) == (0, "trained True\n")
    assert done.said[0].startswith(REPORT)


def test_an_editable_install_starts_it_and_its_checkout_may_go(tmp_path, script):
    checkout, place = install(tmp_path, "-e")
    assert (place / "amp_graph_startup.pth").is_file()
    done = run_in(place, script(), AMP_GRAPH_ENABLE="1")
    assert (done.code, done.out) == (0, "trained True\n")
    assert done.said[0].startswith(REPORT)
    shutil.rmtree(checkout)
    for variables in ({}, {"AMP_GRAPH_ENABLE": "1"}):
        done = run_in(place, script(), **variables)
        assert (done.code, done.out) == (0, "trained False\n"), done.err


def syntax_error(place: Path) -> None:
    (place / "amp_graph" / "__init__.py").write_text("def (:\n")


def import_error(place: Path) -> None:
    (place / "amp_graph" / "__init__.py").write_text("from torch import no_such_name\n")


def one_module_gone(place: Path) -> None:
    (place / "amp_graph" / "autopatch" / "install.py").unlink()


def lists_gone(place: Path) -> None:
    shutil.rmtree(place / "amp_graph" / "allow_deny_lists")


def package_gone(place: Path) -> None:
    shutil.rmtree(place / "amp_graph")


def startup_gone(place: Path) -> None:
    (place / "_amp_graph_startup.py").unlink()


BREAKS = [syntax_error, import_error, one_module_gone, lists_gone, package_gone, startup_gone]


@pytest.mark.parametrize("damage", BREAKS, ids=lambda f: f.__name__)
def test_a_broken_install_leaves_torch_and_the_script_running(wheel, tmp_path, script, damage):
    place = shutil.copytree(wheel, tmp_path / "place")
    damage(place)
    done = run_in(place, script(), AMP_GRAPH_ENABLE="1")
    assert done.code == 0, done.err
    assert done.out.startswith("trained")
    if damage is startup_gone:  # Python itself says so
        assert "amp_graph_startup.pth" in done.err and "No module named" in done.err
    else:
        (said,) = done.said
        assert said.startswith("amp_graph: cannot start, the script runs unchanged (")
        assert done.err.count("\n") == 1


def test_torch_is_imported_as_ever(script):
    beginning = """
import importlib, importlib.util, sys
spec = importlib.util.find_spec("torch")
assert "torch" not in sys.modules
from torch import Tensor
assert sys.modules["torch"].__spec__.origin == spec.origin
import torch
assert torch.__spec__.loader.exec_module.__func__ is type(torch.__spec__.loader).exec_module
"""
    done = run(python(script(beginning=beginning)), AMP_GRAPH_ENABLE="1")
    assert (done.code, done.out) == (0, "trained True\n"), done.err
    assert len(done.said) == 1


def test_random_numbers_are_as_ever(script):
    beginning = "import random\nrandom.seed(0)\n"
    outs = [
        run(python(script("print(random.random())", beginning)), AMP_GRAPH_ENABLE=on).out
        for on in "01"
    ]
    assert outs[0].replace("False", "True") == outs[1]


ENDS = {
    "an exit code": ("sys.exit(3)", 3),
    "an exit message": ("sys.exit('no data')", 1),
    "os._exit": ("import os; sys.stdout.flush(); os._exit(4)", 4),
    "an error": ("def f(x):\n    return 1 / x\nf(0)", 1),
    "an error in the model": ("model(torch.ones(3, 5))", 1),
    "KeyboardInterrupt": ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    "SIGTERM": (
        "import os, signal; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)",
        -signal.SIGTERM,
    ),
}
NO_REPORT = ("os._exit", "SIGTERM")  # Python does not come to its exit handlers


def own_traceback(done: Run) -> list[str]:
    """What is left of stderr without frames of libraries and without our lines."""
    return re.findall(r'^  File ".*train\.py".*\n.*|^\w*Error: .*|^Keyb.*|^no .*', done.err, re.M)


@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_in_its_own_way(script, tmp_path, end):
    ending, code = ENDS[end]
    before = run_plain(python(script(ending)), tmp_path)
    after = run(python(script(ending)), AMP_GRAPH_ENABLE="1")
    assert before.code == after.code == code
    assert before.out == "trained False\n" and after.out == "trained True\n"
    assert own_traceback(after) == own_traceback(before)
    assert bool(own_traceback(before)) == ("exit code" not in end and end not in NO_REPORT)
    assert after.err.count("Traceback") == before.err.count("Traceback")
    assert [line.startswith(REPORT) for line in after.said] == [True] * (end not in NO_REPORT)


def test_a_script_that_is_interrupted_ends_so_after_a_dump_as_well(script, tmp_path):
    ending, code = ENDS["KeyboardInterrupt"]
    dump = tmp_path / "dump"
    done = run(python(script(ending)), AMP_GRAPH_ENABLE="1", AMP_GRAPH_DUMP=str(dump))
    assert done.code == code and (dump / "report.json").exists()


def test_what_is_undone_is_not_told_of():
    begun = "import torch; from amp_graph.autopatch import enable, install; enable(); "
    assert run(python("-c", begun)).said
    assert not run(python("-c", f"{begun}install().undo()")).said
