"""Which operator was the first whose value, or whose gradient, was not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from amp_graph.ir import NodeFacts


class FirstNonfinite:
    """The answer for the graphs that ran under it: the first value, else the first gradient.

    It looks at every tensor on the host, so it is for runs that are known to go wrong.
    """

    def __init__(self) -> None:
        self.value: str | None = None
        self.gradient: str | None = None

    def __str__(self) -> str:
        if self.value is not None:
            return f"the first value that was not finite: {self.value}"
        if self.gradient is not None:
            return f"the first gradient that was not finite: of the result of {self.gradient}"
        return "every value and gradient inside the graphs was finite"


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
        if n.op == "placeholder" and n.name not in self._facts:  # a low-precision weight
            if self._found.value is None and not _is_finite(result):
                self._found.value = f"{self._weight(n)}, a weight that low precision cannot hold"
        if n.op != "call_function":
            return result
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            if self._found.value is None and not _is_finite(tensor) and self._was_finite(n):
                self._found.value = self._spelled(n)
            if tensor.requires_grad:
                tensor.register_hook(self._look_at_gradient(n))
        return result

    def _was_finite(self, n: fx.Node) -> bool:
        inputs = tree_leaves([self.env.get(a) for a in n.all_input_nodes])
        return all(_is_finite(t) for t in inputs if isinstance(t, Tensor))

    def _look_at_gradient(self, n: fx.Node) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if self._found.gradient is None and not _is_finite(gradient):
                self._found.gradient = self._spelled(n)

        return look

    def _weight(self, n: fx.Node) -> str:
        parameter = self._facts.get(n.meta.get("weight_of", ""))
        return parameter.label if parameter else n.name

    def _spelled(self, n: fx.Node) -> str:
        facts = self._facts.get(n.name)
        if facts is None:
            return f"{n.name} (a cast)"
        where = [f"in module '{facts.module_path}'"] if facts.module_path else []
        where += [f"at {facts.source}"] if facts.source else []
        return " ".join([facts.op, *where])


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())
