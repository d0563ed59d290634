"""Hooks of modules, which Dynamo need not guard before there are any.

Its guards look for them in each module at each call: 13 % of a forward pass of 32 tiny layers. That
the first one has come is seen from less: PyTorch numbers the handles of all hooks, of whatever
kind. From then on they are guarded, so that others that come, and those that go, are seen as well.

Private names of PyTorch used here; all were seen to work on 2.11, 2.13 and 2.15:

    torch.utils.hooks.RemovableHandle.next_id         how many handles have been given out
    torch.nn.modules.module._has_any_global_hook      whether there are hooks for all modules
    nn.Module._forward_hooks and its like
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import fx, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle


class Hooks:
    """Those of one model's modules: whether captures have to guard them."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._are_guarded = False
        self._calls_others = False  # modules that are no part of the model
        self._handles = -1

    def settings(self) -> Mapping[str, Any]:
        """Of Dynamo, for a capture from now on."""
        return {"skip_nnmodule_hook_guards": not self._are_guarded}

    def have_come(self) -> bool:
        """Whether there may be hooks now, for the first time: then what was captured is of no use.
        To be asked before each call."""
        if self._are_guarded or self._handles == RemovableHandle.next_id:
            return False
        self._handles = RemovableHandle.next_id
        self._are_guarded = self._calls_others or _has_hooks(self._model)
        return self._are_guarded

    def follow(self, graph: fx.GraphModule, own: Container[str]) -> None:
        """Take note of the modules in a graph; `own` are the ids of the model's, as strings."""
        stacks = (node.meta.get("nn_module_stack") or {} for node in graph.graph.nodes)
        called = {key.partition("@")[0] for stack in stacks for key in stack}
        self._calls_others |= not all(key in own for key in called)


def _has_hooks(model: nn.Module) -> bool:
    return bool(_has_any_global_hook()) or any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in model.modules()
    )
