"""Every check of verify goes red on a graph that was broken on purpose for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from graphs import Rewritten, W, X, capture, rewritten, run
from torch import fx

from amp_graph.errors import VerifyError
from amp_graph.graphs.aten import CAST, SET_GRAD_ENABLED
from amp_graph.ir import Plan
from amp_graph.passes.verify import CHECKS, Emission, verify


def function(x, w, buffer):
    """Casts both ways, one of them of a value that is written and cast again, and outputs that
    share memory."""
    h = x @ w
    total = h.exp().sum()
    view = buffer.t()
    before = view @ w
    buffer.add_(1.0)
    return h, total, before, view @ w, buffer[0], view


def good() -> Rewritten:
    return run(function, X, W, X.clone())


def node(result: Rewritten, name: str) -> fx.Node:
    return next(n for n in result.module.graph.nodes if n.name == name)


def output(result: Rewritten) -> fx.Node:
    return next(n for n in result.module.graph.nodes if n.op == "output")


def inserted(result: Rewritten, before: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A cast of `source` that the plan does not know."""
    with result.module.graph.inserting_before(before):
        cast = result.module.graph.call_function(CAST, (source,), {"dtype": dtype})
    cast.meta = {**source.meta, "val": source.meta["val"].to(dtype, copy=True)}
    return cast


def use_before_definition(result: Rewritten) -> None:
    output(result).append(node(result, "allow1"))


def drop_a_node(result: Rewritten) -> None:
    exp, total = node(result, "deny1"), node(result, "deny2")
    total.replace_input_with(exp, exp.args[0])
    result.module.graph.erase_node(exp)


def read_another_value(result: Rewritten) -> None:
    total = node(result, "deny2")
    total.replace_input_with(total.args[0], node(result, "x"))


def read_a_stale_cast(result: Rewritten) -> None:
    before, after = node(result, "allow2"), node(result, "allow3")
    after.replace_input_with(after.args[0], before.args[0])


def cast_unrecorded(result: Rewritten) -> None:
    cast = node(result, "deny1").args[0]
    for place, mode in ((cast.prepend, False), (cast.append, True)):
        place(result.module.graph.call_function(SET_GRAD_ENABLED, (mode,)))


def run_it_in_float32(result: Rewritten) -> None:
    matmul = node(result, "allow1")
    matmul.args = tuple(node(result, n) for n in ("x", "w"))
    matmul.meta["val"] = matmul.meta["val"].float()


def return_it_low(result: Rewritten) -> None:
    low, end = node(result, "allow1"), output(result)
    end.args = ((low, *end.args[0][1:]),)


def return_a_copy(result: Rewritten) -> None:
    end = output(result)
    *others, last = end.args[0]
    end.args = ((*others, inserted(result, end, last, torch.float32)),)


def write_into_a_cast(result: Rewritten) -> None:
    write = node(result, "infer1")
    write.replace_input_with(write.args[0], inserted(result, write, write.args[0], torch.bfloat16))


def deny_low_operands(result: Rewritten) -> None:
    exp = node(result, "deny1")
    exp.replace_input_with(exp.args[0], node(result, "allow1"))


def round_a_denied_result(result: Rewritten) -> None:
    total = node(result, "deny2")
    total.kwargs = {"dtype": torch.bfloat16}
    total.meta["val"] = total.meta["val"].bfloat16()


def cast_twice(result: Rewritten) -> Plan:
    return replace(result.plan, casts=(*result.plan.casts, result.plan.casts[0]))


def cast_a_cast(result: Rewritten) -> None:
    exp = node(result, "deny1")
    again = inserted(result, exp, exp.args[0], torch.float32)
    exp.replace_input_with(exp.args[0], again)


BREAKAGES: dict[str, Callable[[Rewritten], Plan | None]] = {
    "graph_is_well_formed": use_before_definition,
    "every_node_is_emitted": drop_a_node,
    "operands_are_the_captured_ones": read_another_value,
    "casts_are_fresh": read_a_stale_cast,
    "autograd_records_as_before": cast_unrecorded,
    "low_nodes_are_low": run_it_in_float32,
    "outputs_keep_their_dtype": return_it_low,
    "outputs_share_memory_as_before": return_a_copy,
    "writes_reach_their_memory": write_into_a_cast,
    "colors_are_honoured": deny_low_operands,
    "captured_precision_is_kept": round_a_denied_result,
    "one_cast_per_value": cast_twice,
    "no_cast_of_a_cast": cast_a_cast,
}


def test_a_sound_graph_passes():
    result = good()
    verify(result.captured, result.module, result.plan)


def test_every_check_has_a_graph_broken_for_it():
    assert {check.__name__ for check in CHECKS} == set(BREAKAGES)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_broken_graph_is_found(check):
    result = good()
    assert not list(check(Emission(result.captured, result.module, result.plan)))
    plan = BREAKAGES[check.__name__](result) or result.plan
    assert list(check(Emission(result.captured, result.module, plan)))
    with pytest.raises(VerifyError):
        verify(result.captured, result.module, plan)


def test_the_complaint_names_the_check_and_the_node():
    result = good()
    deny_low_operands(result)
    with pytest.raises(VerifyError, match=r"colors are honoured: 'deny1' .*allow1"):
        verify(result.captured, result.module, result.plan)


def swap_operands(result: Rewritten) -> None:
    matmul = node(result, "allow1")
    matmul.args = matmul.args[::-1]


def swap_outputs(result: Rewritten) -> None:
    end = output(result)
    first, second, third, *others = end.args[0]
    end.args = ((third, second, first, *others),)


def change_a_number(result: Rewritten) -> None:
    write = node(result, "infer1")
    write.args = (write.args[0], 2.0)


def record_no_more(result: Rewritten) -> None:
    graph = result.module.graph
    node(result, "deny1").prepend(graph.call_function(SET_GRAD_ENABLED, (False,)))


def drop_a_write(result: Rewritten) -> None:
    write = node(result, "infer1")
    write.replace_all_uses_with(write.args[0])
    result.module.graph.erase_node(write)


def leave_out_a_cast(result: Rewritten) -> None:
    matmul = node(result, "allow1")
    matmul.replace_input_with(matmul.args[1], node(result, "w"))


def insert_an_operator(result: Rewritten) -> None:
    exp = node(result, "deny1")
    with result.module.graph.inserting_before(exp):
        sin = result.module.graph.call_function(torch.ops.aten.sin.default, (exp.args[0],))
    sin.meta = {**exp.args[0].meta}
    exp.replace_input_with(exp.args[0], sin)


def put_another_operator(result: Rewritten) -> None:
    node(result, "deny1").target = torch.ops.aten.expm1.default


OTHERS = [
    insert_an_operator,
    put_another_operator,
    leave_out_a_cast,
    swap_operands,
    swap_outputs,
    change_a_number,
    drop_a_write,
    record_no_more,
]


@pytest.mark.parametrize("breakage", OTHERS, ids=lambda breakage: breakage.__name__)
def test_other_damage_is_found_by_some_check(breakage):
    result = good()
    breakage(result)
    with pytest.raises(VerifyError):
        verify(result.captured, result.module, result.plan)


def test_a_number_of_float32_arithmetic_does_not_saturate():
    result = run(lambda x: x.masked_fill(x > 0.5, -3.4e38), X)
    verify(result.captured, result.module, result.plan)
    (fill,) = (n for n in result.module.graph.nodes if -3.4e38 in n.args)
    fill.args = (*fill.args[:-1], torch.finfo(torch.bfloat16).min)
    with pytest.raises(VerifyError, match="operands are the captured ones"):
        verify(result.captured, result.module, result.plan)


@pytest.mark.parametrize("name", ["x_bfloat16", "x_bfloat16_", "allow1_float32"])
def test_a_captured_node_named_like_a_cast_is_not_taken_for_one(name):
    """Casts are named after their value and dtype, but never as a captured node is."""

    def function(x, w):
        return torch.exp(x @ w) + torch.exp(x), w.sin()

    captured = capture(function, X, W)
    named = [n for n in captured.graph.nodes if n.op == "call_function"][-1]
    named._rename(name)
    assert named.name == name
    result = rewritten(captured)
    assert len(result.plan.casts) == 3
    assert str(node(result, name).target) == "aten.sin.default"
    verify(result.captured, result.module, result.plan)
