"""A plan as readable text: one line per node and per cast, with the reason for each decision.

    allow  bfloat16  fc = aten.linear(x, fc.weight)  (64, 10)  fc  net.py:9   listed: matmul
           cast      fc -> float32 for softmax       2.5 KiB
    deny   float32   softmax = aten.softmax.int(fc)  (64, 10)      net.py:10  listed: softmax

It is meant for reading; programs should read the plan itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from amp_graph.dtypes import dtype_name
from amp_graph.errors import AmpGraphError, in_brief
from amp_graph.inspection.spelling import (
    aligned,
    byte_count,
    count,
    input_kind,
    line_of,
    module_of,
    shapes,
    short_op,
)
from amp_graph.ir import Cast, Color, NodeFacts, Plan
from amp_graph.reasons import short_reason, unlisted

HEADINGS = ("colour", "precision", "node", "shape", "module", "line", "why")
NODE_WIDTH = 72  # a longer list of operands is cut to this many columns
READERS_SHOWN = 2
BODY_INDENT = "    "


def render(plan: Plan) -> str:
    """Return the plan as aligned plain text, ending in one newline.

    The columns are: the colour a node was painted; the precision it computes in, or stores if its
    kernel computes in float32 inside; the node as a call on values and on the numbers that take
    part in its arithmetic; the shape of its result; the module and the source line it came from;
    the rule that decided, and what was responsible. Parameters and buffers go by their path in the
    model, and `.default` is left off operators.
    A cast has a line of its own above its first reader. The graphs inside higher-order
    operators follow the node that holds them, indented. Raises AmpGraphError for what is no plan.
    """
    if not isinstance(plan, Plan):
        raise AmpGraphError(
            f"render() takes one Plan, such as amp_graph.plans(model)[0], not {in_brief(plan)}"
        )
    return "\n".join([*_summary(plan), "", *_table(plan)]).rstrip() + "\n"


@dataclass(frozen=True)
class _Row:
    """A line of the table. `body` names the inner graph to show below it."""

    cells: tuple[str, ...]
    body: str | None = None


def _summary(plan: Plan) -> Iterator[str]:
    yield f"graph in {dtype_name(plan.dtype)}: {count(len(plan.facts), 'node')}"
    for heading, text in _facts_in_brief(plan):
        yield f"  {heading:<12}  {text}"


def _facts_in_brief(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.otherwise is not None:
        yield "fallback", plan.otherwise
    if plan.uncompiled is not None:
        yield "uncompiled", f"runs operator by operator: {plan.uncompiled}"
    painted = Counter(paint.color for paint in plan.paints.values())
    low = Counter(plan.paints[name].color for name in plan.low if name in plan.paints)
    for color in (Color.ALLOW, Color.INFER, Color.CLEAR, Color.DENY):
        if painted[color]:
            yield color.value, f"{low[color]} of {painted[color]} in {dtype_name(plan.dtype)}"
    least = "at least " if replace(plan, bodies={}).unsized_casts else ""
    yield "casts", f"{len(plan.casts)}, moving {least}{byte_count(_own_bytes(plan))}"
    if plan.bodies:
        inner = (part for body in plan.bodies.values() for part in body.parts())
        moved = byte_count(sum(map(_own_bytes, inner)))
        yield "inner graphs", f"{', '.join(plan.bodies)}; casts moving {moved}"
    found = unlisted(plan)
    if found:
        yield "on no list", f"{', '.join(map(short_op, found))} (float32 as captured)"


def _table(plan: Plan) -> Iterator[str]:
    rows = list(_rows(plan))
    lines = aligned(HEADINGS, [row.cells for row in rows])
    yield from islice(lines, 2)  # the headings, underlined
    shown = set()
    for row, line in zip(rows, lines, strict=True):
        yield line
        if row.body is not None:
            shown.add(row.body)
            yield from _body(row.body, plan.bodies[row.body])
    for name in plan.bodies:
        if name not in shown:
            yield from _body(name, plan.bodies[name])


def _body(name: str, plan: Plan) -> Iterator[str]:
    for line in ["", f"{name}:", *render(plan).splitlines(), ""]:
        yield f"{BODY_INDENT}{line}".rstrip()


def _rows(plan: Plan) -> Iterator[_Row]:
    labels = {name: facts.label for name, facts in plan.facts.items()}
    casts = _casts_by_first_reader(plan)
    unsized = {cast.value for cast in replace(plan, bodies={}).unsized_casts}
    bodies = {name.replace(".", "_"): name for name in plan.bodies}
    for name, facts in plan.facts.items():
        for cast in casts.pop(name, ()):
            yield _cast_row(cast, labels, cast.value not in unsized)
        yield _Row(_node_cells(plan, facts, labels), body=bodies.get(name))
    for left_over in casts.values():
        for cast in left_over:
            yield _cast_row(cast, labels, cast.value not in unsized)


def _casts_by_first_reader(plan: Plan) -> dict[str, list[Cast]]:
    order = {name: i for i, name in enumerate(plan.facts)}
    grouped = defaultdict(list)
    for cast in plan.casts:
        readers = sorted(cast.readers, key=lambda name: order.get(name, len(order)))
        grouped[readers[0] if readers else ""].append(replace(cast, readers=tuple(readers)))
    return grouped


def _cast_row(cast: Cast, labels: dict[str, str], is_sized: bool) -> _Row:
    readers = [labels.get(name, name) for name in cast.readers]
    listed = ", ".join(readers[:READERS_SHOWN])
    if len(readers) > READERS_SHOWN:
        listed += f" and {len(readers) - READERS_SHOWN} more"
    value = labels.get(cast.value, cast.value)
    text = f"{value} -> {dtype_name(cast.dtype)} for {listed}"
    note = "saturating" if cast.saturate else ""
    size = byte_count(cast.bytes) if is_sized else "size unknown"
    return _Row(("", "cast", text, size, "", "", note))


def _node_cells(plan: Plan, facts: NodeFacts, labels: dict[str, str]) -> tuple[str, ...]:
    paint = plan.paints.get(facts.name)
    return (
        paint.color.value if paint else "",
        _precision(plan, facts),
        _call(facts, labels),
        shapes(facts.tensors),
        module_of(facts),
        line_of(facts.source),
        short_reason(plan, facts.name),
    )


def _precision(plan: Plan, facts: NodeFacts) -> str:
    if facts.op == "output":
        return ""
    if facts.name in plan.low or facts.reads:
        return plan.precision(facts.name)
    return dtype_name(facts.tensors[0].dtype) if facts.tensors else ""


def _call(facts: NodeFacts, labels: dict[str, str]) -> str:
    label = labels[facts.name]
    if facts.op == "placeholder":
        return f"{label} = {input_kind(facts)}"
    if facts.op == "get_attr":
        return f"{label} = {'constant' if facts.tensors else 'inner graph'}"
    operands = [labels.get(name, name) for name in facts.operands]
    if facts.op == "output":
        return _fit("return ", operands, "")
    numbers = [f"{number:g}" for number in facts.scalars]
    return _fit(f"{label} = {short_op(facts.op)}(", operands + numbers, ")")


def _fit(start: str, operands: list[str], end: str) -> str:
    """Write as many operands as fit, at least one, then how many more there are."""
    for shown in range(len(operands), 0, -1):
        hidden = len(operands) - shown
        tail = [f"... {hidden} more"] if hidden else []
        text = start + ", ".join(operands[:shown] + tail) + end
        if len(text) <= NODE_WIDTH or shown == 1:
            return text
    return start.rstrip() + end


def _own_bytes(plan: Plan) -> int:
    return replace(plan, bodies={}).cast_bytes + plan.weight_bytes
