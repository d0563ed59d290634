"""Guards of our own: what is captured holds as long as they do.

Private names of PyTorch used here:

    torch._dynamo.guards.GuardBuilder.get_guard_manager, install_guard, get_verbose_code_parts
    torch._dynamo.guards.GuardBuilder.guard_manager, torch._dynamo.source.GlobalStateSource
    GuardManager.add_lambda_guard, .add_dict_contains_guard    which is not written in Python
    Source.get_value, InstructionTranslator.output.root_tx, .f_globals, .f_locals
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from torch._dynamo import guards
from torch._dynamo.source import GlobalStateSource


def value_of(source: Any, frame: Any) -> Any:
    """Return what a source stands for in the call that is being captured."""
    begun = frame.output.root_tx
    return source.get_value({"G": begun.f_globals, "L": begun.f_locals}, {}, {})


def hold_while(condition: Callable[..., bool], source: Any, said: str, *given: Any) -> None:
    """Guard what is being captured by a condition on the value of a source, which is the last of
    its arguments after those `given`. `said`: the condition, for who asks why something is captured
    anew."""
    guards.install_guard(source.make_guard(guard_by(condition, said, *given)))


def hold_key(dictionary: Any, key: Any, there: bool) -> None:
    """Guard what is being captured by whether the dictionary that a source stands for has a key, or
    has not."""
    guards.install_guard(dictionary.make_guard(_key_guard(key, there)))


def hold_in_state(condition: Callable[..., bool], said: str, *given: Any) -> None:
    """Guard what is being captured by a condition on something that no source stands for."""
    guards.install_guard(GlobalStateSource().make_guard(_state_guard(condition, said, *given)))


@lru_cache(typed=True)  # Dynamo knows by the function that a guard is there already
def guard_by(condition: Callable[..., bool], said: str, *given: Any) -> Callable[[Any, Any], None]:
    holds = partial(condition, *given)

    def guard(builder: Any, asked: Any) -> None:
        parts = guards.get_verbose_code_parts(f"{asked.name}: {said}", asked)
        builder.get_guard_manager(asked).add_lambda_guard(holds, parts, asked.user_stack)

    return guard


@lru_cache
def _key_guard(key: Any, there: bool) -> Callable[[Any, Any], None]:
    def guard(builder: Any, asked: Any) -> None:
        said = f"{asked.name}: {key!r} is {'' if there else 'not '}in it"
        parts = guards.get_verbose_code_parts(said, asked)
        manager = builder.get_guard_manager(asked)
        manager.add_dict_contains_guard(there, key, parts, asked.user_stack)

    return guard


@lru_cache(typed=True)
def _state_guard(
    condition: Callable[..., bool], said: str, *given: Any
) -> Callable[[Any, Any], None]:
    def guard(builder: Any, asked: Any) -> None:
        parts = guards.get_verbose_code_parts(said, asked)
        root = builder.guard_manager.root
        root.add_lambda_guard(lambda variables: condition(*given), parts, asked.user_stack)

    return guard
