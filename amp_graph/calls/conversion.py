"""A converted model: what stands in front of its call and, if asked for, of other methods."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from amp_graph.backend.compiler import Compiler
from amp_graph.calls.captured_calls import CapturedCalls
from amp_graph.calls.compiled_by_others import AROUND, come_to, is_left, tell_of_compile_around
from amp_graph.calls.copies import StandIn, put_in, take_out
from amp_graph.calls.tracebacks import without_ours
from amp_graph.calls.uncalled import await_call
from amp_graph.capture.captures import captured_module_id, captured_policy_id, in_a_call
from amp_graph.capture.dynamo import is_forced_eager
from amp_graph.capture.surroundings import (
    can_capture,
    is_estimate,
    is_exporting,
    wants_plain_code,
)
from amp_graph.errors import AmpGraphError, in_brief
from amp_graph.modules import CALL, Entry, Run, is_rerouted, plain_code, unwrapped
from amp_graph.optimizers.guards import attach, detach, drop_scale, use_scale
from amp_graph.plans.pins import Saved
from amp_graph.plans.plan_file import PlanSource, as_plans
from amp_graph.policy import Policy, PolicySource, as_policy
from amp_graph.results import map_tensors
from amp_graph.scaling.graph_scale import GraphScale
from amp_graph.uncaptured import capturing, never_captured, passed_over
from amp_graph.weak_references import living, weak_method

FORCED_EAGER = 'its calls under torch.compiler.set_stance("force_eager") are not captured'
T = TypeVar("T")
ById: TypeAlias = weakref.WeakValueDictionary[int, T]  # threads may add to one while others read it


class Entered(StandIn):
    """A stand-in for a method that runs in mixed precision, which belongs to a conversion."""

    @property
    def conversion(self) -> Conversion:
        raise NotImplementedError

    @passed_over
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Dynamo may read these lines, for `torch.export` or to capture a model that this is in.
        if not torch.compiler.is_dynamo_compiling():
            if capturing() is not None:
                tell_of_compile_around()
            copied = self.called_copy(sys._getframe(1))
            if copied is not None:
                if self.copied is not None:  # its `__dict__` was copied deeply
                    self.conversion.convert_too(copied)
                return getattr(copied, self.name)(*args, **kwargs)
        if is_exporting():
            return plain_code(self.module, self.name)(*args, **kwargs)
        ours = self.conversion
        if torch.compiler.is_dynamo_compiling():
            whose = captured_policy_id(), captured_module_id()
            is_ours = whose[0] == ours.policy_id or whose[1] == ours.module_id
            if is_ours or (ours.gives_way and is_left()):
                if torch.is_grad_enabled():
                    ours.is_awaited = False
                return plain_code(self.module, self.name)(*args, **kwargs)
            come_to()
        return ours.mixed_call(self.name, *args, **kwargs)


class Method(Entered):
    """A stand-in for a method other than the call. It has the method's attributes."""

    def __init__(self, conversion: Conversion, name: str):
        super().__init__(conversion.module)
        self.name, self._conversion = name, conversion
        self.__doc__ = self.__wrapped__.__doc__

    @property
    def conversion(self) -> Conversion:
        return self._conversion

    @property
    def __wrapped__(self) -> Run:
        module = self.module
        return getattr(type(module), self.name).__get__(module)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)


class Conversion(Entered):
    """A converted model's stand-in for `nn.Module._call_impl`.

    It sits in the model's `__dict__`, so that it lives and dies with the model. What copies of the
    model have in its stead is in `copies`.

    methods: others that run in mixed precision, too.
    policy_id: the model is captured with the rest of any other whose captures have this policy;
        None: with the rest of none.
    gives_way: whether its model runs its own code where somebody else's Dynamo is to raise if it
        does not: the script has not converted it by itself.
    copied_from: those whose models its model is a deep copy of, directly or by other copies.
    """

    name = CALL

    def __init__(
        self, module: nn.Module, policy: Policy, saved: Saved | None, methods: Sequence[str]
    ):
        super().__init__(module)
        self.policy, self.methods = policy, methods
        scale_for, name = weak_method(self.scale_for), type(module).__name__
        self.compiler = Compiler(policy, saved, scale_for, model=name)
        self._optimizers: ById[Optimizer] = weakref.WeakValueDictionary()
        entries = (Entry(module, method) for method in (CALL, *methods))
        self._calls = {entry.method: CapturedCalls(entry, self.compiler) for entry in entries}
        is_alone = saved or policy.output_dtype
        self.policy_id = None if is_alone else self._calls[CALL].policy_id
        self.module_id = id(module)
        self.is_awaited = True  # its first call in which autograd records
        self.gives_way = False
        self.copied_from: tuple[weakref.ref[Conversion], ...] = ()

    @property
    def conversion(self) -> Conversion:
        return self

    def stand_ins(self) -> Iterator[StandIn]:
        yield self
        yield from (Method(self, name) for name in self.methods)

    @property
    def scale(self) -> GraphScale | None:
        return self.compiler.record.scale

    def places_in_force(self) -> list[int]:
        """Return the places in the record of graphs that calls may run, and of code without a
        graph. Left out are graphs that were captured anew since, or belong to calls that are
        captured no more, and plans that were taken back."""
        live = (calls.graphs_in_force() for calls in self._calls.values())
        gone = self.compiler.captured.difference(*live)
        uncaptured = {place for place, plan in enumerate(self.compiler.plans) if plan.fallback}
        return sorted((self.compiler.captured | uncaptured) - gone)

    def scale_for(self, dtype: torch.dtype) -> GraphScale | None:
        """Return the loss scale for graphs in `dtype`, one for all graphs that need one. It is made
        when the first does: a model may be converted before it is moved to a device with another
        low precision."""
        config = self.policy.loss_scale_for(dtype)
        if config is None:
            return None
        if self.scale is None:
            self._use(GraphScale(config, self.module.parameters))
        return self.scale

    def _use(self, scale: GraphScale) -> None:
        self.compiler.record.scale = scale
        use_scale(scale)
        for optimizer in living(self._optimizers.valuerefs()):
            attach(optimizer, scale, self)

    def attach(self, optimizer: Optimizer) -> None:
        """Guard an optimizer from before its first step."""
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer
            attach(optimizer, self.scale, self)

    def open(self) -> None:
        """Have the model's calls come here from now on."""
        put_in(self)
        _open[id(self)] = self
        await_call(self, self.module)

    def close(self) -> None:
        """Have the model run its own code again, if it is not gone."""
        self.is_awaited = False
        if (module := self._module()) is not None:
            take_out(module)
        _open.pop(id(self), None)
        if self.scale is not None:
            drop_scale(self.scale)
        for optimizer in living(self._optimizers.valuerefs()):
            detach(optimizer, self)

    def of_copy(self, plain: Run) -> Run:
        """Return a function that runs a copy of the model that `nn.DataParallel` made for one call
        on one GPU."""
        self.is_awaited = False
        return self._calls[CALL].fallback.of_copy(plain)

    def convert_too(self, copied: nn.Module) -> None:
        """Convert a deep copy of the model alike; its loss scale goes on by itself."""
        conversion = Conversion(copied, self.policy, self.compiler.saved, self.methods)
        conversion.gives_way = self.gives_way
        conversion.copied_from = (weakref.ref(self), *filter(operator.call, self.copied_from))
        if self.scale is not None:
            conversion._use(self.scale.copy(copied.parameters))
        conversion.open()

    def tell_of_compile(self) -> None:
        """Warn, once, that `torch.compile` is around the model."""
        self.compiler.record.warn_once(f"{type(self.module).__name__} {AROUND}")

    @never_captured(reason="a model converted by amp_graph captures its own graphs")
    def mixed_call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run the method in mixed precision, if that can be."""
        module = self.module
        if method == CALL and is_rerouted(module):
            return plain_code(module)(*args, **kwargs)
        if wants_plain_code() or is_estimate(module):
            return plain_code(module, method)(*args, **kwargs)
        if self.is_awaited and torch.is_grad_enabled():
            self._end_waiting()
        if not can_capture():
            result = self._calls[method].fallback.run_uncaptured(*args, **kwargs)
        elif is_forced_eager():
            result = self._calls[method].fallback.run_told_of(FORCED_EAGER, *args, **kwargs)
        else:
            if self.scale is not None and torch.is_grad_enabled():
                self.scale.begin_forward(module.training, is_inside=in_a_call(module))
            try:
                result = self._calls[method](*args, **kwargs)
            except BaseException as error:
                # Not by an assignment: its class may forbid these.
                BaseException.with_traceback(error, without_ours(error.__traceback__))
                raise
        if self.policy.output_dtype is None:
            return result
        return map_tensors(self._as_output, result)

    def _end_waiting(self) -> None:
        """Note that a call was recorded, also for the models that this one was copied from: its
        gradients may be given to them, as in federated or meta-learning."""
        for each in (self, *living(self.copied_from)):
            each.is_awaited = False

    def _as_output(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.policy.output_dtype) if value.dtype is torch.float32 else value


_open: ById[Conversion] = weakref.WeakValueDictionary()


def restore_all(policy: Policy) -> None:
    """Restore the models that were converted by this very policy, and copies of them."""
    for conversion in living(_open.valuerefs()):
        if conversion.policy is policy:
            conversion.close()


def found_conversion(model: nn.Module) -> Conversion | None:
    """Return the conversion of `model` itself, or of the module in a wrapper; None if there is
    none. Raises AmpGraphError if `model` is no module."""
    if not isinstance(model, nn.Module):
        raise AmpGraphError(f"this is for a torch.nn.Module, not {in_brief(model)}")
    inner = unwrapped(model)
    found = inner.__dict__.get(CALL)
    return found if isinstance(found, Conversion) and found.is_for(inner) else None


def _what_to_do(model: nn.Module) -> str:
    parts = (path for path, part in model.named_modules() if found_conversion(part) is not None)
    part = next(parts, None)
    return "call amp_graph.convert first" if part is None else f"its part {part!r} is, so give that"


def conversion_of(model: nn.Module) -> Conversion:
    """Return the conversion of `model`, as `found_conversion` does. Raises AmpGraphError if there
    is none."""
    conversion = found_conversion(model)
    if conversion is None:
        raise AmpGraphError(f"{type(model).__name__} is not converted; {_what_to_do(model)}")
    return conversion


def policy_and_plans(
    model: nn.Module, policy: PolicySource, plan: PlanSource | None
) -> tuple[Policy, Saved | None]:
    """Return the policy and plans to look at a model or export it with: those given, else those
    that it was converted with. Raises PolicyError and PlanError."""
    conversion = found_conversion(model)
    saved = None if plan is None else as_plans(plan)
    if conversion is not None and policy is None:
        policy, saved = conversion.policy, saved or conversion.compiler.saved
    chosen = as_policy(policy)
    return (chosen if saved is None else chosen.following(saved)), saved
