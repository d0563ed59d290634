"""Our decisions beside autocast's own tables of expected dtypes, for CUDA and for CPU.

Every entry of torch.testing._internal.autocast_test_lists is captured on CPU and rewritten. Its
arguments in half precision come out of a matrix product, as they would in a model; the others are
float32 inputs. Where we decide otherwise, DIFFERENCES says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from amp_graph.backend.rewrite import rewrite
from amp_graph.capture.retrace import trace
from amp_graph.ir import Color
from amp_graph.oplists import OpLists, load_lists
from amp_graph.policy import Policy

HALF = (torch.float16, torch.bfloat16)
NAMESPACES = (torch, torch._C._nn, torch._C._linalg, torch.Tensor)
# The lists alone are under test here, whatever kernels the CPU happens to have.
LISTS = OpLists(load_lists().entries, {})


@dataclass(frozen=True)
class Entry:
    """One call, and what autocast makes of it: "low", "float32", or "error"."""

    device: str
    table: str
    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def expected(self) -> str:
        if self.table == "banned":
            return "error"
        return "low" if self.table.endswith("16") else "float32"

    @property
    def dtype(self) -> torch.dtype:
        """The half precision of its arguments."""
        found = [t.dtype for t in tree_flatten(self.args)[0] if isinstance(t, torch.Tensor)]
        default = torch.float16 if self.device == "cuda" else torch.bfloat16
        return next((d for d in found if d in HALF), default)

    def __str__(self) -> str:
        return f"{self.device}-{self.table}-{self.op}"


# Written for tensors of two dimensions, under a bare string that PyTorch's own test skips.
EINSUM = ("bkhd,bqhd->bqkh", [torch.rand(2, 3, 4, 8), torch.rand(2, 5, 4, 8)])


def entries(device: str, tables: Any) -> Iterator[Entry]:
    for table, rows in vars(tables).items():
        for op, *rest in rows:
            if op == "einsum":
                yield Entry(device, table, op, EINSUM)
                continue
            calls = [args for args in rest if isinstance(args, tuple)]
            kwargs = next((k for k in rest if isinstance(k, dict)), {})
            for args in calls:
                yield Entry(device, table, op, args, kwargs)


ENTRIES = [
    *entries("cuda", AutocastTestLists("cpu")),
    *entries("cpu", AutocastCPUTestLists("cpu")),
]

JOINED = "the product that reads the result rounds every number all the same, so nothing is lost"
DIFFERENCES = {  # operator and table: (what we decide, the reason)
    "cat torch_expect_builtin_promote": ("low", JOINED),
    "stack torch_expect_builtin_promote": ("low", JOINED),
    "cat torch_need_autocast_promote": ("low", JOINED),
    "stack torch_need_autocast_promote": ("low", JOINED),
    "bilinear torch_need_autocast_promote": ("low", "the products inside it are cast by autocast"),
    "addr torch_fp16": ("float32", "rounds the matrix that it adds to; autocast on CPU does not"),
    "tensordot torch_need_autocast_promote": ("low", "the product inside it is cast by autocast"),
    "mv torch_fp16": ("float32", "a matrix is read once, so to cast it costs more than it saves"),
    "addmv torch_fp16": ("float32", "as mv, and as on CPU"),
    "binary_cross_entropy banned": ("float32", "float32 is safe, so there is nothing to refuse"),
    "avg_pool3d nn_fp32": (
        "low",
        "as on CUDA, and as avg_pool2d on both; the CPU has a kernel now",
    ),
    "reflection_pad1d nn_fp32": ("low", "copies numbers; the CPU has a kernel now"),
}
NOT_CAPTURED = {  # operator: why it has no graph on CPU
    "equal": "returns a Python bool that depends on data",
    "cudnn_convolution": "has a kernel on CUDA only",
    "cudnn_convolution_transpose": "has a kernel on CUDA only",
}


def function_of(entry: Entry) -> Callable[..., Any]:
    is_method = entry.table.startswith("methods")
    places = NAMESPACES[-1:] if is_method else NAMESPACES
    return next(getattr(place, entry.op) for place in places if hasattr(place, entry.op))


def captured(entry: Entry) -> tuple[fx.GraphModule, slice]:
    """The entry between products above and below it, and which nodes are its own."""
    leaves, spec = tree_flatten((entry.args, dict(entry.kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    halves = [i for i in places if leaves[i].dtype in HALF]
    inputs = [leaves[i].float() if i in halves else leaves[i] for i in places]

    def prepared(*tensors: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(places, tensors, strict=True)
        return [through_a_product(t) if i in halves else t for i, t in pairs]

    def call(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, prepared(*tensors), strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        return function_of(entry)(*args, **kwargs)

    def whole(*tensors: torch.Tensor) -> Any:
        return tree_map(through_a_product, call(*tensors))

    ends = [len(trace(part, inputs).graph.nodes) - 1 for part in (prepared, call)]
    return trace(whole, inputs), slice(*ends)


def through_a_product(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    return torch.mm(rows, rows.new_ones(rows.shape[1], rows.shape[1])).reshape(tensor.shape)


def decision(entry: Entry) -> str:
    """Low if any of the operator's own nodes is."""
    graph, own_nodes = captured(entry)
    _, plan = rewrite(graph, Policy(entry.dtype, level="safe"), LISTS)
    assert plan.fallback is None
    is_low = any(n.name in plan.low for n in list(graph.graph.nodes)[own_nodes])
    return "low" if is_low else "float32"


@pytest.fixture(autouse=True)
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which gets the convolutions on the tables wrong, so that they would stay in float32."""
    monkeypatch.setattr("amp_graph.passes.wrong_kernels.has_amx", lambda: False)


@pytest.mark.filterwarnings("ignore::UserWarning")  # deprecated operators are on the tables too
@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.op not in NOT_CAPTURED], ids=str)
def test_decision_is_that_of_autocast(entry: Entry) -> None:
    expected, _ = DIFFERENCES.get(f"{entry.op} {entry.table}", (entry.expected, ""))
    assert decision(entry) == expected


@pytest.mark.parametrize("op", NOT_CAPTURED)
def test_what_is_not_captured_is_listed_as_autocast_has_it(op: str) -> None:
    entry = next(e for e in ENTRIES if e.op == op)
    with pytest.raises((DataDependentOutputException, NotImplementedError)):
        captured(entry)
    listing = LISTS.lookup(getattr(torch.ops.aten, op).default)
    assert (listing is not None and listing.color is Color.ALLOW) == (entry.expected == "low")


def test_every_difference_is_one() -> None:
    rows = {f"{e.op} {e.table}": e.expected for e in ENTRIES}
    assert set(DIFFERENCES) <= set(rows)
    assert all(ours != rows[row] for row, (ours, _) in DIFFERENCES.items())
    assert len(ENTRIES) > 150
