"""The shipped lists against the installed torch, and the loader against bad lists."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from amp_graph.ir import Color
from amp_graph.levels import Level
from amp_graph.oplists import OpLists, load_lists

ATEN = torch.ops.aten
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def lists() -> OpLists:
    return load_lists(strict=True)


def overloads():
    """Every ATen overload of the installed torch."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(ATEN, packet) if namespace == "aten" else None
        # some names are registered for a backend without a schema
        if op is not None and (overload or "default") in op.overloads():
            yield getattr(op, overload or "default")


def test_every_color_is_in_use_and_every_group_says_why(lists):
    assert {listing.color for listing in lists.entries.values()} == set(Color) - {Color.KEEP}
    for name, listing in lists.entries.items():
        assert listing.why.endswith("."), name
        assert "\n" not in listing.why, name


def test_argument_names_are_those_of_the_schema(lists):
    for name, listing in lists.entries.items():
        if listing.low_args or listing.metadata_args:
            namespace, packet, *_ = name.split(".")
            operator = getattr(getattr(torch.ops, namespace), packet)
            if namespace == "higher_order":
                known = set(inspect.signature(operator).parameters)
            else:
                schemas = [getattr(operator, o)._schema for o in operator.overloads()]
                known = {a.name for schema in schemas for a in schema.arguments}
            low_args = {name for names in listing.low_args.values() for name in names}
            assert {*low_args, *listing.metadata_args} <= known, name


DIFFERS_FROM_AUTOCAST = {
    "tensordot": "promotes, then the product inside it is cast low",
    "bilinear": "a contraction done by batched products",
    "addr": "the sum of a matrix and an outer product, which rounds it",
    "grid_sampler": "its grid holds coordinates; autocast on CPU runs it in float32",
    "scatter_add": "repeated rounding while summing",
    "mv": "one multiplication for each number read; autocast on CPU leaves it in float32",
    "addmv": "as mv",
    **{f"upsample_nearest{d}d": "copies values" for d in (1, 2, 3)},
    **{f"_upsample_nearest_exact{d}d": "copies values" for d in (1, 2, 3)},
}
AUTOCAST_MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": Color.ALLOW,
    "AT_FORALL_FP32": Color.DENY,
    "AT_FORALL_FP32_SET_OPT_DTYPE": Color.DENY,
    "AT_FORALL_PROMOTE": Color.INFER,
}


def test_colors_follow_autocast_on_cuda_but_for_stated_reasons(lists):
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    different = set()
    for macro, body in re.findall(r"#define (\w+)\(_\)((?:.*\\\n)+.*)", header.read_text()):
        for packet, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body):
            op = getattr(getattr(ATEN, packet), overload or "default")
            listing = lists.lookup(op)
            assert listing, f"autocast knows {op}, the lists do not"
            if listing.color is not AUTOCAST_MACROS.get(macro, listing.color):
                different.add(packet)
    assert different == set(DIFFERS_FROM_AUTOCAST)


@pytest.mark.parametrize("key", ["AutocastCUDA", "AutocastCPU"])
def test_every_operator_autocast_knows_is_listed(lists, key):
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    assert len(names) > 100
    assert [op for op in overloads() if op.name() in names and not lists.lookup(op)] == []


LEFT_OUT = {
    "derivatives, called below the level of capture": r"\w*backward\w* \w+_jvp \w+_grad",
    "optimizer steps": r"_foreach_\w+ _fused_(adam|adamw|adagrad|sgd) _amp_\w+",
    "sparse and oneDNN layouts": r"""_?sparse_\w+ _?to_(sparse|dense|mkldnn)\w* s?smm sspaddmm hspmm
        _?coalesced? _spdiags _spsolve _cslt\w+ copy_sparse\w+ resize_as_sparse _convert_indices\w+
        _?(c?col_|c?row_)?(indices|values)(_copy)?""",
    "nested tensors": r"_?nested_\w+ to_padded_tensor",
    "quantized or packed weights": r"""quantize_\w+ _?quantized_\w+ fbgemm_\w+ _wrapped_\w+ int_repr
        q_per_\w+ dequantize _rowwise_prune _(make|empty)_per_\w+ empty_quantized _dyn_quant\w+
        \w+int[48]pack\w* _int_mm _scaled_(grouped_|add)?mm\w* _mixed_dtypes_linear
        mkldnn_reorder\w+ _saturate_weight_to_fp16""",
    "integers": r"bitwise_\w+ __\w+__ gcd lcm one_hot _dim_arange hash_tensor _is_(all|any)_true",
    "converts to a type the pass never gives": "_cast_(Byte|Char|Double|Int|Long|Short) chalf",
    "lays out memory": r"""_?resize(_as|_output)? set _copy_from\w* _reshape_from_tensor
        _new_zeros_with\w+ _cudnn_rnn_flatten_weight""",
    "torch.func and autograd": r"_make_dual\w* _unpack_dual _(add|remove)_batch_dim requires_grad",
    "internals that no model calls": r"""_test_\w+ _foobar _functional_\w+ _sobol_\w+ _fill_mem\w+
        _philox_key\w+ _philox_randint _compute_linear\w+
        _(flash|cudnn)_attention_forward_no\w+""",
    "named tensors, which torch 2.13 has no more": r"align_(as|to|tensors) refine_names rename",
}


def _computes_with_gradients(op) -> bool:
    """Tensors in and out, visible to a capture above autograd, and no out= form."""
    schema = op._schema
    takes = any("Tensor" in str(a.type) for a in schema.arguments)
    gives = any("Tensor" in str(r.type) for r in schema.returns)
    if not takes or not gives or any(a.is_out for a in schema.arguments):
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(op.name(), key) for key in ("Autograd", "CompositeImplicitAutograd"))


def test_every_differentiable_operator_of_torch_is_listed_or_left_out_with_a_reason(lists):
    unlisted = {
        op.overloadpacket.__name__
        for op in overloads()
        if _computes_with_gradients(op) and lists.lookup(op) is None
    }
    reasons = re.compile("|".join(f"({p})" for text in LEFT_OUT.values() for p in text.split()))
    unlisted = {n for n in unlisted if not reasons.fullmatch(re.sub(r"(?<=[^_])_$", "", n))}
    assert not unlisted, (
        f"torch {torch.__version__} has operators on no list: {sorted(unlisted)}. Put each into a "
        "group of allow_deny_lists/*.toml with a reason, or into LEFT_OUT of this file."
    )


def test_every_view_is_clear_but_those_of_complex_numbers_and_bits(lists):
    for op in overloads():
        listing = lists.lookup(op)
        is_view = any(a.alias_info and not a.alias_info.is_write for a in op._schema.arguments)
        if listing and is_view and listing.group not in ("complex_numbers", "bits"):
            assert listing.color is Color.CLEAR, op


@pytest.mark.parametrize(
    ("op", "group"),
    [
        (ATEN.add.Tensor, "arithmetic"),
        (ATEN.max.dim, "order_statistics"),  # the overload before the packet
        (ATEN.max.default, "maximum"),
        (ATEN.relu_.default, "sign"),  # the functional form's
        (ATEN.scatter_.reduce, "scattered_sums"),  # and the functional overload's
        (ATEN.scatter_.src, "selecting"),
        (torch.ops.higher_order.flex_attention, "flex_attention"),
    ],
)
def test_lookup_takes_the_most_specific_entry(lists, op, group):
    assert lists.lookup(op).group == group
    assert lists.lookup(op) is lists.lookup(op)


def test_cosine_similarity_is_no_norm_of_a_weight(lists):
    listing = lists.lookup(ATEN.cosine_similarity.default)
    assert listing.bounded and "weight" not in listing.why


def test_lookup_of_an_unlisted_operator_is_none(lists):
    assert lists.lookup(ATEN.bitwise_and.Tensor) is None
    assert lists.lookup(torch.ops.higher_order.cond) is None


def test_missing_kernels_are_per_device_and_dtype(lists):
    op = ATEN.avg_pool3d.default
    assert not lists.has_kernel(op, "cpu", torch.bfloat16)
    assert not lists.has_kernel(str(op), "cpu", torch.float16)
    assert lists.has_kernel(op, "cuda", torch.float16)
    with pytest.raises(NotImplementedError, match="not implemented for"):
        op(torch.randn(1, 1, 4, 4, 4, dtype=torch.bfloat16), [2, 2, 2])
    assert not lists.has_kernel(ATEN.rrelu_.default, "cpu", torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_storage_loses_no_math_precision(lists, dtype):
    assert lists.lookup(ATEN.batch_norm.default).storage_on("cpu", torch.bfloat16) is Level.SAFE
    x, scale, mean = torch.randn(8, 3, 5).to(dtype) * 3, torch.rand(3), torch.zeros(3)
    low, high = (
        ATEN.batch_norm(x.to(d), scale, None, mean.clone(), mean + 1, True, 0.1, 1e-5, False)
        for d in (dtype, torch.float32)
    )
    torch.testing.assert_close(low, high.to(dtype))
