"""What a run changes on the side is put back where it has changed, and nowhere else."""

from __future__ import annotations

import math
from collections import deque

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.backend.guarded import Guarded
from amp_graph.snapshots import TensorSnapshot, unchanged


def test_what_has_changed_is_put_back() -> None:
    written, again = torch.arange(3.0), torch.arange(3)
    snapshot = TensorSnapshot([written, None, again])
    written.data.add_(1)  # its version stays
    again[1] = 7
    snapshot.restore()
    assert written.tolist() == again.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([math.nan, 1.0, math.inf]),
        torch.tensor([complex(0, math.nan)]),
        torch.eye(3).to_sparse(),
        torch.ones((2, 3), device="meta"),
        torch.ones(1).expand(4),
        torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(1, 2)], layout=torch.jagged),
    ],
    ids="nan complex sparse meta expanded nested".split(),
)
def test_what_has_not_keeps_its_version(tensor: torch.Tensor) -> None:
    before = tensor._version
    TensorSnapshot([tensor]).restore()
    assert tensor._version == before


def test_sparse_values_are_put_back() -> None:
    tensor = torch.eye(3).to_sparse()
    snapshot = TensorSnapshot([tensor])
    tensor.mul_(2)
    snapshot.restore()
    assert torch.equal(tensor.to_dense(), torch.eye(3))


def test_inference_tensors_are_put_back() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
        snapshot = TensorSnapshot([tensor])
        tensor.add_(1)
    snapshot.restore()
    assert tensor.tolist() == [0, 0, 0]


def test_a_graph_of_the_callers_may_be_walked_back_after_a_look_at_the_model() -> None:
    """It has saved the running statistics."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    x = torch.randn(8, 4)
    loss = model(x).sum()
    with unchanged(model, parameters=True):
        model(x)
    amp_graph.compare(model, x, policy="bfloat16")
    loss.backward()


def test_so_it_may_where_the_look_put_statistics_back() -> None:
    """Batch norm saves its statistics for the backward pass, and updates them uncounted."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), torch.randn(6, 4)
    loss = model(x).square().mean()
    statistics = [buffer.clone() for buffer in model.buffers()]
    amp_graph.compare(model, x, policy="bfloat16")
    assert all(map(torch.equal, model.buffers(), statistics))
    loss.backward()


def test_a_failed_run_is_followed_by_the_original_on_what_cannot_be_compared() -> None:
    def fail(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("planted")

    reasons: list[str] = []
    nested = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(1, 2)], layout=torch.jagged)
    sparse, lost = torch.eye(2).to_sparse(), torch.tensor([math.nan])
    run = Guarded(fail, lambda *args: args[2] + 1, [0, 1, 2], reasons.append)
    assert run(nested, sparse, lost).isnan()
    assert lost._version == 0 and reasons == ["RuntimeError: planted"]


class Records(nn.Module):
    """Hooks its layer in its first call and marks itself, as transformers (5) does to collect
    hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        if not getattr(self, "is_hooked", False):
            self.layer.register_forward_hook(lambda *given: self.seen.append(given[-1]))
            self.is_hooked = True
        return self.layer(x) * len(self.seen)


def test_a_hook_goes_with_the_mark_that_it_is_there() -> None:
    model, x = Records(), torch.rand(2, 4)
    amp_graph.compare(model, x, policy="bfloat16")
    plain = Records()
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        assert torch.equal(model(x), plain(x))
    assert len(model.layer._forward_hooks) == 1


def test_what_is_in_containers_is_put_back() -> None:
    model = nn.Linear(2, 2)
    model.seen, model.table, model.names = [1], {"b": 1, "a": 2}, {"x"}  # type: ignore[assignment]
    model.latest = deque([1, 2], maxlen=2)  # type: ignore[assignment]
    latest = model.latest
    with unchanged(model, parameters=False):
        model.seen.append(2)  # type: ignore[operator]
        model.table.pop("b"), model.names.clear(), model.latest.append(3)  # type: ignore[operator]
    assert (model.seen, [*model.table], model.names) == ([1], ["b", "a"], {"x"})
    assert model.latest is latest and [*latest] == [1, 2] and latest.maxlen == 2


def test_what_has_not_changed_in_containers_is_not_written_to() -> None:
    """Nor compared by its parts' own ideas of equality."""
    model = nn.Linear(2, 2)
    model.seen = deque([torch.ones(2), math.nan])  # type: ignore[assignment]
    model.table = {"a": torch.ones(2)}  # type: ignore[assignment]
    over_both = zip(model.seen, model.table, strict=False)  # type: ignore[arg-type]
    next(over_both)
    with unchanged(model, parameters=False):
        pass
    next(over_both, None)  # raises if one was written to


def test_a_buffer_that_grew_is_put_back() -> None:
    grown, widened = torch.arange(2.0), torch.arange(2.0)
    snapshot = TensorSnapshot([grown, widened])
    grown.data, widened.data = torch.ones(5), torch.ones(2, dtype=torch.float64)
    snapshot.restore()
    for tensor in (grown, widened):
        assert tensor.tolist() == [0, 1] and tensor.dtype is torch.float32


def test_a_buffer_of_inference_mode_that_grew_is_put_back() -> None:
    with torch.inference_mode():
        grown = torch.arange(2.0)
    snapshot = TensorSnapshot([grown])
    with torch.inference_mode():
        grown.resize_(5)
    snapshot.restore()
    assert grown.tolist() == [0, 1]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_that_was_written_to_is_put_back_or_left(layout: torch.layout) -> None:
    tensor = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(1, 2)], layout=layout)
    snapshot = TensorSnapshot([tensor])
    tensor.mul_(2)
    snapshot.restore()
    assert all(part.eq(1).all() for part in tensor.unbind())
