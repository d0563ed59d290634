"""The names of operators in lists, overrides and plans: "aten.add", "aten.pow.Scalar".

Private names of PyTorch used here:

    torch._C._dispatch_get_all_op_names, torch._ops._higher_order_ops    all operators
"""

from __future__ import annotations

from collections.abc import Container
from typing import TypeAlias

import torch

from amp_graph.errors import did_you_mean

Names: TypeAlias = frozenset[str]

CLOSE = 0.7  # of names of few letters, of which there are thousands


def spellings(name: str) -> tuple[str, ...]:
    """Return the entries that may stand for the overload `name`, the most specific first."""
    if "." not in name:  # higher-order operators print without their namespace
        return (f"higher_order.{name}",)
    packet, _, overload = name.rpartition(".")
    if not packet.endswith("_") or packet.endswith("__"):
        return name, packet
    return name, packet, f"{packet[:-1]}.{overload}", packet[:-1]


def dotted(name: str) -> str:
    """Return an operator's name as entries spell it, given as the dispatcher may spell it,
    `mylib::op`."""
    return name.replace("::", ".", 1)


def full_name(name: str, known: Container[str]) -> str | None:
    """Return the name of an operator or overload as entries spell it, with "aten."; None if there
    is none."""
    name = dotted(name)
    return next((full for full in (name, f"aten.{name}") if full in known), None)


def no_operator(name: str, known: Names) -> str:
    """Return the sentence about a name that is no operator's, with a close one that is."""
    return f"torch {torch.__version__} has no operator {name!r}.{close_operator(name, known)}"


def close_operator(name: str, known: Names) -> str:
    """Return `did_you_mean` for a name that may lack "aten.". In a namespace that exists the rest
    of the name has to be close: a common beginning does not count."""
    space, dot, rest = dotted(name).partition(".")
    if dot and not has_namespace(space, known):
        return did_you_mean(f"{space}.{rest}", known, CLOSE)
    space, rest = (space, rest) if dot else ("aten", space)
    inside = (n.removeprefix(f"{space}.") for n in known if n.startswith(f"{space}."))
    hint = did_you_mean(rest, inside, CLOSE)
    return hint.replace(" '", f" '{space}.")


def has_namespace(namespace: str, known: Names) -> bool:
    """Whether a library of operators is registered."""
    return any(name.startswith(f"{namespace}.") for name in known)


def known_names() -> Names:
    """Return every operator and overload of the running process, as entries spell them."""
    known = {f"higher_order.{name}" for name in torch._ops._higher_order_ops}
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.replace("::", ".", 1).replace(".", ":", 1).partition(".")
        packet = packet.replace(":", ".")
        known |= {packet, f"{packet}.{overload or 'default'}"}
    return frozenset(known)
