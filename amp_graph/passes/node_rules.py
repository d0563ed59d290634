"""The rules of paint that look at one node alone, by its number. Each returns a Paint, or None to
leave the node open."""

from __future__ import annotations

import math

import torch

from amp_graph.ir import FREE, Color, NodeFacts, Paint
from amp_graph.passes.analysis import AnalyzedGraph, NodeRule, adds_few_terms
from amp_graph.passes.wrong_kernels import without_wrong_kernel
from amp_graph.rules import Rule

LOOKUPS = frozenset(
    {
        "aten.index.Tensor",
        "aten._unsafe_index.Tensor",
        "aten.take.default",
        "aten.embedding.default",
    }
)


def fixed_as_captured(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Keep a node that has nothing to convert, or whose precision the model's own code chose."""
    fixed = graph.facts[n].fixed
    return Paint(Color.KEEP, Rule.AS_CAPTURED, fixed) if fixed else None


def written_inputs(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Deny a node that lives in memory of the caller that is written to: it stays what was handed
    over."""
    f = graph.facts[n]
    is_written = f.written and f.external
    return Paint(Color.DENY, Rule.WRITES, f.memory) if is_written else None


def shared_outputs(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Deny an output that shares memory with an input or another output, so that it goes on sharing
    it.

    The operator that made the memory may compute low all the same: its result is then cast on the
    spot. An operator with several results may not, as a single result is taken out as it is.
    """
    f = graph.facts[n]
    may_cast = graph.wanted[n] is Color.ALLOW and not f.is_view
    shared = f.memory if _shares(graph, f) and not may_cast else None
    if len(f.tensors) > 1:
        taken = (graph.facts[reader] for reader in graph.flow.successors(n))
        shared = next((r.memory for r in taken if r.op == "getitem" and _shares(graph, r)), shared)
    if shared is None:
        return None
    return Paint(Color.DENY, Rule.SHARED_OUTPUT, shared, shares=True)


def _shares(graph: AnalyzedGraph, f: NodeFacts) -> bool:
    return graph.outputs_in.get(f.memory, 0) > (0 if f.external else 1)


def missing_kernels(graph: AnalyzedGraph, n: int) -> Paint | None:
    if graph.wanted[n] not in (Color.ALLOW, *FREE):
        return None
    f = graph.facts[n]
    device = f.tensors[0].device if f.tensors else "cpu"
    if not graph.lists.has_kernel(f.op, device, graph.dtype) or n in graph.refused:
        return Paint(Color.DENY, Rule.NO_KERNEL, f"{f.op} on {device}")
    lacking = without_wrong_kernel(f, graph.operands(f), graph.dtype) if device == "cpu" else ""
    return Paint(Color.DENY, Rule.NO_KERNEL, lacking) if lacking else None


def saved_decisions(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Paint as a saved, and perhaps edited, plan says."""
    return graph.saved.get(n)


def user_overrides(graph: AnalyzedGraph, n: int) -> Paint | None:
    color, because = graph.overrides.get(n, (Color.INFER, ""))
    return None if color in FREE else Paint(color, Rule.OVERRIDE, because)


def user_casts(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Deny an explicit `.float()`, which asks for float32 from there on. Not so if allowed
    operators alone read the result, which take it in low precision: `x.to(weight.dtype)`."""
    if not graph.facts[n].user_cast or _is_for_allowed(graph, n):
        return None
    return Paint(Color.DENY, Rule.USER_CAST, "the model converts to float32")


def _is_for_allowed(graph: AnalyzedGraph, n: int) -> bool:
    readers = [*graph.flow.successors(n)]
    return bool(readers) and all(graph.colors[r] is Color.ALLOW for r in readers)


def unrepresentable_numbers(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Deny arithmetic with a constant that overflows or vanishes in low precision (a mask value, an
    epsilon), or with a constant tensor that vanishes. Fillings of scores may saturate."""
    if graph.colors[n] not in FREE or n in graph.filled:
        return None
    info = torch.finfo(graph.dtype)
    in_tensors = (graph.vanishing.get(p, 0.0) for p in graph.flow.predecessors(n))
    for number in (*graph.facts[n].scalars, *in_tensors):
        size = abs(number)
        if math.isfinite(size) and size and not info.smallest_normal <= size <= info.max:
            return Paint(Color.DENY, Rule.OUT_OF_RANGE, f"{number:g}")
    return None


def numbers_not_known(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Deny arithmetic in float16 with numbers that may be beyond its range, or are told from
    numbers that are: a number of the model's that changed between its calls, and a 0-dimensional
    input put among other numbers, such as a mask value in a buffer."""
    if graph.dtype is not torch.float16 or graph.colors[n] not in FREE:
        return None
    unknown = graph.facts[n].unknown
    if graph.colors[n] is Color.CLEAR and not unknown:
        operands = [graph.facts[p] for p in graph.flow.predecessors(n)]
        puts = (f.name for f in operands if f.op == "placeholder" and f.is_scalar)
        unknown = tuple(puts) if len(operands) > 1 else ()
    return Paint(Color.DENY, Rule.NOT_KNOWN, unknown[0]) if unknown else None


def saturating(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Deny a result near a bound if somebody reads how near."""
    was_free = graph.facts[n].color is Color.INFER and graph.colors[n] is Color.DENY
    reader = graph.saturating.get(n) if was_free else None
    return (
        Paint(Color.DENY, Rule.SATURATES, graph.facts[reader].name) if reader is not None else None
    )


def angles(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Deny products of positions or times with frequencies whose phase is read, and positions that
    moved. Rounded to bfloat16, 10001 is 9984."""
    reader = graph.phases.get(n)
    if reader is None or graph.colors[n] not in (Color.ALLOW, Color.INFER):
        return None
    if not adds_few_terms(graph.facts[n]) and n not in graph.displaced:
        return None
    return Paint(Color.DENY, Rule.ANGLE, graph.facts[reader].name)


def positions(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Deny values that say where something is, in pixels, say, if somebody looks there. Rounded to
    bfloat16, 301.4 is 302."""
    reader = graph.positions.get(n)
    if reader is None or graph.colors[n] is not Color.INFER:
        return None
    return Paint(Color.DENY, Rule.POSITION, graph.facts[reader].name)


def crowded(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Deny a lookup in a table whose entries are looked up so often that their gradients stop
    growing: the kernels of LOOKUPS add them up in the precision of the table (CPU, torch 2.13).
    """
    f = graph.facts[n]
    if f.op not in LOOKUPS or graph.colors[n] is not Color.INFER or not f.tensors[0].is_sized:
        return None
    table = graph.operands(f)[0]
    is_crowded = f.numel * torch.finfo(graph.dtype).eps >= 2 * table.numel
    return Paint(Color.DENY, Rule.LOOKED_UP, table.name) if is_crowded else None


def many_added(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Deny a kernel that adds up many numbers in the precision of its tensors: more than 64 in
    bfloat16 or 512 in float16 lose more than a few roundings do."""
    f = graph.facts[n]
    is_low = graph.colors[n] in (Color.ALLOW, *FREE)
    if not is_low or f.sums * torch.finfo(graph.dtype).eps <= 0.5:
        return None
    return Paint(Color.DENY, Rule.ADDS_UP, f"{f.sums:,}")


def listed(graph: AnalyzedGraph, n: int) -> Paint | None:
    """Paint the operators on the allow and deny lists, and deny those on no list."""
    color, f = graph.colors[n], graph.facts[n]
    if color is None:
        return Paint(Color.DENY, Rule.UNLISTED, f.op)
    return None if color in FREE else Paint(color, Rule.LISTED, f.group)


NODE_RULES: tuple[NodeRule, ...] = (
    fixed_as_captured,
    written_inputs,
    shared_outputs,
    missing_kernels,
    saved_decisions,
    user_overrides,
    user_casts,
    unrepresentable_numbers,
    numbers_not_known,
    saturating,
    angles,
    positions,
    crowded,
    many_added,
    listed,
)
