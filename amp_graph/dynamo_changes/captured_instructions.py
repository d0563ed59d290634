"""How Dynamo captures single instructions of Python's.

Private names of PyTorch used here:

    torch._dynamo.symbolic_convert.InstructionTranslatorBase.dispatch_table, of each subclass
                                             by opcode, how Dynamo captures an instruction
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterator
from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslatorBase

Capture = Callable[[Any, Any], Any]


@contextlib.contextmanager
def instructions_through(
    around: Callable[[Capture, Any, Any], Any], opcodes: Container[int]
) -> Iterator[None]:
    """Within, these instructions are captured by `around(capture, frame, instruction)`, which is
    given how Dynamo captures them."""
    tables = {kind: kind.dispatch_table for kind in _kinds(InstructionTranslatorBase)}
    for kind, table in tables.items():
        kind.dispatch_table = [
            functools.partial(around, capture) if opcode in opcodes and capture else capture
            for opcode, capture in enumerate(table)
        ]
    try:
        yield
    finally:
        for kind, table in tables.items():
            kind.dispatch_table = table


def _kinds(kind: Any) -> Iterator[Any]:
    if "dispatch_table" in vars(kind):
        yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)
