"""The processes among which FullyShardedDataParallel (FSDP1) has sharded parameters.

Its parameters and gradients are plain tensors, parts of a flat one, of which a process may hold
none. The group is known to the handle of that flat one alone, and the handle to the wrapper, which
may be around a converted model: it is looked for among all objects, once for each parameter.

Private names of PyTorch used here:

    torch.distributed.fsdp._flat_param.FlatParamHandle
        flat_param, process_group, device    the device that it communicates on
    FlatParameter._params, _shared_params    of the user's own; None with use_orig_params=False
    Tensor._fsdp_flattened                   on a parameter that is a part, or is flat
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amp_graph.gradients.engine import sent

_handles = WeakTensorKeyDictionary()  # by parameter, weakly; None for one that has none


def are_sharded(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that FSDP1 has sharded."""
    return [p for p in parameters if hasattr(p, "_fsdp_flattened")]


def agree_(found: Tensor, sharded: Sequence[Tensor]) -> None:
    """Set a flag to the largest that any process has which holds parts of these parameters, all of
    which call this."""
    if any(p not in _handles for p in sharded):
        _find_handles(sharded)
    handles = [ref() for p in sharded if (ref := _handles[p]) is not None]
    devices = {h.process_group: h.device for h in handles if h is not None}
    for group, device in devices.items():
        raise_to_largest_(found, group, device)


def raise_to_largest_(found: Tensor, group: Any, device: torch.device) -> None:
    """Set a flag to the largest that any process of a group has, which communicates on a device."""
    flag = sent(found, device)  # NCCL has none of the CPU, where offloaded gradients are
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
    if flag is not found:
        found.copy_(flag)


def _find_handles(sharded: Sequence[Tensor]) -> None:
    kind = sys.modules["torch.distributed.fsdp._flat_param"].FlatParamHandle
    _handles.update(dict.fromkeys(sharded))
    for handle in gc.get_objects():
        if type(handle) is kind:
            _handles.update(dict.fromkeys(_parameters_of(handle), weakref.ref(handle)))


def _parameters_of(handle: Any) -> list[Tensor]:
    flat = handle.flat_param
    return [flat, *(flat._params or ()), *(flat._shared_params or ())]
