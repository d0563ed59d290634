"""Pieces of a model's code that are captured by themselves, behind a graph break or called by code
that Dynamo left: those that are captured anew again and again are left to Python.

What is left runs as it is, with all that follows in its function; what it calls is captured. A
piece of a function in float32, such as one that reads texts, or a part of a loss, may be left at
once, which changes no number. Any other may be left, under autocast, before all of the model is:
one over a list that is another in each call, say, behind a network that always is the same.

Those in float32 are left also where all graphs together are too small to be worth entering: what a
hook logs of each parameter, say.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from amp_graph.callers import is_ours

AGAIN = 3  # new captures of a piece that may be left
PART = 1 / 2  # of a model's operators: what has more of them is no piece


# Dynamo's name for the code behind a break, which is what is left of a function.
RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")


def _function(code: CodeType) -> tuple[str, str]:
    """The function that a piece of code is of, by file and name."""
    return code.co_filename, RESUMED.sub(r"\1", code.co_qualname)


@dataclass
class Piece:
    """A piece of code that was captured.

    times: how often, for a guard that failed.
    operators: the most on float32 tensors that it had.
    is_converted: whether anything in it was not in float32.
    guard: the one that failed last.
    """

    times: int = 0
    operators: int = 0
    is_converted: bool = False
    guard: str = ""
    is_left: bool = False

    def leave(self, why: str) -> str:
        self.is_left = True
        return f"it was {why}"


class Pieces:
    """The pieces of one model that were captured."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[CodeType, Piece] = weakref.WeakKeyDictionary()
        self._changing = threading.Lock()

    def are_left(self, code: CodeType) -> bool:
        piece = self._known.get(code)
        return piece is not None and piece.is_left

    def add(self, code: CodeType, operators: int, is_converted: bool, guard: str) -> None:
        """Take note that this code was captured, with so many operators on float32 tensors.
        A call's own beginning is no piece. `guard`: for which it was captured anew, else ""."""
        if is_ours(code.co_filename):
            return
        with self._changing:
            piece = self._known.setdefault(code, Piece())
        piece.times, piece.guard = piece.times + bool(guard), guard or piece.guard
        piece.operators = max(piece.operators, operators)
        piece.is_converted |= is_converted

    def leave(self, operators: float) -> dict[CodeType, str]:
        """Leave those to Python, from their next call on, that were captured anew again and again,
        and are in float32 or have no more operators than so many. Returns why, for each."""
        return {
            code: piece.leave(f"captured anew again and again, the last time for {piece.guard}")
            for code, piece, function in self._not_left()
            if piece.times >= AGAIN
            and (not function.is_converted or function.operators <= operators)
        }

    def leave_those_in_float32(self) -> dict[CodeType, str]:
        """Leave all of functions in which nothing is converted. Returns why, for each."""
        return {
            code: piece.leave("in float32, in graphs that take longer to enter than they save")
            for code, piece, function in self._not_left()
            if not function.is_converted
        }

    def _not_left(self) -> Iterator[tuple[CodeType, Piece, Piece]]:
        """Yield each piece, and all those of its function in one: they are left with it."""
        with self._changing:
            known = [*self._known.items()]
        functions: dict[Any, Piece] = {}
        for code, piece in known:
            function = functions.setdefault(_function(code), Piece())
            function.operators += piece.operators
            function.is_converted |= piece.is_converted
        for code, piece in known:
            if not piece.is_left:
                yield code, piece, functions[_function(code)]
