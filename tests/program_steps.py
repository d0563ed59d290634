"""The steps that random programs are made of.

Operands are told apart by their names: i is an integer tensor, m a boolean one, the others
anything. A step that fits its operands badly raises, and is then left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

N = 4  # the size of most dimensions


def _setitem(x: Tensor, value: Tensor) -> None:
    x[..., 0] = value


def _indices(i: Tensor) -> Tensor:
    return i.long().reshape(-1)[:N] % 2


def _unrecorded(step: Callable[..., Any]) -> Callable[..., Any]:
    """Both what autograd does not record and what it then records of the same operands."""

    def run(*operands: Tensor) -> list[Tensor]:
        with torch.no_grad():
            hidden = step(*operands)
        return [hidden, step(*operands) * 0.5 + hidden]

    return run


# Continuous everywhere, so that a rounded operand gives a slightly different result.
SMOOTH: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, y: x @ y / 2,
    "linear": lambda x, y: F.linear(x, y),
    "linear_bias": lambda x, y, z: F.linear(x, y, z) / 2,
    "addmm": lambda x, y, z: torch.addmm(x, y, z, alpha=0.5),
    "baddbmm": lambda x, y, z: torch.baddbmm(x, y, z, beta=0.5),
    "einsum": lambda x, y: torch.einsum("...ij,...kj->...ik", x, y) / 2,
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y, y),
    "conv1d": lambda x, y: F.conv1d(x, y, padding=1) / 3,
    "add": lambda x, y: x + y,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=-2),
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y * y + 1),
    "scale": lambda x: x * 0.7 + 1,
    "tanh": lambda x: torch.tanh(x),
    "gelu": lambda x: F.gelu(x),
    "sigmoid": lambda x: torch.sigmoid(x),
    "sqrt": lambda x: (x * x + 1).sqrt(),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.5),
    "avg_pool": lambda x: F.avg_pool1d(x, 2),
    "exp": lambda x: torch.exp(x.tanh()),
    "log": lambda x: torch.log(x * x + 1),
    "square": lambda x: x.tanh().pow(2),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x, y: F.layer_norm(x, (N,), y),
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, y, training=True, eps=0.1),
    "sum": lambda x: x.sum(),
    "sum_dim": lambda x: x.sum(0, keepdim=True),
    "mean": lambda x: x.mean(-1),
    "var_mean": lambda x: torch.var_mean(x, -1, correction=0),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "cumsum": lambda x: x.cumsum(-1),
    "transpose": lambda x: x.transpose(0, -1),
    "flatten": lambda x: x.reshape(-1),
    "view": lambda x: x.view(-1, N),
    "expand": lambda x: x.expand(2, *x.shape),
    "head": lambda x: x[..., :2],
    "row": lambda x: x[0],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "diagonal": lambda x: x.diagonal(),
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: x.split([1, N - 1]),
    "unbind": lambda x: x.unbind(0),
    "cat": lambda x, y: torch.cat([x, y]),
    "cat_twice": lambda x, y: torch.cat([x, y, x], -1),
    "stack": lambda x, y: torch.stack([x, y]),
    "flip": lambda x: x.flip(0),
    "pad": lambda x: F.pad(x, (1, 1)),
    "tril": lambda x: x.tril(),
    "repeat": lambda x: x.repeat(2, 1),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "masked_fill": lambda x, m: x.masked_fill(m, 0.5),
    "where": lambda m, x, y: torch.where(m, x, y),
    "index_select": lambda x, i: x.index_select(0, _indices(i)),
    "gather": lambda x, i: x.gather(0, i.long().view(N, N) % 2),
    "index": lambda x, i: x[_indices(i)],
    "embedding": lambda x, i: F.embedding(i.long() % 2, x),
    "index_put": lambda x, i, y: x.index_put((_indices(i),), y, accumulate=True),
    "scatter_add": lambda x, i, y: x.scatter_add(0, i.long().view(N, N) % 2, y),
    "conv2d": lambda x, y: F.conv2d(x.view(1, 1, N, -1), y[..., :2, :2].reshape(-1, 1, 2, 2)) / 2,
    "bilinear": lambda x, y, z: F.bilinear(x, y, z.expand(N, N, N)) / 4,
    "group_norm": lambda x: F.group_norm(x.view(1, N, -1), 2, eps=0.1),
    "std": lambda x: (x.std(-1, correction=0) + 1).log2(),
    "hypot": lambda x, y: torch.hypot(x + 2, y),
    "logaddexp": lambda x, y: torch.logaddexp(x, y),
    "norm": lambda x: (x + 2).norm(dim=-1),
    "dist": lambda x, y: torch.cdist(x + 2, y - 2),
    "mse": lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="none").tanh(),
    "rfft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 0.5, N),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2)) * 1j),
    "dropout": lambda x: F.dropout(x, 0.0),
    "squeeze": lambda x: x.squeeze(),
    "as_strided": lambda x: x.as_strided((2, 2), (N, 1)),
    "unfold": lambda x: x.unfold(-1, 2, 1),
    "expand_as": lambda x, y: x.expand_as(y),
    "view_as": lambda x, y: x.view_as(y),
    "broadcast": lambda x, y: torch.broadcast_tensors(x, y),
    "meshgrid": lambda x, y: torch.meshgrid(x[0], y[0], indexing="ij"),
    "masked_scatter": lambda x, m, y: x.masked_scatter(m, y),
    "masked_softmax": lambda x, m: x.masked_fill(m, -1e9).softmax(-1),
    "masked_infinity": lambda x, m: x.masked_fill(m, -torch.inf).logsumexp(0).nan_to_num(neginf=0),
    "where_number": lambda m, x: torch.where(m, x, 0.5),
    "scatter": lambda x, i, y: x.scatter(0, i.long().view(N, N) % 2, y.detach()),
    "index_fill": lambda x, i: x.index_fill(0, _indices(i), 0.5),
    "one_hot": lambda i, x: F.one_hot(i.long() % N, N).float() @ x,
    "to_other": lambda x, y: x.to(y.dtype) if y.is_floating_point() else x,
    "add_integers": lambda x, i: x + i,
    "times_mask": lambda x, m: x * m,
    "times_element": lambda x, y: x * y.reshape(-1)[0],
    "times_sum": lambda x, y: x * (y.mean() / 4),
    "zeros_like": lambda x: torch.zeros_like(x),
    "new_ones": lambda x: x.new_ones(N) * 0.5,
    "factory": lambda x: torch.full((N, N), 0.25) + torch.arange(N),
    "double": lambda x: x.double(),
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "long": lambda i: i.long(),
    "type_as": lambda x, y: x.type_as(y) if y.is_floating_point() else x,
    "sum_in_double": lambda x: x.sum(-1, dtype=torch.float64),
    "softmax_in_float": lambda x: x.softmax(-1, dtype=torch.float32),
    "unrecorded_exp": lambda x: _unrecorded(lambda x: torch.exp(x.tanh()))(x),
    "unrecorded_matmul": lambda x, y: _unrecorded(lambda x, y: x @ y / 2)(x, y),
    "unrecorded_softmax": lambda x: _unrecorded(lambda x: x.softmax(-1))(x),
    "unrecorded_add_": lambda x, y: _unrecorded(lambda x, y: x.mul_(0.5).add_(y))(x.detach(), y),
    "add_": lambda x, y: x.add_(y),
    "add_number_": lambda x: x.add_(0.5),
    "mul_": lambda x, y: x.mul_(y),
    "tanh_": lambda x: x.tanh_(),
    "exp_": lambda x: x.tanh_().exp_(),
    "neg_": lambda x: x.neg_(),
    "fill_": lambda x: x.fill_(0.5),
    "zero_row_": lambda x: x[0].zero_(),
    "copy_": lambda x, y: x if x is y else x.copy_(y),
    "masked_fill_": lambda x, m: x.masked_fill_(m, 0.5),
    "index_put_": lambda x, i, y: x.index_put_((_indices(i),), y),
    "index_add_": lambda x, i, y: x.index_add_(0, _indices(i), y),
    "setitem": _setitem,
    "scale_columns_": lambda x: x[..., 1:].mul_(0.5),
    "transpose_": lambda x: x.t().add_(x.new_ones(N)),
    "addmm_": lambda x, y: x.addmm_(y, y, alpha=0.3),
    "addcmul_": lambda x, y, z: x.addcmul_(y, z, value=0.5),
    "lerp_": lambda x, y: x.lerp_(y, 0.3),
    "sub_": lambda x, y: x.sub_(y, alpha=2),
    "div_": lambda x: x.div_(2),
    "softmax_": lambda x: x.copy_(x.softmax(-1)),
    "scatter_": lambda x, i: x.scatter_(0, i.long().view(N, N) % 2, 0.5),
    "index_copy_": lambda x, y: x.index_copy_(0, torch.tensor([1, 0]), y[:2]),
    "zero_halves_": lambda x: [half.zero_() for half in x.split(2, -1)][:1],
    "swap_rows_": lambda x: x[:2].copy_(x[2:] + x[:2]),
    "baddbmm_": lambda x, y: x.baddbmm_(y, y, alpha=0.3),
    "running_": lambda x, y: y.mul_(0.9).add_(x.detach().mean(0), alpha=0.1),
    "batch_norm_": lambda x, y: F.batch_norm(x.view(-1, N), y[0], y[1], training=True, eps=0.1),
    "matmul_out": lambda x, y: torch.mm(x, y, out=torch.zeros(len(x), y.shape[1])) / 2,
    "fill_with_": lambda x, y: x.fill_(y.reshape(-1)[0]),
    "out": lambda x, y: torch.mul(x, y, out=torch.empty_like(x + y)),
}


def _in_inference_mode(x: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        hidden = x @ y / 2
    return hidden.clone()


def _modes_in_modes(x: Tensor, y: Tensor) -> list[Tensor]:
    with torch.no_grad():
        hidden = x @ y / 2
        with torch.enable_grad():
            recorded = x.tanh() @ y / 2
        both = hidden + recorded
    return [both.exp().tanh(), recorded, both]


class _SavesInputs(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x @ y / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return gradient @ y.mT / 2, x.mT @ gradient / 2


class _SavesResult(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.tanh().exp()
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, result = ctx.saved_tensors
        return gradient * result * (1 - x.tanh().square())


class _TwoResults(Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return x @ y * factor, x.detach().sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.factor = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, Tensor | None, None]:
        x, y = ctx.saved_tensors
        of_x = gradient @ y.mT * ctx.factor if ctx.needs_input_grad[0] else None
        of_y = x.mT @ gradient * ctx.factor if ctx.needs_input_grad[1] else None
        return of_x, of_y, None


def _checkpointed(function: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda *operands: checkpoint(function, *operands, use_reentrant=False)


def _broken(x: Tensor, y: Tensor) -> list[Tensor]:
    hidden = x @ y / 2
    torch._dynamo.graph_break()
    return [hidden, hidden.tanh() @ y / 2]


def _broken_by_a_number(x: Tensor) -> Tensor:
    return x * 0.5 if x.sum().item() > 0 else x.tanh()


# Only Dynamo captures these: `.data` is no operator, nor is inference mode; checkpoints and custom
# autograd functions have bodies.
CAPTURED: dict[str, Callable[..., Any]] = {
    "data": lambda x: x.data * 0.5,
    "data_exp": lambda x: x.data.tanh().exp(),
    "data_matmul": lambda x, y: x.data @ y / 2,
    "data_mul_": lambda x: [x.data.mul_(0.5), x][1],
    "data_fill_": lambda x: [x.data[..., 0].fill_(0.3), x][1],
    "data_copy_": lambda x, y: [x.data.copy_(y.data), x][1],
    "in_inference_mode": _in_inference_mode,
    "modes_in_modes": _modes_in_modes,
    "cpu": lambda x: x.cpu(),
    "to_device": lambda x: x.to("cpu"),
    "to_copy": lambda x: x.to("cpu", copy=True),
    "to_tensor": lambda x, y: x.to(y) if y.is_floating_point() else x,
    "saves_inputs": lambda x, y: _SavesInputs.apply(x, y),
    "saves_result": lambda x: _SavesResult.apply(x),
    "two_results": lambda x, y: _TwoResults.apply(x, y, 0.5),
    "checkpoint": _checkpointed(lambda x, y: F.gelu(x @ y / 2) @ y / 2),
    "checkpoint_softmax": _checkpointed(lambda x: x.softmax(-1) + x),
    "checkpoint_writes": _checkpointed(lambda x, y: (x @ y / 2).mul_(0.5).tanh_()),
    "checkpoint_of_function": _checkpointed(lambda x, y: _SavesInputs.apply(x, y).exp().tanh()),
    "broken": _broken,
    "broken_by_a_number": _broken_by_a_number,
}
# Continuous, with a gradient that jumps.
KINKED: dict[str, Callable[..., Any]] = {
    "relu": lambda x: x.relu(),
    "relu_": lambda x: x.relu_(),
    "abs": lambda x: x.abs(),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "maximum": lambda x, y: torch.where(x > y, x, y),
    "amax": lambda x: x.amax(-1, keepdim=True),
    "max": lambda x: x.max(-1).values,
    "topk": lambda x: x.topk(2).values,
    "sort": lambda x: x.sort(0).values,
    "max_pool": lambda x: F.max_pool1d(x, 2),
    "relu6": lambda x: F.relu6(x),
    "leaky_relu": lambda x: F.leaky_relu(x),
    "clamp_": lambda x, y: x.clamp_(max=y),
    "median": lambda x: x.median(-1).values,
    "cummax": lambda x: x.cummax(0).values,
    "prelu": lambda x, y: F.prelu(x, y.reshape(-1)[:1]),
}
