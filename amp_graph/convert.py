"""Convert a model in place, and take the conversion out again."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Sequence
from itertools import takewhile
from types import FunctionType
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from amp_graph.backend.record import Record
from amp_graph.batches import Batch, arguments_of, call_with
from amp_graph.calls.conversion import Conversion, conversion_of, found_conversion
from amp_graph.calls.convertible import check_model, has_no_call, why_not_at_once
from amp_graph.capture.surroundings import is_estimate
from amp_graph.errors import AmpGraphError, did_you_mean, warn
from amp_graph.gradients.found_inf import parameters_of
from amp_graph.ir import Plan
from amp_graph.modules import devices_of, unwrapped
from amp_graph.optimizers.guards import overflowed_by_hand
from amp_graph.plans.pins import Saved
from amp_graph.plans.plan_file import PlanSource, as_plans
from amp_graph.policy import Policy, PolicySource, as_policy
from amp_graph.scaling.graph_scale import GraphScale
from amp_graph.snapshots import unchanged

Model = TypeVar("Model", bound=nn.Module)
Optimizers = TypeVar("Optimizers", Optimizer, list[Optimizer], tuple[Optimizer, ...])


@overload
def convert(
    model: Model,
    optimizer: None = None,
    *,
    policy: PolicySource = None,
    example_inputs: Batch | None = None,
    plan: PlanSource | None = None,
    methods: Sequence[str] = (),
) -> Model: ...
@overload
def convert(
    model: Model,
    optimizer: Optimizers,
    *,
    policy: PolicySource = None,
    example_inputs: Batch | None = None,
    plan: PlanSource | None = None,
    methods: Sequence[str] = (),
) -> tuple[Model, Optimizers]: ...
def convert(
    model: Model,
    optimizer: Any = None,
    *,
    policy: PolicySource = None,
    example_inputs: Batch | None = None,
    plan: PlanSource | None = None,
    methods: Sequence[str] = (),
) -> Any:
    """Make `model` compute in mixed precision, in place, and return it.

    Parameters, `state_dict`, class, attributes and output dtypes stay as they are. The model is
    captured at its first call and again for new kinds of input, or at once on `example_inputs` (a
    tensor, positional arguments as a sequence, or keyword arguments as a mapping). The policy is
    "float16", "bfloat16", a `Policy`, or None: float16 on CUDA and MPS, bfloat16 elsewhere. Of a
    wrapper such as DistributedDataParallel the module inside is converted.

    In float16 gradients are scaled inside the graphs, and optimizers skip a step whose gradients
    overflowed. That holds for every `torch.optim.Optimizer` that steps the model's parameters.
    Pass `optimizer`, one or a list, to have the loss scale saved in and loaded from its
    `state_dict()`, and to have its `step()` return whether it stepped; the pair (model, optimizer)
    is returned then, both the objects that were given. A wrapper that is no Optimizer, but has a
    `step()` and `param_groups` (ScheduleFreeWrapper), may be given as well; its `state_dict()`
    holds the scale if it is that of an optimizer which is given with it.

    `plan` is a file that `save_plan` wrote, or plans: their decisions beat the lists. A graph that
    none of them is for raises PlanError when it is captured.

    `methods` names methods of the model that run in mixed precision as well when they are called
    directly, `model.encode(x)`: each is captured as a whole, under the same loss scale. What they
    return has the dtypes that the plain model would give it.

    A model converted already stays as it is, with a warning, and neither follows the plan nor runs
    on the inputs. A glob of the policy that matches no module warns, too. Raises AmpGraphError for
    what cannot be converted, PolicyError, ListError or PlanError for a policy or plan that makes no
    sense, and what the model raises on `example_inputs`; the model is not converted then.
    """
    check_model(model)
    inner = unwrapped(model)
    policy = as_policy(policy)
    optimizers = _checked(optimizer, inner)
    _check_methods(inner, methods)
    saved = None if plan is None else as_plans(plan)
    if example_inputs is not None:
        arguments_of(example_inputs)
    if is_converted(inner):
        at_once = [("plan", plan), ("example_inputs", example_inputs)]
        unused = " and ".join(name for name, value in at_once if value is not None)
        warn(
            f"{type(inner).__name__} is converted already; restore() it to change its policy or "
            f"its methods{unused and f'. Not used: {unused}'}"
        )
    else:
        is_called = _calls_modules_way(type(inner))
        if not methods and has_no_call(inner):
            is_called = False
            warn(
                f"{type(inner).__name__} has no forward, so nothing of it is converted: convert "
                f"the modules in it, or name its methods that are called in methods=..."
            )
        elif not is_called:
            warn(
                f"{type(inner).__name__} has a __call__ of its own that does not seem to go on to "
                f"nn.Module's; if so, it is not converted: convert the modules that it calls"
            )
        paths = [path for path, _ in inner.named_modules()]
        for given, glob in policy.unmatched(paths):
            warn(
                f"{given} matches no path in {type(inner).__name__}.named_modules(); correct or "
                f"remove it.{did_you_mean(glob, paths)}"
            )
        _convert(inner, policy, saved, example_inputs, tuple(dict.fromkeys(methods)))
        if not is_called:
            conversion_of(inner).is_awaited = False  # it was told of
    for each in optimizers:
        conversion_of(inner).attach(each)
    return model if optimizer is None else (model, optimizer)


def convert_at_first_call(model: nn.Module, policy: Policy) -> None:
    """Convert one of many models that share a policy: its globs may match no module of this one,
    and parts that are trained without the whole are converted by themselves. See `convert`."""
    check_model(model)
    _convert(model, policy, None, None)
    conversion = conversion_of(model)
    conversion.is_awaited, conversion.gives_way = False, True


def _convert(
    model: nn.Module,
    policy: Policy,
    saved: Saved | None,
    example_inputs: Batch | None,
    methods: Sequence[str] = (),
) -> None:
    if saved is not None:
        policy = policy.following(saved)
    conversion = Conversion(model, policy, saved, methods)
    conversion.open()
    try:
        if not is_estimate(model):  # else there is one from when a graph is captured
            conversion.scale_for(policy.dtype_for(devices_of(model)))
        if example_inputs is not None:
            with unchanged(model):  # but for parameters, which may not fit twice
                call_with(model, example_inputs)
    except BaseException:  # whoever mends what raised, and converts again, is to get all of it
        conversion.close()
        raise


def restore(model: Model) -> Model:
    """Undo `convert`: the model runs its own code again. Raises AmpGraphError if not converted."""
    conversion_of(model).close()
    return model


def is_converted(model: nn.Module) -> bool:
    """Whether `model` itself was converted (not a module inside it)."""
    return found_conversion(model) is not None


def plans(model: nn.Module) -> tuple[Plan, ...]:
    """Return the plans of the graphs captured from a converted model so far, in order of
    capture."""
    return conversion_of(model).compiler.plans


def scale_of(model: nn.Module) -> GraphScale | None:
    """Return the loss scale inside a converted model's graphs; None if its gradients are not
    scaled.

    It has `get_scale()`, and `state_dict()` and `load_state_dict()` in GradScaler's format.
    """
    return conversion_of(model).scale


def has_finite_gradients(model: nn.Module) -> bool:
    """Return whether to go on with an update of one's own: no gradient of the model overflowed.

    For training without a `torch.optim.Optimizer`, which would ask by itself. Call it once per
    update, under FSDP on every rank: the loss scale is adjusted accordingly.
    """
    scale = scale_of(model)  # which raises for what is no converted model
    return not overflowed_by_hand([*model.parameters()], scale, by=model)


def record_of(model: nn.Module) -> Record:
    """Return the history of a converted model so far. It is added to while the model lives."""
    return conversion_of(model).compiler.record


def _checked(optimizer: Any, model: nn.Module) -> list[Optimizer]:
    """Return the optimizers given, after checking that each steps some of the model's
    parameters."""
    if optimizer is None:
        return []
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    own = {id(p) for p in model.parameters()}
    for each in optimizers:
        if isinstance(each, (str, torch.dtype, Policy)):
            raise AmpGraphError(f"convert(model, policy={each!r}): the policy goes by its name")
        if not _can_step(each):
            raise AmpGraphError(
                f"convert(model, optimizer) takes a torch.optim.Optimizer, or what has step() and "
                f"param_groups as one, or a list of them, not {type(each).__name__}; for an update "
                f"of your own see has_finite_gradients"
            )
        if not any(id(p) in own for p in parameters_of(each)):
            raise AmpGraphError(
                f"{type(each).__name__} steps no parameter of {type(model).__name__}; make it "
                f"from this model's parameters()"
            )
    return optimizers


def _can_step(given: Any) -> bool:
    """Whether an object has what a GradScaler asks of an optimizer, and a guard can stand before
    it."""
    if isinstance(given, Optimizer):
        return True
    try:
        hash(weakref.ref(given)), vars(given)
        are_tensors = all(isinstance(p, torch.Tensor) for p in parameters_of(given))
        return are_tensors and callable(given.step)
    except (AttributeError, LookupError, TypeError):
        return False


def _calls_modules_way(kind: type[nn.Module]) -> bool:
    """Whether a call reaches `nn.Module.__call__`, where a conversion stands: no class on the way
    has a `__call__` of its own, apart from fx's `_wrapped_call`, which goes on."""
    before_module = takewhile(lambda c: c is not nn.Module, kind.__mro__)
    own = [c.__dict__["__call__"] for c in before_module if "__call__" in c.__dict__]
    codes = [c.__code__ for c in map(inspect.unwrap, own) if isinstance(c, FunctionType)]
    others = {"__call__", "_call_impl", "_wrapped_call"}
    return all(others.intersection(code.co_names) for code in codes)


def _check_methods(model: nn.Module, methods: Any) -> None:
    are_names = isinstance(methods, Collection) and not isinstance(methods, str)
    if not are_names or not all(isinstance(name, str) for name in methods):
        raise AmpGraphError(f"methods is a sequence of names, such as ('encode',), not {methods!r}")
    kind = type(model)
    for name in methods:
        whole, function = f"{kind.__name__}.{name}", getattr(kind, name, None)
        if hasattr(nn.Module, name):
            raise AmpGraphError(
                f"{whole} is a method of every module; its call is converted anyhow"
            )
        if isinstance(getattr(model, name, None), nn.Module):
            raise AmpGraphError(f"{whole} is a module; convert it by itself")
        is_bound = not isinstance(inspect.getattr_static(kind, name, None), staticmethod)
        if not inspect.isfunction(function) or not is_bound:
            known = (n for n, _ in inspect.getmembers(kind, inspect.isfunction) if n != name)
            raise AmpGraphError(f"{whole} is no method.{did_you_mean(name, known)}")
        if name in model.__dict__ and not is_converted(model):
            raise AmpGraphError(
                f"{whole} is hidden by an attribute of this model of the same name; remove that, "
                f"or convert the modules that it calls"
            )
        if why := why_not_at_once(function):
            raise AmpGraphError(f"{whole} {why}; convert the modules that it calls")
