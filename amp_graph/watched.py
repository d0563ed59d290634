"""Find the first operator whose value, or whose gradient, was not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from amp_graph.dtypes import LOW
from amp_graph.graphs.aten import captured_of
from amp_graph.ir import NodeFacts

NAN, PLUS, MINUS = "NaN", "inf", "-inf"
NONE: frozenset[str] = frozenset()


def kinds(value: Any) -> frozenset[str]:
    """Return which of NaN, inf and -inf the tensors of a value hold. Waits for the device."""
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
    """Return the infinities among an operator's own arguments, as of a mask. Its result is meant to
    hold them."""
    numbers = (a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, float))
    infinite = (n for n in numbers if math.isinf(n))
    return frozenset(MINUS if n < 0 else PLUS for n in infinite)


class Gradients:
    """The gradients of one run of a graph. A value's gradient arrives after those of its
    readers."""

    def __init__(self) -> None:
        self._largest: dict[fx.Node, float] = {}  # finite number of each

    def giver(self, node: fx.Node, gradient: Tensor) -> fx.Node | None:
        """Return the reader whose derivative gave the gradient of a node's value; of several, the
        one with the largest gradient of its own. None: code outside of the graph gave it."""
        finite = gradient.detach().abs().nan_to_num(0, 0, 0)
        self._largest[node] = float(finite.max()) if gradient.numel() else 0.0
        readers = [r for r in node.users if r.op != "output"]
        return max(readers, key=lambda r: self._largest.get(r, -1.0), default=None)


LOWER = "Keep that operator in float32 (Policy.overrides) or lower the learning rate"
IN_FLOAT32 = "That operator is in float32: look at what it is given, or lower the learning rate"
ELSEWHERE = "Precision inside of the graphs is not the cause: look at the data and at the loss"


def _advice(computed_on: Any) -> str:
    tensors = (t for t in tree_leaves(computed_on) if isinstance(t, Tensor))
    return LOWER if any(t.dtype in LOW for t in tensors) else IN_FLOAT32


@dataclass
class FirstNonfinite:
    """The first value that was not finite in the graphs that ran under it, else the first gradient,
    and advice on what to do.

    Every tensor is looked at on the host, so this is for runs that are known to go wrong.
    """

    value: str | None = None
    gradient: str | None = None
    advice: str = ELSEWHERE

    def __str__(self) -> str:
        if self.value is not None:
            return f"the first value that was not finite: {self.value}"
        if self.gradient is not None:
            return f"the first gradient that was not finite: {self.gradient}"
        return "every value and gradient inside the graphs was finite"


def run_watched(
    module: fx.GraphModule, facts: Mapping[str, NodeFacts], found: FirstNonfinite, *args: Any
) -> Any:
    """Run an emitted graph and look at every value and, when it comes, every gradient."""
    return _Looking(module, facts, found).run(*args)


class _Looking(fx.Interpreter):
    """An interpreter that runs a graph node by node. An infinity that came in from outside is not
    blamed on an operator."""

    def __init__(
        self, module: fx.GraphModule, facts: Mapping[str, NodeFacts], found: FirstNonfinite
    ):
        super().__init__(module)
        self.extra_traceback = False  # in the message of an error
        self._facts, self._found, self._gradients = facts, found, Gradients()
        self._places = {n: place for place, n in enumerate(module.graph.nodes)}
        self._noted: int | None = None  # where what gave the gradient that was noted is

    def run_node(self, n: fx.Node) -> Any:
        found, operands = self._found, [self.env.get(a) for a in n.all_input_nodes]
        before = kinds(operands) if found.value is None else NONE  # it may write into them
        result = super().run_node(n)
        if found.value is not None or n.op not in ("placeholder", "call_function"):
            return result
        if n.op == "placeholder":
            self._look_at_input(n, kinds(result))
        elif kinds(result) - before - own_numbers(n):
            found.value, found.advice = self._spelled(n), _advice([result, operands])
        if isinstance(result, Tensor) and n.users and not result.is_leaf:
            self._look_at_gradient(n, result)
        return result

    def _look_at_input(self, n: fx.Node, has: frozenset[str]) -> None:
        found, name, is_weight = self._found, self._spelled(n), n.name not in self._facts
        if is_weight and has:
            found.value, found.advice = f"{name}, a weight that low precision cannot hold", LOWER
        elif has - {MINUS}:  # which may be meant, as in a mask
            found.value, found.advice = f"{name}, which came into a graph", ELSEWHERE

    def _look_at_gradient(self, n: fx.Node, value: Tensor) -> None:
        def look(gradient: Tensor | None) -> None:
            if n.op == "placeholder":
                handle.remove()  # what stands for a parameter outlives the run
            if gradient is None or found.value is not None:
                return
            gradient = gradient.to_dense()
            giver, name = self._gradients.giver(n, gradient), self._spelled(n)
            place = len(self._places) if giver is None else self._places[giver]
            if not kinds(gradient) or (found.gradient is not None and not is_before(place)):
                return
            self._noted = place
            if giver is None or captured_of(giver, self._facts).name not in self._facts:
                found.gradient = f"what the loss, or other code, gave for {name}, an output"
            else:
                found.gradient = f"what {self._spelled(giver)} gave for {name}"
                found.advice = _advice(gradient)

        def is_before(place: int) -> bool:
            """Whether this gradient came before the noted one. The gradients of parameters arrive
            together, once all are there."""
            return n.op == "placeholder" and self._noted is not None and place > self._noted

        found, handle = self._found, value.register_hook(look)

    def _spelled(self, n: fx.Node) -> str:
        captured = captured_of(n, self._facts)
        facts = self._facts.get(captured.meta.get("weight_of", captured.name))
        if facts is None:  # of what leaves early, the value is its last operand
            return self._spelled(n.all_input_nodes[-1]) if n.all_input_nodes else n.name
        if captured.op == "placeholder":
            return facts.label
        where = [f"in module '{facts.module_path}'"] if facts.module_path else []
        where += [f"at {facts.source}"] if facts.source else []
        what = facts.op if captured is n else f"the cast of {facts.label} ({facts.op})"
        return " ".join([what, *where])
