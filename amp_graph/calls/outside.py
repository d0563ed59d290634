"""Find operators that run in float32 between graphs, so that the report can name them.

Private names of PyTorch used here:

    torch.utils._python_dispatch._pop_mode_temporarily
    torch._C.DispatchKey, OpOverload.has_kernel_for_dispatch_key
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from amp_graph.capture.dynamo import is_of_capture, is_of_graph
from amp_graph.capture.surroundings import dispatch_modes
from amp_graph.errors import NO_FAILURES
from amp_graph.gradients.engine import OUTSIDE, backward_pass
from amp_graph.ir import Color
from amp_graph.oplists import OpLists, load_lists

TAKEN_APART = DispatchKey.CompositeImplicitAutograd


class OutsideWatch(TorchDispatchMode):
    """Notes the allowed operators that run on float32 tensors outside of emitted graphs: in
    Python code that Dynamo left between two graphs, say a recurrent layer on packed sequences.

    in_front: whether some ran before any graph.
    takes_off: whether some may have run that the shipped lists allow, and these do not.
    adds_hooks: whether modules of the model have more hooks after the call than before.
    """

    supports_higher_order_operators = True

    def __init__(self, lists: OpLists):
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self.in_front = self.adds_hooks = False
        self.takes_off = _hides_one(lists)
        self.met_sparse = False
        self._has_paused = False
        self._lists = lists
        self._inside = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @staticmethod
    def breaks(error: Exception) -> bool:
        """Whether it may have been raised because there is a mode: by a model that makes a tensor
        of a subclass that is not for modes (`torch.nn.attention.bias`, torch 2.13)."""
        return "Creating a new Tensor subclass" in str(error)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For a graph. It leaves the stack of modes where it can: under one, in inference mode,
        operators are taken apart beneath autocast, which then does not see the parts."""
        modes = dispatch_modes()
        without = _pop_mode_temporarily if modes and modes[-1] is self else contextlib.nullcontext
        before, self._inside, self._has_paused = self._inside, True, True
        try:
            with without():
                yield
        finally:
            self._inside = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self._inside and backward_pass() == OUTSIDE:
            if _has_float32(args):
                self._note(func)
            self.met_sparse = self.met_sparse or _has_sparse(args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any) -> None:
        if _is_allowed(func, self._lists):
            self.found.add(str(func))
            self.in_front |= not self._has_paused
        elif _is_allowed(func, load_lists()):
            self.takes_off = True


def _is_allowed(operator: Any, lists: OpLists) -> bool:
    listing = lists.lookup(operator)
    return listing is not None and listing.color is Color.ALLOW


def _hides_one(lists: OpLists) -> bool:
    """Whether one that the shipped lists allow, and these do not, is taken apart before a mode
    could see it, as `linear` is."""
    if lists is (shipped := load_lists()):
        return False
    allowed = (name for name, listing in shipped.entries.items() if listing.color is Color.ALLOW)
    return any(_is_taken_apart(name) for name in allowed if not _is_allowed(name, lists))


def _is_taken_apart(name: str) -> bool:
    namespace, packet = name.split(".")[:2]
    found = getattr(getattr(torch.ops, namespace), packet, None)  # of a library not loaded, none
    overloads: list[str] = getattr(found, "overloads", list)()  # nor of a higher-order operator
    return any(getattr(found, each).has_kernel_for_dispatch_key(TAKEN_APART) for each in overloads)


def _has_sparse(args: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.layout is not torch.strided for x in args)


def _has_float32(args: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype is torch.float32 for x in tree_leaves(args))


def may_be_ours(
    error: BaseException, is_watched: bool, is_new: bool, was_told: bool
) -> TypeGuard[Exception]:
    """Whether an error of a call may be ours: the model's own code may not raise it, or may catch
    it. It may take another way if it `was_told` that it is compiled, which is so in captures
    alone: then operators may refuse what it comes to. Memory that ran out is no fault: the next
    batch may be smaller."""
    if not isinstance(error, Exception) or isinstance(error, NO_FAILURES):
        return False
    is_of_watching = is_watched and OutsideWatch.breaks(error)
    is_of_answer = was_told and isinstance(error, RuntimeError)
    if is_of_capture(error) or is_of_watching:
        return True
    return is_new and (is_of_answer or is_of_graph(error))
