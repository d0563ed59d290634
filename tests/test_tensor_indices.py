"""Numbers in tensors are indices, beside all others that there are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph.convert import record_of

X = torch.arange(120.0).view(5, 2, 3, 4) % 7  # exact in bfloat16, as are their sums of two
LONG, MASK = torch.tensor([2, 0]), torch.tensor([True, False])

READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "alone": lambda x, t: x[t],
    "in a tuple": lambda x, t: x[t,],
    "behind": lambda x, t: x[:, t],
    "last": lambda x, t: x[..., t],
    "between": lambda x, t: x[:, t, ..., 1],
    "beside numbers": lambda x, t: x[1, t, 2],
    "two": lambda x, t: x[t, ..., t + 1],
    "all": lambda x, t: x[t, t, t, t],
    "negative": lambda x, t: x[..., t - 2],
    "beside new dimensions": lambda x, t: x[None, t, None, ..., 0],
    "beside slices": lambda x, t: x[1:4, t, ::2, :t],
    "beside a list": lambda x, t: x[[2, 0], t],
    "beside a tensor": lambda x, t: x[LONG, t],
    "in front of a tensor": lambda x, t: x[t, :, LONG],
    "between tensors": lambda x, t: x[LONG, :, t, LONG],
    "beside a mask": lambda x, t: x[t, MASK, :, t],
    "beside a mask of two dimensions": lambda x, t: x[x[..., 0, 0] > 2, t],
    "item": lambda x, t: x[:, t.item(), :2],
    "size": lambda x, t: x[:, x.shape[1] - 1, t],
    "short": lambda x, t: x[t.int()],
}


class Reads(nn.Module):
    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.scale, self.read = nn.Linear(4, 4, bias=False), read
        nn.init.eye_(self.scale.weight)

    def forward(self, x: Tensor, ts: Tensor) -> Tensor:
        for t in ts:
            x = x + self.read(self.scale(x), t).sum()
        return x


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.usefixtures("fresh_dynamo")
def test_they_end_no_graph(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    plain = Reads(read)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for ts in ([1], [0]):
        inputs = [X.clone().requires_grad_() for _ in range(2)]
        results = [m(x, torch.tensor(ts)) for m, x in zip((model, plain), inputs, strict=True)]
        torch.testing.assert_close(results[0], results[1], rtol=0.01, atol=0)
        for result in results:
            result.sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0.01, atol=0.01)
    assert not record_of(model).breaks
    assert len(amp_graph.plans(model)) == 1


def written(x: Tensor, t: Tensor) -> Tensor:
    x = x.clone()
    x[t] = 2.0
    x[:, t, 1] = x[:, 0, 2]
    x[..., t] += 1
    return x


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to it": written,
    "to a view": lambda x, t: x[t].mul_(2) + x[1],
    "where no dimension is": lambda x, t: x[t > 0],
}


@pytest.mark.parametrize("read", WRITES.values(), ids=WRITES)
@pytest.mark.usefixtures("fresh_dynamo")
def test_writes_there_are_what_they_were(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = amp_graph.convert(Reads(read), policy="bfloat16")
    for ts in ([1], [0]):
        expected = Reads(read)(X, torch.tensor(ts))
        torch.testing.assert_close(model(X, torch.tensor(ts)), expected, rtol=0.01, atol=0)


class Pieces(nn.Module):
    """Rows of each kind have a weight of their own, as in PyTorch Geometric's HeteroLinear."""

    def __init__(self, as_numbers: bool):
        super().__init__()
        self.layer, self.weights = nn.Linear(8, 8), nn.Parameter(torch.randn(3, 8, 8) / 3)
        self.as_numbers = as_numbers

    def forward(self, x: Tensor, bounds: Tensor) -> Tensor:
        x = self.layer(x)
        result = x.new_empty(x.shape[0], 8)
        ends = bounds.tolist() if self.as_numbers else [*bounds]
        for i, (begin, end) in enumerate(pairwise(ends)):
            result[begin:end] = x[begin:end] @ self.weights[i]
        return result


@pytest.mark.parametrize("as_numbers", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_pieces_written_between_them_are_rewritten(as_numbers: bool) -> None:
    torch.manual_seed(0)
    plain = Pieces(as_numbers)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    x = torch.randn(12, 8)
    for bounds in ([0, 4, 7, 12], [0, 2, 9, 12]):
        results = [each(x, torch.tensor(bounds)) for each in (model, plain)]
        torch.testing.assert_close(*results, rtol=0.02, atol=0.02)
        for result in results:
            result.square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=0.3)
    if torch.__version__ >= "2.13":  # earlier ones do not capture such writes
        (plan,) = amp_graph.plans(model)
        assert plan.fallback is None and plan.low


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_out_of_range_is_an_error_and_the_next_call_is_not() -> None:
    model = amp_graph.convert(Reads(lambda x, t: x[:, t]), policy="bfloat16")
    model(X, torch.tensor([1]))
    with pytest.raises(IndexError, match="out of range"):
        model(X, torch.tensor([2]))
    assert model(X, torch.tensor([0])).shape == X.shape


def test_other_numbers_in_a_list_that_is_written_at_are_captured_once_more() -> None:
    class Clears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, rows: list[int]) -> Tensor:
            result = self.layer(x) + 0
            result[[row - 1 for row in rows]] = 0
            return result

    model = amp_graph.convert(Clears(), policy="bfloat16")
    for rows in ([1, 2], [2, 3], [1, 3], [3, 4]):
        is_clear = model(torch.rand(5, 4), rows).eq(0).all(1)
        assert is_clear.tolist() == [row + 1 in rows for row in range(5)]
    assert len(amp_graph.plans(model)) == 2
