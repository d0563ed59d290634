"""Hooks that do nothing but ask for a gradient of a module's result count as one.

    embedding._forward_hooks == {1: ask}            captured
    embedding._forward_hooks == {1: ask, 2: ask}    runs what was captured

transformers (5.23) adds one more to the embedding each time that gradient checkpointing is switched
on, which TRL's trainers do at each step. Dynamo guards how many there are, so that each step would
be captured anew. Here it guards that all do nothing else: to ask twice is to ask once.

Private names of PyTorch used here, since 2.13; before, Dynamo ends graphs at such a request:

    torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable
    torch._dynamo.variables.dicts.NNModuleHooksDictVariable
                                      without the kind of dict since 2.14
    torch._dynamo.variables.UserFunctionVariable, torch._dynamo.source.AttrSource
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable, UserFunctionVariable, VariableTracker
from torch._dynamo.variables.dicts import NNModuleHooksDictVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

from amp_graph.dynamo_changes.own_guards import hold_while
from amp_graph.dynamo_changes.replaced import LOOK_UP, Change

HOOKS = "_forward_hooks"
TAKES_KIND = "user_cls" in inspect.signature(NNModuleHooksDictVariable).parameters


def ask(module: nn.Module, inputs: Any, result: Tensor) -> None:
    result.requires_grad_(True)


def only_ask(hooks: Mapping[int, Any]) -> bool:
    """Whether there are hooks, and all are spelled like `ask`."""
    return bool(hooks) and all(map(_asks, hooks.values()))


def _asks(hook: Any) -> bool:
    return isinstance(hook, types.FunctionType) and _spelled(hook) == _spelled(ask)


def _spelled(hook: Any) -> tuple[Any, ...]:
    """Return the body of a hook's code, whatever its arguments are called."""
    code = hook.__code__
    return code.co_code, code.co_names, code.co_consts, code.co_argcount


def _look_up(method: Any, module: Any, frame: Any, name: str) -> Any:
    if name == HOOKS and module.source:
        hooks = getattr(module.value, HOOKS)
        is_changed = frame.output.side_effects.has_pending_mutation_of_attr(module, name)
        if not is_changed and only_ask(hooks):
            return _one_of(frame, hooks, AttrSource(module.source, name))
    return method(module, frame, name)


def _one_of(frame: Any, hooks: Mapping[int, Any], source: Any) -> Any:
    hold_while(only_ask, source, "hooks that only ask for a gradient")
    number, hook = next(iter(hooks.items()))
    one: dict[VariableTracker, VariableTracker] = {
        ConstantVariable.create(number): UserFunctionVariable(hook)
    }
    kind = (type(hooks),) if TAKES_KIND else ()
    return NNModuleHooksDictVariable(one, *kind)


CHANGES: tuple[Change, ...] = ((UnspecializedNNModuleVariable, LOOK_UP, _look_up),)
if torch.__version__ < "2.13":
    CHANGES = ()
