"""The variables that say how models are converted, and what they say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amp_graph.errors import AmpGraphError, PolicyError, did_you_mean
from amp_graph.files import check_folder
from amp_graph.ir import COLORS
from amp_graph.levels import LEVELS
from amp_graph.policy import COMPILERS, EMULATION, REFRESH, Policy, as_policy

SCALES = "dynamic, none or a finite number above 0"
YES, NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")

VARIABLES = {
    "AMP_GRAPH_ENABLE": "1, true, yes or on converts, 0 or nothing leaves everything alone",
    "AMP_GRAPH_DTYPE": "float16 or bfloat16 (float16 on CUDA and MPS, else bfloat16)",
    "AMP_GRAPH_LISTS": f"operator lists to put on top: TOML files, separated by '{os.pathsep}'",
    **{
        f"AMP_GRAPH_{color.upper()}LIST_{change}": f"operators to {verb} that list, by commas"
        for color in COLORS
        for change, verb in (("ADD", "put on"), ("REMOVE", "take off"))
    },
    "AMP_GRAPH_LOSS_SCALE": f"{SCALES}, for a static scale (dynamic)",
    "AMP_GRAPH_DUMP": "a folder for annotated graphs and the report",
    "AMP_GRAPH_LEVEL": f"how far tensors are narrowed: {' or '.join(LEVELS)}",
    "AMP_GRAPH_REFRESH_WEIGHTS": f"low-precision weights are made anew {' or '.join(REFRESH)}",
    "AMP_GRAPH_EMULATION": f"what a CPU without kernels computes by: {' or '.join(EMULATION)}",
    "AMP_GRAPH_COMPILER": f"what runs the graphs: {' or '.join(COMPILERS)}",
    "AMP_GRAPH_SKIP": "module paths that stay in float32, with * and ?, by commas",
    "AMP_GRAPH_VERBOSE": "1 says what is converted, when it is",
}


@dataclass(frozen=True)
class Settings:
    """How models of a script are converted, and what is told of it.

    policy: as `convert` takes it. dump: the folder for the report and what `dump` writes of each
    model. verbose: whether to say what is converted, when it is.
    """

    policy: Policy = field(default_factory=Policy)
    dump: Path | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", as_policy(self.policy))
        if self.dump is not None:  # absolute, since a script may go to another folder
            object.__setattr__(self, "dump", check_folder(self.dump).absolute())
        if not isinstance(self.verbose, bool):
            raise PolicyError(f"verbose must be True or False, not {self.verbose!r}")
        self.policy.load_lists()

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """Raises PolicyError or ListError for a wrong value, in words that say what is legal."""
        given = {k: v.strip() for k, v in environment.items() if k.startswith("AMP_GRAPH_")}
        unknown = sorted(given.keys() - VARIABLES.keys())
        if unknown:
            hint = did_you_mean(unknown[0], VARIABLES)
            raise PolicyError(f"{unknown[0]} is not known; there are {', '.join(VARIABLES)}.{hint}")
        lists = _items(given, "AMP_GRAPH_LISTS", os.pathsep)
        added = {c: _group(given, f"AMP_GRAPH_{c.upper()}LIST_ADD") for c in COLORS}
        removed = {c: _items(given, f"AMP_GRAPH_{c.upper()}LIST_REMOVE") for c in COLORS}
        policy = Policy(
            dtype=_choice(given, "AMP_GRAPH_DTYPE", ("", "float16", "bfloat16")) or None,
            lists=[*lists, *([added] if any(added.values()) else [])] or None,
            removed=tuple((c, op) for c in COLORS for op in removed[c]),
            keep_float32=tuple(_items(given, "AMP_GRAPH_SKIP")),
            loss_scale=_loss_scale(given.get("AMP_GRAPH_LOSS_SCALE", "")),
            level=_choice(given, "AMP_GRAPH_LEVEL", ("", *LEVELS)) or "balanced",
            refresh_weights=_choice(given, "AMP_GRAPH_REFRESH_WEIGHTS", ("", *REFRESH)) or "always",
            emulation=_choice(given, "AMP_GRAPH_EMULATION", ("", *EMULATION)) or "native",
            compiler=_choice(given, "AMP_GRAPH_COMPILER", ("", *COMPILERS)) or "eager",
        )
        verbose = _choice(given, "AMP_GRAPH_VERBOSE", YES + NO) in YES
        return cls(policy, _folder(given, "AMP_GRAPH_DUMP"), verbose)


def asks_to_convert(environment: Mapping[str, str]) -> bool:
    """Raises PolicyError for a wrong value of AMP_GRAPH_ENABLE."""
    name = "AMP_GRAPH_ENABLE"
    return _choice({name: environment.get(name, "").strip()}, name, YES + NO) in YES


def _choice(given: Mapping[str, str], name: str, legal: tuple[str, ...]) -> str:
    value = given.get(name, "").lower()
    if value not in legal:
        raise PolicyError(f"{name}={given[name]}: choose one of {', '.join(v for v in legal if v)}")
    return value


def _folder(given: Mapping[str, str], name: str) -> Path | None:
    try:
        return check_folder(given[name]) if given.get(name) else None
    except AmpGraphError as error:
        raise PolicyError(f"{name}={error}") from error


def _items(given: Mapping[str, str], name: str, separator: str = ",") -> list[str]:
    return [item.strip() for item in given.get(name, "").split(separator) if item.strip()]


def _group(given: Mapping[str, str], name: str) -> dict[str, Any]:
    """The operators in a variable as a group of a list, which has the variable's name."""
    ops = _items(given, name)
    return {name: {"why": f"Listed in {name}.", "ops": ops}} if ops else {}


def _loss_scale(value: str) -> float | str | None:
    if value.lower() in ("", "dynamic"):
        return "dynamic"
    if value.lower() == "none":
        return None
    try:
        scale = float(value)
    except ValueError:
        scale = 0.0
    if not 0 < scale < float("inf"):
        raise PolicyError(f"AMP_GRAPH_LOSS_SCALE={value}: choose {SCALES}")
    return scale
