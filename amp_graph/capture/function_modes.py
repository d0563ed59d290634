"""Run graphs under none of the script's TorchFunctionModes, whose effect was captured with them.

    with Mode(): model(x)     Dynamo captures that under the mode, and guards that it is on

Run under it, a graph would do it twice. The mode of a default device stays: it only fills in what a
graph leaves open.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.15:

    torch._C._len_torch_function_stack, torch.overrides._pop_mode, _push_mode
    torch.utils._device.DeviceContext    the mode of `torch.set_default_device`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext

modes_on: Callable[[], int] = torch._C._len_torch_function_stack  # how many


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Turn all modes but that of a default device off, within."""
    taken = [_pop_mode() for _ in range(modes_on())]
    kept = [mode for mode in reversed(taken) if isinstance(mode, DeviceContext)]
    for mode in kept:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            _pop_mode()
        for mode in reversed(taken):
            _push_mode(mode)
