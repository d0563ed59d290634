"""Convert a model in place, and take the conversion out again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from amp_graph.capture.dynamo import DYNAMO_ERRORS, can_capture, captured_call, frames_seen
from amp_graph.capture.retrace import retrace
from amp_graph.errors import AmpGraphError
from amp_graph.ir import Plan
from amp_graph.policy import Policy, as_policy
from amp_graph.rewrite import device_types, rewrite
from amp_graph.runtime import Guarded, under_autocast, warn, without_autocast

SLOT = "_call_impl"  # the method of nn.Module that a conversion stands in front of
AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")

Model = TypeVar("Model", bound=nn.Module)


def convert(
    model: Model,
    *,
    policy: Policy | str | torch.dtype | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
) -> Model:
    """Make `model` compute in mixed precision, in place, and return it.

    Parameters, `state_dict`, class, attributes and output dtypes stay as they are. The model is
    captured at its first call and again for new kinds of input, or at once on `example_inputs`
    (positional arguments as a sequence, keyword arguments as a mapping). The policy is
    "float16", "bfloat16", a `Policy`, or None: float16 on CUDA, bfloat16 elsewhere.

    A model converted already is returned as it is, with a warning. Raises AmpGraphError for
    what cannot be converted and PolicyError or ListError for a policy that makes no sense.
    """
    _check_model(model)
    policy = as_policy(policy)
    if is_converted(model):
        warn(f"{type(model).__name__} is converted already; restore() it to change its policy")
        return model
    model.__dict__[SLOT] = conversion = Conversion(model, policy)
    if example_inputs is not None:
        conversion.capture_now(example_inputs)
    return model


def restore(model: Model) -> Model:
    """Undo `convert`: the model runs its own code again. Raises AmpGraphError if not converted."""
    if not is_converted(model):
        raise AmpGraphError(f"{type(model).__name__} is not converted; there is nothing to restore")
    del model.__dict__[SLOT]
    return model


def is_converted(model: nn.Module) -> bool:
    """Whether `model` itself was converted (not a module inside or around it)."""
    return isinstance(model.__dict__.get(SLOT), Conversion)


def plans(model: nn.Module) -> tuple[Plan, ...]:
    """The plans of the graphs captured from a converted model so far, in order of capture."""
    if not is_converted(model):
        raise AmpGraphError(
            f"{type(model).__name__} is not converted; call amp_graph.convert first"
        )
    conversion: Conversion = model.__dict__[SLOT]
    return conversion.plans


def backend(
    graph_module: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Any = None,
    mode: Any = None,
) -> Callable[..., Any]:
    """The backend of `torch.compile(model, backend="amp_graph", options={"dtype": "float16"})`."""
    policy = Policy(**(options or {}))
    return Compiler(policy).compile_graph(graph_module, example_inputs)


class Compiler:
    """Rewrites every graph that Dynamo hands over; keeps their plans in order of capture."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.lists = policy.load_lists()
        self._plans: list[Plan] = []

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(self._plans)

    def module_names(self) -> dict[str, str]:
        """The path of each module of the model by its id; see `retrace`."""
        return {}

    def compile_graph(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Return what runs instead of a Dynamo graph. Whatever fails here, something right runs:
        a graph that cannot be retraced runs under autocast, one that cannot be rewritten as it
        was captured."""
        devices = _devices_of(example_inputs)
        try:
            aten = retrace(graph, self.module_names())
        except Exception as error:
            return self._not_retraced(graph, devices, error)
        devices |= device_types(aten)
        try:
            emitted, plan = rewrite(aten, self.policy, self.lists)
        except Exception as error:
            self._plans.append(Plan(self.policy.dtype_for(devices)))
            self._fall_back(len(self._plans) - 1, f"{type(error).__name__}: {error}")
            return graph.forward
        self._plans.append(plan)
        index = len(self._plans) - 1
        return Guarded(
            without_autocast(emitted.forward, devices),
            graph.forward,
            _inputs_at_risk(plan),
            lambda reason: self._fall_back(index, reason),
        )

    def _not_retraced(
        self, graph: fx.GraphModule, devices: frozenset[str], error: Exception
    ) -> Callable[..., Any]:
        dtype = self.policy.dtype_for(devices)
        reason = f"not retraced to ATen ({type(error).__name__}: {error}); runs under autocast"
        self._plans.append(Plan(dtype, fallback=reason.replace("\n", " ")))
        return under_autocast(graph.forward, devices, dtype)

    def _fall_back(self, index: int, reason: str) -> None:
        plan = self._plans[index]
        self._plans[index] = replace(plan, low=frozenset(), casts=(), fallback=reason)
        warn(f"graph {index} runs as it was captured, in its own precision: {reason}")


class Conversion(Compiler):
    """A converted model's stand-in for `nn.Module._call_impl`.

    It sits in the model's `__dict__`, so that it lives and dies with the model: a deep copy of
    the model carries a conversion of its own, a pickle carries the plain model.
    """

    def __init__(self, module: nn.Module, policy: Policy):
        super().__init__(policy)
        self.module = module
        self._checked = False
        self._capture_afresh()

    def _capture_afresh(self) -> None:
        call = captured_call(self.module, self.compile_graph)
        self._call = without_autocast(call, AUTOCAST_DEVICES)

    @torch.compiler.disable(reason="a model converted by amp_graph captures its own graphs")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not can_capture():
            return self._own_code()(*args, **kwargs)
        frames = frames_seen()
        try:
            result = self._call(*args, **kwargs)
        except DYNAMO_ERRORS as error:
            result = self._uncaptured(error)(*args, **kwargs)
        except Exception:
            if frames_seen() != frames:  # Dynamo never again captures code that raised meanwhile
                self._capture_afresh()
            raise
        if not self._checked:
            self._check_that_something_was_converted()
        if self.policy.output_dtype is None:
            return result
        return tree_map(self._as_output, result)

    def capture_now(self, example_inputs: Sequence[Any] | Mapping[str, Any]) -> None:
        """Run the model once for its graphs; buffers and random state are put back."""
        with _unchanged(self.module):
            if isinstance(example_inputs, Mapping):
                self.module(**example_inputs)
            elif isinstance(example_inputs, torch.Tensor):
                self.module(example_inputs)
            else:
                self.module(*example_inputs)

    def module_names(self) -> dict[str, str]:
        return {str(id(module)): name for name, module in self.module.named_modules()}

    def _own_code(self) -> Callable[..., Any]:
        """The model's own code under autocast, for what Dynamo cannot capture."""
        devices = frozenset(p.device.type for p in self.module.parameters())
        own_call = type(self.module)._call_impl.__get__(self.module)
        return under_autocast(own_call, devices, self.policy.dtype_for(devices))

    def _uncaptured(self, error: Exception) -> Callable[..., Any]:
        """From now on the whole model runs its own code under autocast."""
        name = type(self.module).__name__
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        dtype = self.policy.dtype_for(p.device.type for p in self.module.parameters())
        self._plans.append(Plan(dtype, fallback=f"not captured ({reason}); runs under autocast"))
        warn(f"{name} was not captured and runs under autocast: {reason}")
        self._call = self._own_code()
        return self._call

    def _check_that_something_was_converted(self) -> None:
        self._checked = True
        if not self._plans:
            warn(f"nothing of {type(self.module).__name__} was captured, so nothing was converted")
        elif not any(_converts(plan) for plan in self._plans):
            reasons = [p.fallback for p in self._plans if p.fallback] or [
                "no operator of it is on the allow list and has float32 operands"
            ]
            warn(f"nothing of {type(self.module).__name__} was converted: {reasons[0]}")

    def _as_output(self, value: Any) -> Any:
        is_float32 = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        return value.to(self.policy.output_dtype) if is_float32 else value

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        """Called while the model is copied, when its copy exists but is not filled in yet."""
        return Conversion(memo[id(self.module)], self.policy)

    def __reduce__(self) -> Any:
        """Pickled as the method that it stands in front of, so that the model loads plain, also
        where this package is not installed."""
        return getattr, (self.module, SLOT)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise AmpGraphError(f"convert() takes a torch.nn.Module, not {type(model).__name__}")
    name = type(model).__name__
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise AmpGraphError(f"{name} is scripted; convert the module it was scripted from")
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not dtypes:
        raise AmpGraphError(f"{name} has no floating-point parameters; there is nothing to convert")
    if torch.float32 not in dtypes:
        found = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise AmpGraphError(
            f"{name} has parameters in {found} only; conversion starts from float32 (model.float())"
        )


def _converts(plan: Plan) -> bool:
    in_autocast = bool(plan.fallback and plan.fallback.endswith("autocast"))
    return bool(plan.low) or in_autocast or any(_converts(b) for b in plan.bodies.values())


def _devices_of(inputs: Sequence[Any]) -> frozenset[str]:
    return frozenset(x.device.type for x in inputs if isinstance(x, torch.Tensor))


def _inputs_at_risk(plan: Plan) -> list[int]:
    """Inputs that a run may write into: not every schema says so (batch_norm's does not), hence
    all but parameters."""
    inputs = [f for f in plan.facts.values() if f.op == "placeholder"]
    return [i for i, f in enumerate(inputs) if f.tensors and (f.written or not f.is_parameter)]


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    with torch.random.fork_rng(enabled=True):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
