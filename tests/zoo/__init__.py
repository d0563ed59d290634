"""Tiny models of many architectures, random weights, for tests of the whole compiler."""

from __future__ import annotations

from . import perception, plain, text, unusual
from .case import Case
from .pretrained import shallow

__all__ = ["Case", "cases", "shallow"]


def cases() -> tuple[Case, ...]:
    """Every architecture, by family."""
    return (*plain.cases(), *unusual.cases(), *text.cases(), *perception.cases())
