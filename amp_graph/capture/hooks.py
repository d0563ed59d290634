"""Hooks of modules, which Dynamo need not guard before there are any.

Its guards look for hooks in each module at each call: 13 % of a forward pass of 32 tiny layers.
Whether a first hook has come shows in less: PyTorch numbers the handles of all hooks, of whatever
kind. From then on hooks are guarded, so that others that come, and those that go, are seen as well.
Hooks may come from the model's own code, as its first call is captured: that has guards, which
Dynamo makes at its end. Hooks for all modules have no guards.

Private names of PyTorch used here:

    torch.utils.hooks.RemovableHandle.next_id         how many handles have been given out
    torch.nn.modules.module._has_any_global_hook      whether there are hooks for all modules
    ..., ._global_forward_hooks and its like
    nn.Module._forward_hooks and its like
    torch._dynamo.config.skip_nnmodule_hook_guards    read when the guards of a capture are made
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping
from typing import Any

from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

GLOBAL = [
    f"_global_{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre")
]


class Hooks:
    """The hooks of one model's modules, and whether captures have to guard them. Does not keep the
    model alive. `are_there`: whether there are any, or were."""

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)
        self._handles = -1
        self._for_all: tuple[int, ...] = ()  # the handles of hooks for all modules
        self.are_there = False
        self._are_guarded = False
        self._is_first = False  # the capture that runs: nothing else, without guards, is in use
        self._calls_others = False  # modules that are no part of the model

    def settings(self, is_first: bool) -> Mapping[str, Any]:
        """Return Dynamo's settings for a capture that begins now, perhaps of a module with hooks
        that was put into the model. `is_first`: nothing that was captured before is in use."""
        self._is_first = is_first
        self.are_there |= self._has_any()
        return {"skip_nnmodule_hook_guards": not self.are_there}

    def guard_new(self) -> None:
        """Guard the hooks that a capture has added, if it is the first. Called within it, before it
        has guards."""
        if self._is_first and not self.are_there and self._has_any():
            dynamo_config.skip_nnmodule_hook_guards = False
            self.are_there = self._are_guarded = True

    def are_for_all(self) -> bool:
        """Whether there were hooks for all modules when `have_changed` was last asked."""
        return bool(self._for_all)

    def have_changed(self) -> bool:
        """Whether captures are of no use any more because hooks came or went. Must be asked before
        each call."""
        are_new = self._handles != RemovableHandle.next_id
        for_all = _for_all_modules() if are_new or self._for_all else ()
        if for_all == self._for_all and not are_new:
            if self._are_guarded == self.are_there:
                return False
        else:
            self._handles = RemovableHandle.next_id
            self.are_there = self.are_there or self._calls_others or self._has_any()
        has_changed = for_all != self._for_all or self._are_guarded != self.are_there
        self._for_all, self._are_guarded = for_all, self.are_there
        return has_changed

    def number(self) -> int:
        """Return how many hooks the model's modules have."""
        model = self._model()
        return sum(
            len(m._forward_hooks)
            + len(m._forward_pre_hooks)
            + len(m._backward_hooks)
            + len(m._backward_pre_hooks)
            for m in (model.modules() if model is not None else ())
        )

    def _has_any(self) -> bool:
        return bool(_has_any_global_hook()) or self.number() > 0

    def follow(self, calls_others: bool) -> None:
        """Take note of whether a graph calls modules that are no part of the model."""
        self._calls_others |= calls_others


def calls_others(graph: fx.GraphModule, own: Container[str]) -> bool:
    """Whether a graph calls modules other than those with these ids, given as strings."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in graph.graph.nodes)
    called = {key.partition("@")[0] for stack in stacks for key in stack}
    return not all(key in own for key in called)


def _for_all_modules() -> tuple[int, ...]:
    if not _has_any_global_hook():
        return ()
    return tuple(handle for name in GLOBAL for handle in getattr(torch_module, name))
