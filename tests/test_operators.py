"""Every entry of PyTorch's own operator database goes through the pass and keeps its result.

Each sample is captured at ATen level (no Dynamo) and rewritten twice: as the lists say, and with
every infer and clear operator made to run in low precision, as it would below an allowed one.
Result and gradient must agree with float32 as far as the precision allows: within a tolerance of
the whole tensor's norm, or within a few times the change that rounding the inputs alone makes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from amp_graph import Color, Override, Policy
from amp_graph.backend.eager import eager
from amp_graph.backend.rewrite import rewrite, split_where_wide
from amp_graph.capture.retrace import trace
from amp_graph.oplists import load_lists

SAMPLES = 3
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


def entry_id(op) -> str:
    return f"{op.name}-{op.variant_test_name}" if op.variant_test_name else op.name


OPS = {
    entry_id(op): op
    for op in op_db
    if torch.float32 in op.supported_dtypes("cpu")
    and not op.name.startswith("jiterator")  # compiled by NVRTC: CUDA only
}
NOT_TRACEABLE = {  # fake tensors have no data to decide on; Dynamo breaks the graph there instead
    "allclose": "returns a Python bool that depends on data",
    "equal": "returns a Python bool that depends on data",
    "corrcoef": "asks aten.equal while it runs",
    "cov": "asks aten.equal while it runs",
    "combinations": "its size depends on data",
    "narrow": "one sample has a start that is a tensor",
    "tensor_split": "one sample has split points in a tensor",
    "nn.functional.ctc_loss": "its size depends on data",
    "nn.functional.gaussian_nll_loss": "checks the values of var",
    "linalg.lstsq": "its size depends on data",
}
if torch.__version__ < "2.13":
    NOT_TRACEABLE |= dict.fromkeys(["quantile", "nanquantile"], "asks aten.equal in torch 2.11")
UNSPECIFIED = {  # the result is not a function of the inputs
    "empty": "uninitialised memory",
    "empty_like": "uninitialised memory",
    "empty_permuted": "uninitialised memory",
    "empty_strided": "uninitialised memory",
    "new_empty": "uninitialised memory",
    "new_empty_strided": "uninitialised memory",
}
UNSPECIFIED_IN = {
    # With strides or dilation, on CPUs with AVX512-FP16 (torch 2.13): `function(*half)` differs
    # from call to call once memory holds other numbers. In bfloat16 it is compared.
    ("nn.functional.conv2d", torch.float16): "reads memory that nobody wrote",
}
NOT_COMPARED = {  # a single rounding of the input moves the result by more than its own size
    "linalg.pinv": "the sample is built singular by a product of matrices inside the graph",
    "nn.functional.normalize": "its gradient cancels to zero for vectors of one element",
}

INDEX_RESULTS = {"sort", "argsort", "topk", "msort", "kthvalue", "median", "nanmedian", "mode"}

FORCE = Override("allow", where=lambda f: f.color in (Color.INFER, Color.CLEAR))
POLICIES = {"as listed": (), "made low": (FORCE,)}


@dataclass(eq=False)
class Captured:
    """A sample's tensors, and its graph, or None if it cannot be captured."""

    inputs: list[Tensor]
    graph: fx.GraphModule | None

    @functools.cached_property
    def reference(self):
        return outcome(self.graph, self.inputs)

    def limit(self, dtype: torch.dtype):
        """What comes of inputs that are rounded."""
        inputs = [t.to(dtype).to(t.dtype) if t.dtype is torch.float32 else t for t in self.inputs]
        found = outcome(self.graph, inputs)
        return self.reference if isinstance(found, Exception) else found  # out of its domain


@functools.lru_cache(maxsize=1)  # both dtypes of an operator come after one another
def captured_samples(name: str) -> tuple[int, list[Captured]]:
    """How many samples there are, and those for this build of PyTorch."""
    torch.manual_seed(0)
    op = OPS[name]
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))[:SAMPLES]
    found = []
    for function, inputs in (as_function(op, sample) for sample in samples):
        if isinstance(outcome(function, inputs, is_differentiated=False), Exception):
            continue  # there is nothing to compare
        try:
            found.append(Captured(inputs, trace(function, clones(inputs))))
        except Exception:
            found.append(Captured(inputs, None))
    return len(samples), found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPS)
def test_same_result_and_gradient(name, dtype):
    count, samples = captured_samples(name)
    op, compared = OPS[name], 0
    for sample in samples:
        if sample.graph is None:
            assert op.name in NOT_TRACEABLE, f"{name} cannot be captured"
            continue
        limit = sample.limit(dtype) if is_comparable(op, dtype) else None
        for kind, overrides in POLICIES.items():
            policy, lists = Policy(dtype=dtype, overrides=overrides), load_lists()
            split = split_where_wide(sample.graph, policy, lists)
            emitted, plan = rewrite(split, policy, lists)
            assert plan.fallback is None
            if is_comparable(op, dtype) and not reordered(op, kind):
                check(sample, emitted, limit, TOLERANCE[dtype], f"{name} {kind}")
            compared += 1
    assert compared or not count or op.name in NOT_TRACEABLE, "no sample was compared"


def is_comparable(op, dtype: torch.dtype) -> bool:
    return op.name not in UNSPECIFIED | NOT_COMPARED and (op.name, dtype) not in UNSPECIFIED_IN


def reordered(op, policy_name: str) -> bool:
    """Rounding first makes ties, so that positions may differ; never so as the lists say."""
    return policy_name == "made low" and op.name in INDEX_RESULTS


def as_function(op, sample):
    """The sample as a function of its tensors alone."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors):
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = tree_unflatten(filled, spec)
        return op.op(first, *args, **kwargs)

    return function, [leaves[i] for i in places]


def outcome(module, inputs, is_differentiated=True):
    """What `run` gives, or what it raises."""
    try:
        return run(module, inputs) if is_differentiated else module(*clones(inputs))
    except Exception as error:
        return error


def clones(tensors):
    return [t.detach().clone() for t in tensors]


def check(sample, emitted, limit, tolerance, where):
    if isinstance(sample.reference, Exception):
        assert type(outcome(emitted, sample.inputs)) is type(sample.reference), where
        return
    reference, reference_grads = sample.reference
    result, grads = run(emitted, sample.inputs)
    assert_same(run(eager(emitted), sample.inputs), (result, grads), where)
    for ours, theirs, rough in zip(result, reference, limit[0], strict=True):
        assert ours.dtype == theirs.dtype, where
        assert_close(ours, theirs, rough, tolerance, where)
    for ours, theirs, rough in zip(grads, reference_grads, limit[1], strict=True):
        assert (ours is None) == (theirs is None), f"{where}: gradient"
        if ours is not None:
            assert_close(ours, theirs, rough, tolerance, f"{where}: gradient")


def run(module, inputs):
    """Results, and the gradients of their sum, weighted so that no symmetry hides an error."""
    torch.manual_seed(1)
    tensors = [t.requires_grad_() if t.is_floating_point() else t for t in clones(inputs)]
    results = [r for r in tree_leaves(module(*(t * 1 for t in tensors))) if torch.is_tensor(r)]
    sources = [t for t in tensors if t.requires_grad]
    roots = [
        r for r in results if r.requires_grad and r.layout is torch.strided and not r.is_complex()
    ]
    if not roots or not sources:
        return results, [None] * len(sources)
    weights = [torch.linspace(0.5, 1.5, r.numel()).reshape(r.shape).to(r.dtype) for r in roots]
    loss = sum((r * w).sum() for r, w in zip(roots, weights, strict=True))
    try:
        return results, torch.autograd.grad(loss, sources, allow_unused=True)
    except (NotImplementedError, RuntimeError) as error:
        if "not implemented" in str(error) and "Half" not in str(error) + "BFloat16":
            return results, [None] * len(sources)
        raise


def assert_same(ours, theirs, where):
    """What runs in place of a graph's operators gives its results to the bit."""
    for one, other in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        same = {"rtol": 0, "atol": 0, "equal_nan": True, "check_stride": True}
        torch.testing.assert_close(one, other, **same, msg=lambda text: f"{where}: {text}")


def assert_close(ours, theirs, rough, tolerance, where):
    if not theirs.dtype.is_floating_point:
        return
    if theirs.layout is not torch.strided:
        ours, theirs, rough = ours.to_dense(), theirs.to_dense(), rough.to_dense()
    finite = torch.isfinite(theirs) & torch.isfinite(rough)
    assert torch.equal(torch.isnan(ours[finite]), torch.isnan(theirs[finite])), where
    size = theirs[finite].double().norm()
    error = (ours - theirs)[finite].double().norm()
    rounding = (rough - theirs)[finite].double().norm()
    assert error <= max(tolerance * size, 4 * rounding, 1e-5), (
        f"{where}: error {error:.3g} against a norm of {size:.3g}"
    )
