"""Convert a model in place, and take the conversion out again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx, nn

from amp_graph.compiler import Compiler
from amp_graph.conversion import SLOT, Conversion
from amp_graph.errors import AmpGraphError, PlanError
from amp_graph.ir import Plan
from amp_graph.pins import Saved
from amp_graph.plan_file import PlanSource, as_plans
from amp_graph.policy import Policy, as_policy
from amp_graph.runtime import warn

Model = TypeVar("Model", bound=nn.Module)


def convert(
    model: Model,
    *,
    policy: Policy | str | torch.dtype | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    plan: PlanSource | None = None,
) -> Model:
    """Make `model` compute in mixed precision, in place, and return it.

    Parameters, `state_dict`, class, attributes and output dtypes stay as they are. The model is
    captured at its first call and again for new kinds of input, or at once on `example_inputs`
    (positional arguments as a sequence, keyword arguments as a mapping). The policy is
    "float16", "bfloat16", a `Policy`, or None: float16 on CUDA, bfloat16 elsewhere.

    `plan` is a file that `save_plan` wrote, or plans: their decisions beat the lists. A graph that
    none of them is for raises PlanError when it is captured.

    A model converted already is returned as it is, with a warning. Raises AmpGraphError for
    what cannot be converted and PolicyError or ListError for a policy that makes no sense.
    """
    _check_model(model)
    policy = as_policy(policy)
    if is_converted(model):
        warn(f"{type(model).__name__} is converted already; restore() it to change its policy")
        return model
    saved = None if plan is None else as_plans(plan)
    policy = policy if saved is None else _in_dtype_of(saved, policy)
    model.__dict__[SLOT] = conversion = Conversion(model, policy, saved)
    if example_inputs is not None:
        try:
            conversion.capture_now(example_inputs)
        except PlanError:
            restore(model)
            raise
    return model


def _in_dtype_of(saved: Saved, policy: Policy) -> Policy:
    """The policy with the low precision of the saved plans, which it may not contradict."""
    dtypes = {plan.dtype for plan in saved.plans}
    if policy.dtype is None:
        return replace(policy, dtype=saved.plans[0].dtype) if len(dtypes) == 1 else policy
    if dtypes != {policy.dtype}:
        found = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise PlanError(f"{saved.origin}: is in {found}, and the policy asks for {policy.dtype}")
    return policy


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
