"""Which operator was the first whose value, or whose gradient, was not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from amp_graph.capture.aten import captured_of
from amp_graph.dtypes import LOW
from amp_graph.ir import NodeFacts

NAN, PLUS, MINUS = "NaN", "inf", "-inf"
NONE: frozenset[str] = frozenset()


def kinds(value: Any) -> frozenset[str]:
    """Which of NaN, inf and -inf are in the tensors of a value; it waits for the device."""
    return NONE.union(*(_kinds(t) for t in tree_leaves(value) if isinstance(t, Tensor)))


def _kinds(tensor: Tensor) -> frozenset[str]:
    tensor = tensor.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()) or bool(tensor.isfinite().all()):
        return NONE
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tests = {NAN: torch.isnan, PLUS: torch.isposinf, MINUS: torch.isneginf}
    return frozenset(kind for kind, test in tests.items() if bool(test(tensor).any()))


def own_numbers(node: fx.Node) -> frozenset[str]:
    """The infinities among an operator's own arguments, as of a mask: what it is to give."""
    numbers = (a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, float))
    infinite = (n for n in numbers if math.isinf(n))
    return frozenset(MINUS if n < 0 else PLUS for n in infinite)


LOWER = "Keep that operator in float32 (Policy.overrides) or lower the learning rate"
IN_FLOAT32 = "That operator is in float32: look at what it is given, or lower the learning rate"
ELSEWHERE = "Precision inside of the graphs is not the cause: look at the data and at the loss"


def _advice(computed_on: Any) -> str:
    tensors = (t for t in tree_leaves(computed_on) if isinstance(t, Tensor))
    return LOWER if any(t.dtype in LOW for t in tensors) else IN_FLOAT32


class FirstNonfinite:
    """The answer for the graphs that ran under it: the first value, else the first gradient; and
    what to do about it.

    It looks at every tensor on the host, so it is for runs that are known to go wrong.
    """

    def __init__(self) -> None:
        self.value: str | None = None
        self.gradient: str | None = None
        self.advice = ELSEWHERE

    def __str__(self) -> str:
        if self.value is not None:
            return f"the first value that was not finite: {self.value}"
        if self.gradient is not None:
            return f"the first gradient that was not finite: {self.gradient}"
        return "every value and gradient inside the graphs was finite"

    def note_value(self, what: str, advice: str) -> None:
        self.value, self.advice = what, advice

    def note_gradient(self, what: str, advice: str) -> None:
        self.gradient, self.advice = what, advice


def run_watched(
    module: fx.GraphModule, facts: Mapping[str, NodeFacts], found: FirstNonfinite, *args: Any
) -> Any:
    """Run an emitted graph and look at every value and, when it comes, every gradient."""
    return _Looking(module, facts, found).run(*args)


class _Looking(fx.Interpreter):
    """Runs a graph node by node; an infinity that came in from outside is not an operator's."""

    def __init__(
        self, module: fx.GraphModule, facts: Mapping[str, NodeFacts], found: FirstNonfinite
    ):
        super().__init__(module)
        self._facts, self._found = facts, found

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "placeholder":
            self._look_at_input(n, result)
        if n.op != "call_function":
            return result
        if self._found.value is None:
            operands = [self.env.get(a) for a in n.all_input_nodes]
            if kinds(result) - kinds(operands) - own_numbers(n):
                self._found.note_value(self._spelled(n), _advice([result, operands]))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._look_at_gradient(n))
        return result

    def _look_at_input(self, n: fx.Node, value: Any) -> None:
        facts = self._facts.get(n.name)
        if self._found.value is not None:
            return
        if facts is None and kinds(value):
            weight = self._facts.get(n.meta.get("weight_of", ""))
            name = n.name if weight is None else weight.label
            self._found.note_value(f"{name}, a weight that low precision cannot hold", LOWER)
        elif facts is not None and kinds(value) - {MINUS}:  # which may be meant, as in a mask
            self._found.note_value(f"{facts.label}, which came into a graph", ELSEWHERE)

    def _look_at_gradient(self, n: fx.Node) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            found = self._found
            if found.value is not None or found.gradient is not None or not kinds(gradient):
                return
            if any(reader.op == "output" for reader in n.users):
                came = f"what the loss, or other code, gave for {self._spelled(n)}, an output"
                found.note_gradient(came, ELSEWHERE)
            else:
                found.note_gradient(f"of the result of {self._spelled(n)}", _advice(gradient))

        return look

    def _spelled(self, n: fx.Node) -> str:
        captured = captured_of(n, self._facts)
        facts = self._facts.get(captured.name)
        if facts is None:
            return n.name
        where = [f"in module '{facts.module_path}'"] if facts.module_path else []
        where += [f"at {facts.source}"] if facts.source else []
        what = facts.op if captured is n else f"the cast of {facts.label} ({facts.op})"
        return " ".join([what, *where])
