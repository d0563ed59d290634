"""Every check of verify goes red on a graph that was broken on purpose for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from graphs import SIZE, Rewritten, run
from torch import fx

from amp_graph.capture.aten import CAST
from amp_graph.errors import VerifyError
from amp_graph.ir import Plan
from amp_graph.passes.verify import CHECKS, verify

X, W = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE)


def function(x, w, buffer):
    """Casts both ways, an input written to, and outputs that share memory."""
    h = x @ w
    total = h.exp().sum()
    buffer.add_(1.0)
    return h, total, buffer[0], buffer.t()


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


def drop_a_node(result: Rewritten) -> Plan | None:
    exp, total = node(result, "deny1"), node(result, "deny2")
    total.replace_input_with(exp, exp.args[0])
    result.module.graph.erase_node(exp)


def return_it_low(result: Rewritten) -> Plan | None:
    low, end = node(result, "allow1"), output(result)
    end.args = ((low, *end.args[0][1:]),)


def return_a_copy(result: Rewritten) -> Plan | None:
    end = output(result)
    *others, last = end.args[0]
    end.args = ((*others, inserted(result, end, last, torch.float32)),)


def write_into_a_cast(result: Rewritten) -> Plan | None:
    write = node(result, "infer1")
    write.replace_input_with(write.args[0], inserted(result, write, write.args[0], torch.bfloat16))


def deny_low_operands(result: Rewritten) -> Plan | None:
    exp = node(result, "deny1")
    exp.replace_input_with(exp.args[0], node(result, "allow1"))


def cast_twice(result: Rewritten) -> Plan | None:
    return replace(result.plan, casts=(*result.plan.casts, result.plan.casts[0]))


def cast_a_cast(result: Rewritten) -> Plan | None:
    exp = node(result, "deny1")
    again = inserted(result, exp, exp.args[0], torch.float32)
    exp.replace_input_with(exp.args[0], again)


BREAKAGES: dict[str, Callable[[Rewritten], Plan | None]] = {
    "every_node_is_emitted": drop_a_node,
    "outputs_keep_their_dtype": return_it_low,
    "outputs_share_memory_as_before": return_a_copy,
    "writes_reach_their_memory": write_into_a_cast,
    "colors_are_honoured": deny_low_operands,
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
    assert not list(check(result.captured, result.module, result.plan))
    plan = BREAKAGES[check.__name__](result) or result.plan
    assert list(check(result.captured, result.module, plan))
    with pytest.raises(VerifyError):
        verify(result.captured, result.module, plan)


def test_a_graph_out_of_order_is_found():
    result = good()
    output(result).append(node(result, "allow1"))
    with pytest.raises(Exception, match="allow1"):
        verify(result.captured, result.module, result.plan)


def test_the_complaint_names_the_check_and_the_node():
    result = good()
    deny_low_operands(result)
    with pytest.raises(VerifyError, match=r"colors are honoured: 'deny1' .*allow1"):
        verify(result.captured, result.module, result.plan)


# What follows must be found too, by whichever check.


def swap_operands(result: Rewritten) -> None:
    matmul = node(result, "allow1")
    matmul.args = matmul.args[::-1]


def swap_outputs(result: Rewritten) -> None:
    end = output(result)
    first, second, *others = end.args[0]
    end.args = ((second, first, *others),)


def read_another_value(result: Rewritten) -> None:
    total = node(result, "deny2")
    total.replace_input_with(total.args[0], node(result, "x"))


def run_an_allowed_operator_in_float32(result: Rewritten) -> None:
    matmul = node(result, "allow1")
    matmul.args = tuple(node(result, n) for n in ("x", "w"))
    matmul.meta["val"] = matmul.meta["val"].float()


def change_a_number(result: Rewritten) -> None:
    write = node(result, "infer1")
    write.args = (write.args[0], 2.0)


@pytest.mark.parametrize(
    "breakage",
    [
        swap_operands,
        swap_outputs,
        read_another_value,
        run_an_allowed_operator_in_float32,
        change_a_number,
    ],
    ids=lambda breakage: breakage.__name__,
)
def test_other_damage_is_found(breakage):
    result = good()
    breakage(result)
    with pytest.raises(VerifyError):
        verify(result.captured, result.module, result.plan)


def test_a_stale_cast_is_found():
    """A cast from before a write, read by who read the value after it."""

    def function(x, w):
        base = x.exp()
        view = base.t()
        first = view @ w
        base[0].zero_()
        return first, view @ w

    result = run(function, X, W)
    first, second = node(result, "allow1"), node(result, "allow2")
    second.replace_input_with(second.args[0], first.args[0])
    with pytest.raises(VerifyError):
        verify(result.captured, result.module, result.plan)
