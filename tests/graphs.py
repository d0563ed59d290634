"""Captured graphs for tests: from functions, from modules, and from a small language.

In the language, one letter is one operator of a chain: w allow, g infer, c clear, b deny, n deny
with a bounded result, u on no list. A capital letter stands for the same operator in low
precision, so that a chain spells out what is expected of it: "bgWCG". A bar only groups. (The
letters are those of TensorFlow's tests of its own pass.)

Captured nodes are named by the list they are on: allow1, infer1, infer2, clear1, deny1, open1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from amp_graph.backend.rewrite import rewrite, split_where_wide
from amp_graph.capture.retrace import trace
from amp_graph.ir import Color, Plan
from amp_graph.oplists import load_lists
from amp_graph.policy import Policy

BFLOAT16 = Policy("bfloat16", level="safe")
FLOAT16 = Policy("float16", level="safe")
SIZE = 8
X, W = torch.rand(2, SIZE, SIZE, generator=torch.Generator().manual_seed(0))

STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "w": lambda x, weight: x @ weight,
    "g": lambda x, weight: torch.atan(x),
    "c": lambda x, weight: torch.relu(x),
    "b": lambda x, weight: torch.exp(x),
    "n": lambda x, weight: torch.softmax(x, -1),
    "u": lambda x, weight: torch.ops.aten._test_warn_in_autograd(x),  # a copy, on no list
}
PREFIXES = {None: "open", **{c: c.value for c in Color}}


@dataclass(frozen=True)
class Rewritten:
    """A captured graph, what became of it, and why."""

    captured: fx.GraphModule
    module: fx.GraphModule
    plan: Plan

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def is_low(self, name: str) -> bool:
        return name in self.plan.low

    def color(self, name: str) -> Color:
        return self.plan.paints[name].color

    def rule(self, name: str) -> str:
        return self.plan.paints[name].rule

    def casts(self) -> list[str]:
        """ "x -> bfloat16" for every cast written, in graph order."""
        dtypes = [str(c.dtype).removeprefix("torch.") for c in self.plan.casts]
        return [f"{c.value} -> {d}" for c, d in zip(self.plan.casts, dtypes, strict=True)]

    def nodes(self, packet: str) -> list[fx.Node]:
        """The emitted calls of one operator, "exp" or "_to_copy"."""
        calls = [n for n in self.module.graph.nodes if n.op == "call_function"]
        return [n for n in calls if str(n.target).startswith(f"aten.{packet}.")]


def capture(function: Callable[..., Any], *args: torch.Tensor, weights: int = 0) -> fx.GraphModule:
    """The ATen graph of `function(*args)`; the last `weights` arguments count as parameters."""
    module = trace(function, args)
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    for node, given in zip(inputs, args, strict=True):
        node.meta["val"].requires_grad_(given.requires_grad)
    for node in inputs[len(inputs) - weights :] if weights else ():
        node.meta["is_parameter"] = True
    _name_by_color(module.graph)
    module.recompile()
    return module


def capture_module(module: nn.Module, *inputs: torch.Tensor) -> fx.GraphModule:
    """The ATen graph of a module; it takes the inputs, then buffers, then parameters."""
    buffers, parameters = dict(module.named_buffers()), dict(module.named_parameters())
    state = {**buffers, **parameters}

    def function(*args: torch.Tensor) -> Any:
        given = dict(zip(state, args[len(inputs) :], strict=True))
        return torch.func.functional_call(module, given, args[: len(inputs)])

    captured = capture(function, *inputs, *state.values(), weights=len(parameters))
    placeholders = [n for n in captured.graph.nodes if n.op == "placeholder"]
    for node, name in zip(placeholders[len(inputs) :], state, strict=True):
        node._rename(name.replace(".", "_"))
    captured.recompile()
    return captured


def rewritten(captured: fx.GraphModule, policy: Policy = BFLOAT16) -> Rewritten:
    """Run every stage on a captured graph."""
    lists = policy.load_lists()
    captured = split_where_wide(captured, policy, lists)
    module, plan = rewrite(captured, policy, lists)
    return Rewritten(captured, module, plan)


def run(
    function: Callable[..., Any],
    *args: torch.Tensor,
    weights: int = 0,
    policy: Policy = BFLOAT16,
) -> Rewritten:
    """Capture a function and rewrite it."""
    return rewritten(capture(function, *args, weights=weights), policy)


def chain(spelling: str, *, outputs: str = "") -> fx.GraphModule:
    """The graph of a chain in the small language, from a float32 input of (8, 8).

    `outputs` names nodes that are returned beside the last one.
    """
    letters = spelling.lower().replace("|", "")

    def function(x: torch.Tensor, weight: torch.Tensor) -> Any:
        values = [x]
        for letter in letters:
            values.append(STEPS[letter](values[-1], weight))
        return values[-1]

    captured = capture(function, X, W, weights=1)
    if outputs:
        wanted = {n.name: n for n in captured.graph.nodes}
        (end,) = (n for n in captured.graph.nodes if n.op == "output")
        end.args = ((end.args[0], *(wanted[name] for name in outputs.split())),)
        captured.recompile()
    return captured


def spelled(result: Rewritten) -> str:
    """A rewritten chain in the small language, capitals where it runs low."""
    letters = {"allow": "w", "infer": "g", "clear": "c", "deny": "b", "open": "u"}
    text = ""
    for name in result.plan.facts:
        letter = letters.get(name.rstrip("0123456789"))
        if letter == "b" and result.plan.facts[name].bounded:
            letter = "n"
        if letter is not None:
            text += letter.upper() if result.is_low(name) else letter
    return text


def compact(result: Rewritten) -> str:
    """The decisions for a graph as a small table, for golden files."""
    rows: list[tuple[str, ...]] = []
    pending = {cast.readers[0]: [] for cast in result.plan.casts}
    for cast in result.plan.casts:
        pending[cast.readers[0]].append(cast)
    for name, facts in result.plan.facts.items():
        for cast in pending.get(name, ()):
            dtype = str(cast.dtype).removeprefix("torch.")
            note = "saturating" if cast.saturate else ""
            text = f"{cast.value} -> {dtype} for {', '.join(cast.readers)}"
            rows.append(("cast", "", text, note))
        if facts.op in ("placeholder", "get_attr"):
            continue
        paint = result.plan.paints[name]
        operator = facts.op.removeprefix("aten.").removesuffix(".default")
        text = f"{name} = {operator}({', '.join(facts.reads)})"
        why = f"{paint.rule}: {paint.because}" if paint.because else paint.rule
        rows.append((paint.color.value, "low" if result.is_low(name) else "", text, why))
    widths = [min(72, max((len(row[i]) for row in rows), default=0)) for i in range(3)]
    lines = (
        "  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[3]]) for r in rows
    )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _name_by_color(graph: fx.Graph) -> None:
    lists, seen = load_lists(), Counter[str]()
    for node in graph.nodes:
        if node.op == "placeholder":
            node._rename(node.name.removesuffix("_1"))
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            listing = lists.lookup(node.target)
            prefix = PREFIXES[listing.color if listing else None]
            seen[prefix] += 1
            node._rename(f"{prefix}{seen[prefix]}")
