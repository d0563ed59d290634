"""The copies of a converted model that `nn.DataParallel` makes, on each of its GPUs in each call.

A copy has all that is in the model's `__dict__`, the conversion as well, whose graphs read the
parameters of the model itself. So a copy is given its own code in its stead.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.15:

    torch.nn.Module._replicate_for_data_parallel
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, Protocol

from torch import nn

from amp_graph.modules import Run, plain_code

SLOT = "_call_impl"  # the method of nn.Module that a conversion stands in front of
REPLICATE = "_replicate_for_data_parallel"  # and the one that makes such copies


class Converted(Protocol):
    """What stands in the slot of a model."""

    module: nn.Module

    def of_copy(self, own_code: Run) -> Run:
        """What runs a copy of the model that has this code."""


class Replicate:
    """Stands in front of the method that copies a converted model."""

    def __init__(self, conversion: Converted):
        self._conversion = conversion

    def __call__(self) -> nn.Module:
        module = self._conversion.module
        replica: nn.Module = getattr(type(module), REPLICATE)(module)
        del replica.__dict__[REPLICATE]
        alive = weakref.ref(replica)  # a copy that refers to itself would outlive its call

        def own_code(*args: Any, **kwargs: Any) -> Any:
            called = alive()
            assert called is not None
            return plain_code(called)(*args, **kwargs)

        replica.__dict__[SLOT] = self._conversion.of_copy(own_code)
        return replica

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicate:
        return Replicate(copy.deepcopy(self._conversion, memo))

    def __reduce__(self) -> Any:
        """As the conversion: pickled as the method."""
        return getattr, (self._conversion.module, REPLICATE)
