"""Dataclasses that count something, and add up field by field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self


class Summable:
    """A base for such dataclasses."""

    def __add__(self, other: Self) -> Self:
        counting: Any = self
        sums = (getattr(self, f.name) + getattr(other, f.name) for f in fields(counting))
        return type(self)(*sums)
