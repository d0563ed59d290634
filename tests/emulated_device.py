"""A device "emulated", of which there are two, to run what needs no GPU's kernels but a GPU's ways.

As a plugin of pytest it becomes the default device, so that tests written for the CPU run there:

    PYTHONPATH=tests python -m pytest -p emulated_device tests/test_gradients.py

It has no sparse tensors, no recurrent kernels, and no kernels for attention but PyTorch's own math.
PyTorch knows one such device per process, for good: import this in a process of its own.
"""

from __future__ import annotations

import fcntl
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "emulated"


def _build() -> Any:
    folder = Path(cpp_extension.get_default_build_root()) / f"amp_graph_{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_suffix(".cpp")
    with open(folder / "held", "w") as held:
        # The system lets go of this one when a process ends. That of `load` would stay, and be
        # waited for, after a process that was killed.
        fcntl.flock(held, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            "emulated_device", [str(source)], build_directory=str(folder), extra_cflags=["-O1"]
        )


class _Module(types.ModuleType):
    """What PyTorch asks of `torch.emulated`."""

    Generator = torch.Generator

    class device:
        def __init__(self, index: Any):
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            pass

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0

    def set_device(self, index: Any) -> None:
        pass

    def synchronize(self, index: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass

    manual_seed_all = manual_seed

    def get_rng_state(self, index: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, index: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_library = _build()
ran_elsewhere = _library.ran_elsewhere  # operators that ran in another thread than the main one
torch.utils.rename_privateuse1_backend(NAME)
_library.register_hooks()
torch._register_device_module(NAME, _Module(f"torch.{NAME}"))
torch.utils.generate_methods_for_privateuse1_backend()

if any(argument.endswith(__name__) for argument in sys.argv):  # `-p emulated_device`
    torch.set_default_device(NAME)
