"""An exception to the lists: a colour for nodes that match."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass

import torch

from amp_graph.errors import PolicyError
from amp_graph.ir import Color, NodeFacts
from amp_graph.operator_names import (
    Names,
    close_operator,
    dotted,
    full_name,
    known_names,
    spellings,
)

PYTHON = ("torch", "nn", "F")  # the functions there go by other names in a graph


@dataclass(frozen=True)
class Override:
    """A colour for all nodes that match every criterion given; it beats the lists.

    module: glob over module paths ("encoder.*.attn"); a path matches with all below it.
    op: operator as lists spell it, "gelu", "aten.gelu" or "aten.gelu.default"; in place too. That
        of a library, which may be registered later, as "mylib::op" or "mylib.op".
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
        for criterion in ("module", "op", "name"):
            given = getattr(self, criterion)
            if given is not None and not isinstance(given, str):
                raise PolicyError(f"Override({criterion}=...) takes a string, not {given!r}")
        if not any((self.module, self.op, self.name, self.where)):
            raise PolicyError("an override needs module=, op=, name= or where= to match nodes by")
        if self.where is not None and not callable(self.where):
            raise PolicyError(f"Override(where=...) takes a function, not {self.where!r}")
        if self.op is not None:
            given, known = self.op, known_names()
            object.__setattr__(self, "op", full_name(self.op, known) or dotted(self.op))
            check_operator(self.op, f"Override(op={given!r})", known)

    def matches(self, facts: NodeFacts) -> bool:
        if self.module is not None and not inside(facts.module_path, self.module):
            return False
        if self.op is not None and not self.names(facts.op):
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

    def names(self, op: str) -> bool:
        """Whether its `op` is this overload, or all of its operator."""
        return self.op in (op, *spellings(op))

    def __str__(self) -> str:
        where = None if self.where is None else getattr(self.where, "__name__", "predicate")
        given = {"module": self.module, "op": self.op, "name": self.name, "where": where}
        return ", ".join(f"{k}={v}" for k, v in given.items() if v is not None)


def check_operator(op: str, given: str, known: Names) -> None:
    """Refuse an operator that no node can have; those of other libraries may be registered later.
    Raises PolicyError about what was `given`."""
    namespace, dot, _ = op.partition(".")
    is_missing = namespace in ("aten", *PYTHON) and op not in known
    is_bare = not dot and f"higher_order.{op}" not in known
    if is_missing or is_bare:
        last = op.rpartition(".")[2].lower()
        name = op if namespace == "aten" else f"aten.{last}"
        raise PolicyError(
            f"{given}: torch {torch.__version__} has no operator of this name."
            f"{close_operator(name, known)}"
        )


def inside(path: str, glob: str) -> bool:
    """Whether a module path, or a module above it, matches."""
    parts = path.split(".")
    return any(
        fnmatch.fnmatchcase(".".join(parts[:length]), glob) for length in range(1, len(parts) + 1)
    )
