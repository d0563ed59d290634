"""The variants that the benchmark compares: one model, trained in different precisions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from bench_models import Workload, workload_of
from torch import nn
from torch.utils._pytree import tree_map

import amp_graph

Region = Callable[[], AbstractContextManager[Any]]
Change = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Settings:
    """What is measured, apart from the model."""

    device: str = "cpu"
    dtype: str = "bfloat16"
    size: str = "cpu"
    turns: int = 30
    steps: int = 1
    accumulate: int = 1
    compile: bool = False
    mode: str | None = None
    levels: list[str] = field(default_factory=list)
    emulate_cuda: bool = False
    scale: bool = False
    refresh_weights: str = "always"
    inference: bool = False
    cpu_time: bool = False
    variants: list[str] = field(default_factory=list)

    @property
    def low(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass
class Variant:
    """A model in one precision, and its training steps, or forward passes. `counted` is the region
    that it runs in while operators and bytes are counted, if another."""

    work: Workload
    model: nn.Module
    region: Region
    scaler: torch.amp.GradScaler
    accumulate: int
    device: str
    tf32: bool = False
    counted: Region | None = None
    inference: bool = False

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def forward(self) -> torch.Tensor:
        with self.region():
            return self.work.loss(self.model)

    def arithmetic(self) -> AbstractContextManager[Any]:
        """With TF32 or without. A context, since `torch.testing`, whose lists CudaRules reads,
        forbids to set it for good."""
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        return torch.backends.cudnn.flags(enabled=True, allow_tf32=self.tf32)

    def step(self) -> None:
        with self.arithmetic():
            if self.inference:
                with torch.inference_mode():
                    self.forward()
            else:
                self.train()

    def train(self) -> None:
        for _ in range(self.accumulate):
            self.scaler.scale(self.forward() / self.accumulate).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def begin(self) -> None:
        """A first forward and backward pass, and a step without gradients: until a step without a
        GradScaler amp_graph leaves scaling to that of another variant."""
        with self.arithmetic():
            self.forward().backward()
        self.optimizer.zero_grad()
        self.optimizer.step()

    def gradients(self) -> torch.Tensor:
        """True gradients of one forward and backward pass, as one float32 vector."""
        scale = self.scaler.get_scale()
        for _ in range(24):  # a scale that overflows is halved, as GradScaler would
            with self.arithmetic():
                (self.forward() * scale).backward()
            found = [
                torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()
            ]
            flat = torch.cat([g.detach().float().flatten() for g in found]) / scale
            self.optimizer.zero_grad()
            if flat.isfinite().all():
                break
            scale /= 2
        return flat


def variants(name: str, settings: Settings) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """The name of each variant, and how to make it."""
    torch.manual_seed(0)
    device, dtype = settings.device, settings.low
    work = workload_of(name, device, settings.size == "gpu")
    scaled = settings.scale or dtype is torch.float16
    autocast = partial(torch.autocast, device, dtype=dtype)
    rules = _cuda_rules(dtype) if settings.emulate_cuda else None

    def make(
        change: Change = lambda m: m,
        region: Region = nullcontext,
        scales: bool = False,
        tf32: bool = False,
        counted: Region | None = None,
    ) -> Variant:
        model = copy.deepcopy(work.model)
        for layer in model.modules():
            if isinstance(layer, nn.RNNBase):  # a copy's weights no longer lie together
                layer.flatten_parameters()
        scaler = torch.amp.GradScaler(device, enabled=scales)
        per_step = settings.accumulate, device, tf32, counted, settings.inference
        return Variant(work, change(model), region, scaler, *per_step)

    def ours(**given: Any) -> Change:
        given |= {"loss_scale": amp_graph.LossScale()} if scaled else {}
        policy = amp_graph.Policy(dtype, refresh_weights=settings.refresh_weights, **given)
        return lambda m: amp_graph.convert(m, policy=policy)

    def compiled(model: nn.Module) -> nn.Module:
        made: Any = torch.compile(model, mode=settings.mode)
        return made

    def low(model: nn.Module) -> nn.Module:
        return _with_low_inputs(model.to(dtype), dtype)

    made = {"float32": make}
    if device == "cuda":
        made["float32 TF32"] = partial(make, tf32=True)
    made["autocast"] = partial(make, region=autocast, scales=scaled, counted=rules)
    if not settings.levels:
        made["amp_graph"] = partial(make, ours())
    for level in settings.levels:
        made[f"amp_graph {level}"] = partial(make, ours(level=level))
    made["pure low"] = partial(make, low)
    if settings.compile:
        made["float32 compiled"] = partial(make, compiled)
        made["autocast compiled"] = partial(make, compiled, autocast, scaled)
        inductor = ours(compiler="inductor", compiler_options=settings.mode)
        made["amp_graph inductor"] = partial(make, inductor)
        made["pure low compiled"] = partial(make, lambda m: low(compiled(m)))
    wanted = {"float32", "autocast", *settings.variants}
    return ((n, m) for n, m in made.items() if not settings.variants or n in wanted)


def _cuda_rules(dtype: torch.dtype) -> Region:
    from bench_cuda_rules import CudaRules  # needs what PyTorch's own tests need

    return partial(CudaRules, dtype)


def _with_low_inputs(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Inputs are cast on the way in and outputs on the way out, so that the loss is the same."""

    def lower(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(a.to(dtype) if a.is_floating_point() else a for a in args)

    def widen(_: nn.Module, args: Any, result: Any) -> Any:
        return tree_map(torch.Tensor.float, result)

    model.register_forward_pre_hook(lower)
    model.register_forward_hook(widen)
    return model
