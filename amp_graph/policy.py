"""Policy: the low precision, the lists, and the exceptions that a user asks for.

Private names of PyTorch used here:

    torch._inductor.list_mode_options, list_options    as torch.compile takes them
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from amp_graph.dtypes import LOW_DTYPES, dtype_name
from amp_graph.errors import PlanError, PolicyError, did_you_mean
from amp_graph.files import as_path
from amp_graph.ir import COLORS, Color, NodeFacts
from amp_graph.levels import Level
from amp_graph.operator_names import dotted, full_name, known_names
from amp_graph.oplists import OpLists, UserLists, load_lists
from amp_graph.override import Override, check_operator, inside
from amp_graph.plans.pins import Saved
from amp_graph.scaling.loss_scale import LossScale

OUTPUT_DTYPES = ("float16", "bfloat16", "float32", "float64")
COMPILERS = ("eager", "inductor")
EMULATION = ("native", "float32")
REFRESH = (ALWAYS, ON_CHANGE) = "always", "on_change"
KINDS: Mapping[type, str] = {
    str: "globs of module paths",
    Override: "Override objects",
    tuple: "pairs (colour, operator)",
}
SHORT = {"half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16"}
FLOAT16_DEVICES = frozenset({"cuda", "mps"})  # elsewhere float16 arithmetic is emulated or slow


@dataclass(frozen=True)
class Policy:
    """How to convert one model.

    dtype: "float16", "bfloat16", the torch dtype, or None: float16 where the device has fast
        float16 (CUDA, MPS), bfloat16 elsewhere.
    lists: the user's operator lists, merged over the shipped ones: a TOML file, a mapping such
        as {"deny": ["aten.gelu"]}, or several of them.
    overrides: exceptions for single nodes or modules; the first that matches wins.
    removed: (colour, operator) pairs to take off the shipped lists.
    keep_float32: globs of module paths that stay in float32 altogether.
    output_dtype: the dtype of the model's float32 outputs, "bfloat16" or torch.bfloat16, say; None
        keeps float32.
    loss_scale: "dynamic" scales gradients inside the graphs in float16 and not in bfloat16, whose
        range is float32's. A LossScale, or a number for a static scale, scales in either. None
        scales in neither.
    level: "safe", "balanced" or "max": how far to go for memory and speed; see Level.
    refresh_weights: when low-precision weights are made anew: "always", before each call, or
        "on_change", for inference and gradient accumulation: before a call after something was
        seen to change. Seen are optimizers of PyTorch's, `load_state_dict` and all that raises a
        parameter's version; writes through `parameter.data` are not (`weights.change_tracker`).
    emulation: how a CPU without kernels for the low precision computes products in it: "native",
        PyTorch's way, element by element; or "float32", by float32 kernels, whose results are
        rounded, several times faster (see `amp_graph.backend.emulation`).
    compiler: what runs the rewritten graphs: "eager", PyTorch operator by operator, or "inductor",
        which compiles them.
    compiler_options: for Inductor, a mode of `torch.compile`, such as "reduce-overhead" (CUDA
        graphs), or a mapping of its settings.
    """

    dtype: torch.dtype | str | None = None
    lists: UserLists | None = None
    overrides: tuple[Override, ...] = ()
    removed: tuple[tuple[str, str], ...] = ()
    keep_float32: tuple[str, ...] = ()
    output_dtype: torch.dtype | str | None = None
    loss_scale: LossScale | float | str | None = "dynamic"
    level: Level | str = Level.BALANCED
    refresh_weights: str = ALWAYS
    emulation: str = "native"
    compiler: str = "eager"
    compiler_options: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _low_dtype(self.dtype))
        object.__setattr__(self, "level", _level(self.level))
        object.__setattr__(self, "lists", _anchored(self.lists))
        for name, kind in (("keep_float32", str), ("overrides", Override), ("removed", tuple)):
            object.__setattr__(self, name, _all_of(kind, name, getattr(self, name)))
        if "" in self.keep_float32:
            raise PolicyError("keep_float32 holds an empty glob; '*' is every module")
        _check_removed(self.removed)
        if self.output_dtype is not None:
            object.__setattr__(self, "output_dtype", _output_dtype(self.output_dtype))
        if isinstance(self.loss_scale, (int, float)) and not isinstance(self.loss_scale, bool):
            object.__setattr__(self, "loss_scale", LossScale.static(float(self.loss_scale)))
        elif self.loss_scale != "dynamic" and not isinstance(self.loss_scale, LossScale | None):
            raise PolicyError(
                f"loss_scale must be 'dynamic', a number, a LossScale or None, "
                f"not {self.loss_scale!r}"
            )
        if self.emulation not in EMULATION:
            raise PolicyError(f"emulation must be {_either(EMULATION)}, not {self.emulation!r}")
        if self.refresh_weights not in REFRESH:
            raise PolicyError(
                f"refresh_weights must be {_either(REFRESH)}, not {self.refresh_weights!r}"
            )
        self._check_compiler()

    def _check_compiler(self) -> None:
        if self.compiler not in COMPILERS:
            raise PolicyError(f"compiler must be {_either(COMPILERS)}, not {self.compiler!r}")
        if self.is_compiled and self.emulation == "float32":
            raise PolicyError("emulation='float32' is for compiler='eager'")
        if self.compiler_options is None:
            return
        if not self.is_compiled:
            raise PolicyError("compiler_options are for compiler='inductor'")
        if not isinstance(self.compiler_options, str | Mapping):
            raise PolicyError(
                f"compiler_options must be a mode of torch.compile or a mapping of settings, "
                f"not {self.compiler_options!r}"
            )
        try:
            settings = self.inductor_settings()
        except RuntimeError as error:
            raise PolicyError(f"compiler_options: {error}") from None
        known = torch._inductor.list_options()
        for name in settings:
            if str(name).replace("-", "_") not in known:
                raise PolicyError(
                    f"compiler_options: Inductor has no setting {name!r}."
                    f"{did_you_mean(str(name), known)}"
                )

    def dtype_for(self, device_types: Iterable[str]) -> torch.dtype:
        """Return the low precision for a graph on these devices."""
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        fast = FLOAT16_DEVICES.intersection(device_types)
        return torch.float16 if fast else torch.bfloat16

    def following(self, saved: Saved) -> Policy:
        """Return this policy in the low precision of saved graphs, which it may not contradict.
        Code without a graph may be in another. Raises PlanError."""
        dtypes = {plan.dtype for plan in saved.plans if plan.facts}
        asked = dtypes if self.dtype is None else {self.dtype}
        if len(dtypes | asked) > 1:
            found = " and ".join(sorted(map(dtype_name, dtypes)))
            asks = "one low precision" if self.dtype is None else dtype_name(self.dtype)
            raise PlanError(f"{saved.origin}: is in {found}, and the policy asks for {asks}")
        return replace(self, dtype=dtypes.pop()) if dtypes else self

    @property
    def names_parts(self) -> bool:
        """Whether the policy sets the precision of single parts, which autocast would not
        follow."""
        return bool(self.keep_float32 or self.overrides)

    @property
    def keeps_weights(self) -> bool:
        """Whether low-precision weights are kept until a change is seen."""
        return self.refresh_weights == ON_CHANGE

    @property
    def is_compiled(self) -> bool:
        """Whether Inductor compiles graphs."""
        return self.compiler == "inductor"

    def uncompiled(self) -> Policy:
        """Return this policy for graphs that run operator by operator."""
        return replace(self, compiler="eager", compiler_options=None)

    def loss_scale_for(self, dtype: torch.dtype) -> LossScale | None:
        """Return how gradients are scaled in graphs of this low precision; None if they are not."""
        if self.loss_scale == "dynamic":
            return LossScale() if dtype is torch.float16 else None
        assert not isinstance(self.loss_scale, (str, float))
        return self.loss_scale

    def inductor_settings(self) -> Mapping[str, Any]:
        """Return the compiler options with a mode spelled out. Raises RuntimeError for an unknown
        mode."""
        if not isinstance(self.compiler_options, str):
            return self.compiler_options or {}
        settings: dict[str, Any] = torch._inductor.list_mode_options(self.compiler_options)
        return settings

    def override_for(self, facts: NodeFacts) -> tuple[Color, str] | None:
        """Return the colour that the user gave this node, and the words that say so."""
        for override in self.overrides:
            if override.matches(facts):
                return Color(override.color), str(override)
        for glob in self.keep_float32:
            if inside(facts.module_path, glob):
                return Color.DENY, f"keep_float32={glob}"
        return None

    def unmatched(self, paths: Collection[str]) -> list[tuple[str, str]]:
        """Return the globs that match none of these module paths, each after the setting it was
        given in."""
        globs = [(f"keep_float32={glob!r}", glob) for glob in self.keep_float32]
        modules = [o.module for o in self.overrides if o.module is not None]
        globs += [(f"Override(module={glob!r})", glob) for glob in modules]
        return [(given, g) for given, g in globs if not any(inside(path, g) for path in paths)]

    def load_lists(self) -> OpLists:
        lists = load_lists()
        for color, op in self.removed:
            lists = lists.without(color, op)
        return lists if self.lists is None else lists.merged(self.lists)


PolicySource: TypeAlias = Policy | str | torch.dtype | None
"""A policy, its low precision alone, or nothing: the low precision of the device."""


def as_policy(policy: PolicySource) -> Policy:
    """Make a Policy of what `convert(model, policy=...)` accepts. Raises PolicyError."""
    if isinstance(policy, Policy):
        return policy
    return Policy(dtype=policy)


def _either(legal: Iterable[str]) -> str:
    return " or ".join(map(repr, legal))


def _anchored(lists: Any) -> Any:
    """Return the lists with absolute paths, and with copies of mappings. They are read again later,
    for a copy of a model, say; by then a script may be in another folder, or have changed them."""
    if isinstance(lists, str | Path):
        return as_path(lists, PolicyError).absolute()
    if isinstance(lists, list | tuple):
        return [_anchored(given) for given in lists]
    if not isinstance(lists, Mapping | None):
        raise PolicyError(f"lists must be a TOML file, a mapping or several of them, not {lists!r}")
    return None if lists is None else copy.deepcopy(dict(lists))


def _all_of(kind: type, name: str, given: Any) -> tuple[Any, ...]:
    """Return one or several values of a type as a tuple."""
    several = (given,) if isinstance(given, kind) and kind is not tuple else given
    if not isinstance(several, Sequence):
        raise PolicyError(f"{name} must be a list or tuple of {KINDS[kind]}, not {given!r}")
    for each in several:
        if not isinstance(each, kind) or (isinstance(each, tuple) and len(each) != 2):
            raise PolicyError(f"{name} must hold {KINDS[kind]}, not {each!r}")
    return tuple(several)


def _check_removed(removed: tuple[tuple[Any, Any], ...]) -> None:
    """Check the form of `removed`. Whether the lists have these operators shows when they are
    loaded."""
    known = known_names() if removed else frozenset()
    for pair in removed:
        color, op = pair
        if not isinstance(color, str) or not isinstance(op, str):
            raise PolicyError(f"removed must hold {KINDS[tuple]}, two strings each, not {pair!r}")
        if color not in COLORS:
            lists, hint = ", ".join(COLORS), did_you_mean(color, COLORS)
            raise PolicyError(f"removed={pair!r}: {color!r} is none of {lists}.{hint}")
        check_operator(full_name(op, known) or dotted(op), f"removed={pair!r}", known)


def _low_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = LOW_DTYPES.get(dtype_name(dtype))
    if found is None:
        meant = SHORT.get(str(dtype))
        hint = f" Did you mean {meant!r}?" if meant else did_you_mean(dtype, LOW_DTYPES)
        if dtype_name(dtype) == "float32":
            hint = " A model in float32 is one that is not converted."
        raise PolicyError(
            f"unknown low precision {dtype!r}: give 'float16', 'bfloat16' or a Policy.{hint}"
        )
    return found


def _output_dtype(dtype: torch.dtype | str) -> torch.dtype:
    name = dtype_name(dtype)
    if name not in OUTPUT_DTYPES:
        raise PolicyError(f"output_dtype must be {_either(OUTPUT_DTYPES)}, not {dtype!r}")
    found: torch.dtype = getattr(torch, name)
    return found


def _level(level: Level | str) -> Level:
    try:
        return Level(level)
    except ValueError:
        legal = ", ".join(each.value for each in Level)
        raise PolicyError(f"unknown level {level!r}: choose one of {legal}") from None
