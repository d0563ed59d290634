"""A model's own code under autocast, for what cannot be captured, with its gradients scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from amp_graph.capture.dynamo import is_sharded
from amp_graph.runtime import under_autocast
from amp_graph.training.crossing import Scale, carries_gradient, carries_none, enter, follow, leave

PLAIN = (Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def plain_code(module: nn.Module) -> Callable[..., Any]:
    """What `module(...)` ran before conversion."""
    call: Callable[..., Any] = type(module)._call_impl.__get__(module)
    return call


def own_code(
    module: nn.Module, devices: Iterable[str], dtype: torch.dtype, scale: Scale | None
) -> Callable[..., Any]:
    """What `module(...)` ran before conversion, under autocast and, in training, scaled."""
    under = under_autocast(plain_code(module), devices, dtype)
    if scale is None or not can_scale(module):
        return under
    holder = _Holder(module, under)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not scale.is_on():
            return under(*args, **kwargs)
        return _scaled(holder, scale, args, kwargs)

    return run


def can_scale(module: nn.Module) -> bool:
    """Not where FSDP puts tensors of its own in the place of parameters."""
    return not any(map(is_sharded, module.modules()))


def _scaled(holder: _Holder, scale: Scale, args: Any, kwargs: Any) -> Any:
    scale = _OneCall(scale)
    trained = {n: p for n, p in holder.named_parameters() if p.requires_grad}
    entered = enter(scale, [*trained.values()], range(len(trained)), [*trained.values()])
    flat, spec = tree_flatten((args, kwargs))
    flat = [enter(scale, [x], (0,), [x])[0] if carries_gradient(x) else x for x in flat]
    args, kwargs = tree_unflatten(flat, spec)
    constants = [*filter(carries_none, (*flat, *holder.buffers()))]
    result = torch.func.functional_call(
        holder, dict(zip(trained, entered, strict=True)), args, kwargs
    )
    for parameter, value in zip(trained.values(), entered, strict=True):
        follow(parameter, value)
    results, spec = tree_flatten(result)
    if not all(leaf is None or isinstance(leaf, PLAIN) for leaf in results):
        scale.is_opaque = True
        return result
    scale.is_opaque = _runs_code_in_backward(results)
    inputs = [x for x in flat if carries_gradient(x)]
    return tree_unflatten(leave(scale, results, inputs, constants), spec)


def _runs_code_in_backward(results: Iterable[Any]) -> bool:
    """Whether backward runs part of the model again (reentrant checkpointing): with the parameters
    themselves, whose gradients nobody would divide by the scale."""
    nodes = [leaf.grad_fn for leaf in results if carries_gradient(leaf)]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        following = {n for n, _ in node.next_functions} - seen
        seen |= following
        nodes += following
    return False


class _Holder(nn.Module):
    """A module around a module, whose call runs code of ours."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]):
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class _OneCall:
    """The scale for one call; it is 1 if not all gradients that come in can be multiplied by it,
    or not all that go out be divided: if the call is opaque."""

    def __init__(self, scale: Scale):
        self._scale = scale
        self.checked = scale.checked
        self.watch = None
        self.is_opaque = False

    def is_on(self) -> bool:
        return True

    def factor(self, gradient: Tensor) -> Tensor:
        return self._one(gradient.device) if self.is_opaque else self._scale.factor(gradient)

    def inverse(self, device: torch.device) -> Tensor:
        return self._one(device) if self.is_opaque else self._scale.inverse(device)

    def parameters_changed(self) -> None:
        self._scale.parameters_changed()

    @staticmethod
    def _one(device: torch.device) -> Tensor:
        return torch.ones((), device=device)
