"""What a graph that runs operator by operator calls in place of its operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from amp_graph.backend.eager import eager


def looked_up(x: Tensor, i: Tensor, one: Tensor) -> Tensor:
    y = x[i, i].sum() + x[:, i].sum() + torch.ops.aten.index.Tensor(x, [one]).sum()
    x = x.clone()
    x[i] = y
    x[:, i] = 2 * y
    return x.index_put((i, i), y[None], accumulate=True) + x.size(0)


def overloads(graph: fx.Graph) -> list[str]:
    return sorted(str(n.target) for n in graph.nodes if isinstance(n.target, OpOverload))


def test_indices_and_sizes_take_the_shorter_way() -> None:
    args = torch.randn(5, 4), torch.tensor([3, 0, 1]), torch.tensor(2)
    module = make_fx(looked_up, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*args)
    graph = eager(module)
    assert "aten.sym_size.int" in overloads(module.graph)
    # What is left: dimensions that are not indexed, and an index without a dimension.
    left = [name for name in overloads(graph.graph) if "index" in name or "size" in name]
    assert left == ["aten.index.Tensor"] * 2 + ["aten.index_put_.default"]
    torch.testing.assert_close(graph(*args), looked_up(*args))


def test_an_assertion_raises_as_before() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten._assert_scalar.default, (x, "too large"))
    graph.output(x)
    module = eager(fx.GraphModule(torch.nn.Module(), graph))
    assert not overloads(module.graph)
    assert module(True)
    with pytest.raises(RuntimeError, match="too large"):
        module(False)
