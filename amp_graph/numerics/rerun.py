"""Rerun: a model captured once more, each of its graphs run node by node under observation.

    rerun = rerun_of(model, policy, plan)
    rerun.run(batch, loss, observer, mixed=False)     the graphs as captured
    rerun.run(batch, loss, observer, mixed=True)      the graphs as emitted

Both runs see the same random numbers, buffers and attributes are put back after each, and no
gradient reaches `param.grad`. A graph or body that cannot be retraced runs unobserved, and so does
Python code between graphs and the backward pass of a custom autograd function.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from amp_graph.backend.build import Built, inputs_at_risk
from amp_graph.backend.compiler import Compiler
from amp_graph.backend.emulation import emulated_nodes
from amp_graph.backend.guarded import Guarded
from amp_graph.batches import Batch, call_with
from amp_graph.calls.conversion import policy_and_plans
from amp_graph.calls.convertible import check_initialized
from amp_graph.capture.budget import CaptureBudget
from amp_graph.capture.captures import Assembled, Caller, Captures, captured_names
from amp_graph.capture.dynamo import is_of_capture
from amp_graph.errors import MISTAKES, AmpGraphError, CaptureError, ConversionWarning
from amp_graph.ir import Plan
from amp_graph.modules import Entry, plain_code, unwrapped
from amp_graph.numerics.outputs import default_loss, floating
from amp_graph.numerics.watched_graph import SEED, Observer, Place, WatchedGraph
from amp_graph.plans.matching import fingerprint
from amp_graph.plans.pins import Saved
from amp_graph.plans.plan_file import PlanSource
from amp_graph.policy import Policy, PolicySource
from amp_graph.results import map_tensors
from amp_graph.snapshots import unchanged

Loss: TypeAlias = Callable[[Any], torch.Tensor]
"""From the model's output to a scalar."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: floating outputs, loss, and gradients of the parameters, all detached.
    `gradients` is empty if nothing needs one."""

    outputs: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None
    gradients: Mapping[str, torch.Tensor]


class Rerun:
    """Plans and graphs are with the `compiler` from the first run on, which captures.

    first_of: for each graph, by index, the first that is alike, as which it is looked at. There are
        several if a call changes something beside the model, such as a list that a hook fills: each
        run then captures anew.
    replacement: what runs instead of an emitted graph, by index, if anything does.
    """

    def __init__(self, model: nn.Module, policy: Policy, saved: Saved | None):
        policy = policy.uncompiled()
        self.model = model
        self.compiler = Compiler(policy, saved, model=type(model).__name__)
        self.emulated = emulated_nodes(policy, self.compiler.lists)
        self.first_of: dict[int, int] = {}
        self.replacement: Callable[[int], fx.GraphModule | None] = lambda index: None
        self._mixed = False
        self._alike: dict[str, int] = {}
        self._observer = Observer()
        self.ran: list[int] = []  # graphs of the last run, by `first_of`
        self.policy_id = 0  # converted parts run as they are
        self._entry = Entry(model)
        self.budget = CaptureBudget(self._entry.name)
        self._call = Caller(Captures(self._entry, self.budget.number), self)
        self._handles: list[Any] = []

    @property
    def module(self) -> nn.Module:
        return self.model

    def settings(self, is_first: bool) -> Mapping[str, Any]:
        return {}

    def build(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Built:
        return self.compiler.build(graph, example_inputs, captured_names(self._entry))

    def assemble(self, built: Built) -> Assembled:
        graph = built.graph
        index, otherwise = self.compiler.assemble(built)
        mark = fingerprint(self.compiler.plans[index])
        first = self.first_of[index] = self._alike.setdefault(mark, index)

        def run(*args: Any) -> Any:
            graphs = self.compiler.graphs[index]
            if graphs is None:
                return otherwise(*args) if self._mixed else graph.forward(*args)
            captured, emitted = graphs
            self.ran.append(first)
            place, plan = Place(len(self.ran), first, "", ""), self.compiler.plans[index]
            as_captured = self._watched(captured, place).run
            if not self._mixed or plan.fallback is not None:
                return as_captured(*args)
            chosen = self._watched(self.replacement(index) or emitted, place).run
            fail = partial(self.compiler.record.fall_back, index)
            return Guarded(chosen, as_captured, inputs_at_risk(plan), fail)(*args)

        return Assembled(index, run)

    def _watched(self, graph: fx.GraphModule, place: Place) -> WatchedGraph:
        return WatchedGraph(graph, place, self.show, self.emulated)

    def run(
        self,
        batch: Batch,
        loss: Loss | None = None,
        observer: Observer | None = None,
        *,
        mixed: bool,
        loss_scale: float = 1.0,
    ) -> Outcome:
        """Run the model, in mixed precision or in float32, and, if anything needs a gradient,
        backward from `loss_scale` times the loss, by which the gradients are divided again."""
        self._mixed, self.ran = mixed, []
        self._observer = observer or Observer()
        try:
            with (
                _recording(self.model),
                unchanged(self.model, parameters=True),
                warnings.catch_warnings(),
                torch.enable_grad(),
            ):
                warnings.simplefilter("ignore", ConversionWarning)
                torch.manual_seed(SEED)
                output = call_with(self._call, map_tensors(_ordinary, batch))
                if not self.compiler.plans:
                    raise _not_captured(self.model)
                return self._outcome(output, loss or default_loss, loss_scale)
        except Exception as error:
            cause = getattr(error, "inner_exception", None)
            if isinstance(cause, MISTAKES):
                raise cause from None
            if not is_of_capture(error):
                raise
            own = _own_error(self.model, batch)
            if own is not None:
                raise own from None
            raise _not_captured(self.model) from error
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._observer = Observer()

    def _outcome(self, output: Any, loss: Loss, scale: float) -> Outcome:
        outputs = tuple(t.detach().clone() for t in floating(output))
        value = _scalar(loss(output)) if floating(output) else None
        if value is None or not value.requires_grad:
            return Outcome(outputs, None if value is None else value.detach(), {})
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(value * scale, list(named.values()), allow_unused=True)
        pairs = zip(named, found, strict=True)
        gradients = {n: g.detach().to_dense() / scale for n, g in pairs if g is not None}
        return Outcome(outputs, value.detach(), gradients)

    def plans(self) -> dict[int, Plan]:
        """The plans of graphs that are not alike, by index."""
        return {i: p for i, p in enumerate(self.compiler.plans) if self.first_of[i] == i}

    def show(self, place: Place, node: fx.Node, value: Any) -> None:
        """Show a value to the observer, and its gradient when that is known; nothing of a body of
        which nothing is known."""
        if not self.plan_at(place).facts:
            return
        observer = self._observer
        observer.value(place, node, value)
        is_recorded = torch.is_grad_enabled()  # not inside of an autograd function
        if is_recorded and isinstance(value, torch.Tensor) and value.requires_grad:

            @torch.compiler.disable(reason="a model that takes gradients inside would capture this")
            def tell(gradient: torch.Tensor | None) -> None:
                if gradient is not None:  # else nothing depends on the value
                    observer.gradient(place, gradient.to_dense())

            handle = value.register_hook(tell)
            if value.is_leaf:  # a parameter outlives the run
                self._handles.append(handle)

    def plan_at(self, place: Place) -> Plan:
        """The plan of the graph or body that a node is in."""
        plan = self.compiler.plans[place.graph]
        for name in filter(None, place.body.split("/")):
            plan = plan.bodies.get(name, Plan(plan.dtype))
        return plan


def _recording(model: nn.Module) -> AbstractContextManager[Any]:
    """Where autograd may record what the model does, if its parameters let it."""
    if any(p.is_inference() for p in model.parameters()):
        return nullcontext()
    return torch.inference_mode(False)


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that autograd may save."""
    return tensor.clone() if tensor.is_inference() else tensor


def _scalar(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    is_tensor = isinstance(loss, torch.Tensor)
    found = f"one of shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
    raise AmpGraphError(f"loss must return a scalar tensor, not {found}")


def _own_error(model: nn.Module, batch: Batch) -> Exception | None:
    """Return the error that the model's own code raises, if any. Dynamo's, for an operator that
    refuses, is another."""
    try:
        with unchanged(model, parameters=True), torch.enable_grad():
            call_with(plain_code(model), batch)
    except Exception as error:
        return error
    return None


def _not_captured(model: nn.Module) -> CaptureError:
    name = type(model).__name__
    if not any(p.is_floating_point() for p in model.parameters()):
        return CaptureError(
            f"{name} has no floating-point parameters; there is nothing to convert, and no graph "
            f"to look into"
        )
    return CaptureError(
        f"{name} cannot be captured, so there is no graph to look into; converted, "
        f"it runs its own code under autocast"
    )


def rerun_of(model: nn.Module, policy: PolicySource, plan: PlanSource | None) -> Rerun:
    """A rerun of a model, converted or not, without a data-parallel wrapper. A converted one brings
    its own policy and plans, where none are given. Raises AmpGraphError for what has no numbers to
    look at."""
    model = unwrapped(model)
    chosen = policy_and_plans(model, policy, plan)
    check_initialized(model)
    if any(p.is_meta for p in model.parameters()):
        raise AmpGraphError(
            f"{type(model).__name__} has parameters on the meta device, which holds no numbers to "
            f"look at; make them on another one"
        )
    return Rerun(model, *chosen)
