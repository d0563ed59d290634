"""What a user asks for: the low precision, the lists, and exceptions to them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from amp_graph.errors import PolicyError, did_you_mean
from amp_graph.ir import LOW_DTYPES, Color, Level, NodeFacts, dtype_name
from amp_graph.oplists import OpLists, UserLists, known_names, load_lists
from amp_graph.training.loss_scale import LossScale

OUTPUT_DTYPES = ("float16", "bfloat16", "float32", "float64")
COMPILERS = ("eager", "inductor")
EMULATION = ("native", "float32")
REFRESH = (ALWAYS, ON_CHANGE) = "always", "on_change"
FLOAT16_DEVICES = frozenset({"cuda", "mps"})  # elsewhere float16 arithmetic is emulated or slow


@dataclass(frozen=True)
class Override:
    """A colour for all nodes that match every criterion given; it beats the lists.

    module: glob over module paths ("encoder.*.attn"); a path matches with all below it.
    op: operator as reports spell it, "aten.gelu" or "aten.gelu.default".
    name: glob over node names.
    where: a function of NodeFacts that returns whether the node matches.
    """

    color: Color | str
    module: str | None = None
    op: str | None = None
    name: str | None = None
    where: Callable[[NodeFacts], bool] | None = None

    def __post_init__(self) -> None:
        legal = [c.value for c in Color if c is not Color.KEEP]
        if getattr(self.color, "value", self.color) not in legal:
            raise PolicyError(f"override colour {self.color!r}: choose one of {', '.join(legal)}")
        object.__setattr__(self, "color", Color(self.color))
        if not any((self.module, self.op, self.name, self.where)):
            raise PolicyError("an override needs module=, op=, name= or where= to match nodes by")
        if self.op is not None:
            _check_operator(str(self.op))

    def matches(self, facts: NodeFacts) -> bool:
        if self.module is not None and not _inside(facts.module_path, self.module):
            return False
        if self.op is not None and not (f"{facts.op}.").startswith(f"{self.op}."):
            return False
        if self.name is not None and not fnmatch.fnmatchcase(facts.name, self.name):
            return False
        try:
            return self.where is None or bool(self.where(facts))
        except Exception as error:
            place = f" at {facts.source}" if facts.source else ""
            raise PolicyError(
                f"Override({self}) raised {type(error).__name__}: {error} for {facts.op} "
                f"{facts.label!r}{place}; it gets an amp_graph.ir.NodeFacts"
            ) from error

    def __str__(self) -> str:
        given = {"module": self.module, "op": self.op, "name": self.name}
        text = ", ".join(f"{k}={v}" for k, v in given.items() if v is not None)
        return f"{text or 'where=' + getattr(self.where, '__name__', 'predicate')}"


@dataclass(frozen=True)
class Policy:
    """How to convert one model.

    dtype: "float16", "bfloat16", the torch dtype, or None: float16 where the device has fast
        float16 (CUDA), bfloat16 elsewhere.
    lists: the user's operator lists, merged over the shipped ones: a TOML file, a mapping such
        as {"deny": ["aten.gelu"]}, or several of them.
    overrides: exceptions for single nodes or modules; the first that matches wins.
    unlisted: (colour, operator) pairs to take off the shipped lists.
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
        parameter's version; writes through `parameter.data` are not (see `training.traces`).
    emulation: how a CPU without kernels for the low precision computes products in it: "native",
        PyTorch's way, element by element; or "float32", by float32 kernels, whose results are
        rounded, several times faster (see `emulation`).
    compiler: what runs the rewritten graphs: "eager", PyTorch operator by operator, or "inductor",
        which compiles them.
    compiler_options: for Inductor, a mode of `torch.compile`, such as "reduce-overhead" (CUDA
        graphs), or a mapping of its settings.
    """

    dtype: torch.dtype | str | None = None
    lists: UserLists | None = None
    overrides: tuple[Override, ...] = ()
    unlisted: tuple[tuple[str, str], ...] = ()
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
        if isinstance(self.keep_float32, str):
            object.__setattr__(self, "keep_float32", (self.keep_float32,))
        if isinstance(self.overrides, Override):
            object.__setattr__(self, "overrides", (self.overrides,))
        for override in self.overrides:
            if not isinstance(override, Override):
                raise PolicyError(f"overrides must hold Override objects, not {override!r}")
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
        if self.compiler == "inductor" and self.emulation == "float32":
            raise PolicyError("emulation='float32' is for compiler='eager'")
        if self.compiler_options is None:
            return
        if self.compiler == "eager":
            raise PolicyError("compiler_options are for compiler='inductor'")
        if not isinstance(self.compiler_options, str | Mapping):
            raise PolicyError(
                f"compiler_options must be a mode of torch.compile or a mapping of settings, "
                f"not {self.compiler_options!r}"
            )
        try:
            self.inductor_settings()
        except RuntimeError as error:
            raise PolicyError(f"compiler_options: {error}") from None

    def dtype_for(self, device_types: Iterable[str]) -> torch.dtype:
        """The low precision for a graph on these devices."""
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        fast = FLOAT16_DEVICES.intersection(device_types)
        return torch.float16 if fast else torch.bfloat16

    def loss_scale_for(self, dtype: torch.dtype) -> LossScale | None:
        """How gradients are scaled in graphs of this low precision; None: they are not."""
        if self.loss_scale == "dynamic":
            return LossScale() if dtype is torch.float16 else None
        assert not isinstance(self.loss_scale, (str, float))
        return self.loss_scale

    def inductor_settings(self) -> Mapping[str, Any]:
        """The compiler options with a mode spelled out. Raises RuntimeError for an unknown one."""
        if not isinstance(self.compiler_options, str):
            return self.compiler_options or {}
        settings: dict[str, Any] = torch._inductor.list_mode_options(self.compiler_options)
        return settings

    def override_for(self, facts: NodeFacts) -> tuple[Color, str] | None:
        """The colour the user gave this node and the words that say so."""
        for override in self.overrides:
            if override.matches(facts):
                return Color(override.color), str(override)
        for glob in self.keep_float32:
            if _inside(facts.module_path, glob):
                return Color.DENY, f"keep_float32={glob}"
        return None

    def unmatched(self, paths: Collection[str]) -> list[tuple[str, str]]:
        """The globs of modules that match none of these paths, each after what it was given as."""
        globs = [(f"keep_float32={glob!r}", glob) for glob in self.keep_float32]
        modules = [o.module for o in self.overrides if o.module is not None]
        globs += [(f"Override(module={glob!r})", glob) for glob in modules]
        return [(given, g) for given, g in globs if not any(_inside(path, g) for path in paths)]

    def load_lists(self) -> OpLists:
        lists = load_lists()
        for color, op in self.unlisted:
            lists = lists.without(color, op)
        return lists if self.lists is None else lists.merged(self.lists)


def as_policy(policy: Policy | str | torch.dtype | None) -> Policy:
    """A Policy from what `convert(model, policy=...)` accepts. Raises PolicyError."""
    if isinstance(policy, Policy):
        return policy
    return Policy(dtype=policy)


def _either(legal: Iterable[str]) -> str:
    return " or ".join(map(repr, legal))


def _anchored(lists: Any) -> Any:
    """The lists with absolute paths: they are read again for a copy of a model, say, and a script
    may have gone to another folder meanwhile."""
    if isinstance(lists, str | Path):
        return Path(lists).absolute()
    return [_anchored(given) for given in lists] if isinstance(lists, list | tuple) else lists


def _low_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = LOW_DTYPES.get(dtype_name(dtype))
    if found is None:
        raise PolicyError(f"unknown policy {dtype!r}: give 'float16', 'bfloat16' or a Policy")
    return found


def _output_dtype(dtype: torch.dtype | str) -> torch.dtype:
    name = dtype_name(dtype)
    if name not in OUTPUT_DTYPES:
        raise PolicyError(f"output_dtype must be {_either(OUTPUT_DTYPES)}, not {dtype!r}")
    found: torch.dtype = getattr(torch, name)
    return found


def _check_operator(op: str) -> None:
    """Refuse an operator that no node can have; other libraries' may be registered later."""
    known = known_names()
    is_missing = op.startswith(("aten.", "aten::")) and op not in known
    if is_missing or f"aten.{op}" in known:
        name = op.replace("::", ".") if is_missing else f"aten.{op}"
        raise PolicyError(
            f"Override(op={op!r}): torch {torch.__version__} has no operator of this name."
            f"{did_you_mean(name, known)}"
        )


def _level(level: Level | str) -> Level:
    try:
        return Level(level)
    except ValueError:
        legal = ", ".join(each.value for each in Level)
        raise PolicyError(f"unknown level {level!r}: choose one of {legal}") from None


def _inside(path: str, glob: str) -> bool:
    """Whether a module path, or a module above it, matches."""
    parts = path.split(".")
    return any(
        fnmatch.fnmatchcase(".".join(parts[:length]), glob) for length in range(1, len(parts) + 1)
    )
