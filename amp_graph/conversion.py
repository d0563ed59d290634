"""A converted model: the object that stands in front of its own call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from amp_graph.capture.breaks import depends_on_data, why_not_captured, without_words_of_dynamo
from amp_graph.capture.dynamo import (
    DYNAMO_ERRORS,
    can_capture,
    can_watch,
    captured_call,
    frames_seen,
    is_exporting,
    wants_plain_code,
)
from amp_graph.compiler import Compiler
from amp_graph.errors import AmpGraphError, PlanError
from amp_graph.inspection.reasons import why_nothing_is_low
from amp_graph.ir import Plan
from amp_graph.modules import (
    Kept,
    Run,
    call_with,
    devices_of,
    plain_code,
    unchanged,
    unwrapped,
)
from amp_graph.pins import Saved
from amp_graph.policy import Policy
from amp_graph.runtime import (
    Outside,
    or_else,
    under_autocast,
    warn,
    without_autocast,
)
from amp_graph.training.graph_scale import GraphScale
from amp_graph.training.optimizers import drop_scale, use_scale

SLOT = "_call_impl"  # the method of nn.Module that a conversion stands in front of
AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")
MAX_CAPTURES_IN_A_ROW = 16
# Of Dynamo, for models that choose by a number or a size that depends on data.
BREAK_AT_DATA = {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False}


class Conversion(Compiler):
    """A converted model's stand-in for `nn.Module._call_impl`.

    It sits in the model's `__dict__`, so that it lives and dies with the model: a deep copy of
    the model carries a conversion of its own, a pickle carries the plain model.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: Policy,
        scale: GraphScale | None,
        saved: Saved | None = None,
    ):
        self.module = module
        if scale is not None:
            use_scale(scale)
        super().__init__(policy, scale, saved)
        self._watch: Outside | None = Outside(self.lists) if can_watch() else None
        self._is_watched = self._watch is not None  # in calls after one that was captured anew
        self._is_new = True
        self._captures_in_a_row = 0
        self._settings: dict[str, Any] = {}  # of Dynamo, other than usual
        self._capture(without_autocast, AUTOCAST_DEVICES)

    @property
    def scale(self) -> GraphScale | None:
        return self.record.scale

    def close(self) -> None:
        """Called when the model is restored."""
        if self.scale is not None:
            drop_scale(self.scale)

    def _capture(self, around: Callable[..., Callable[..., Any]], *how: Any) -> None:
        """Capture from now on, with the Python code between graphs run in `around`."""
        self._around, self._captured_as = (around, how), type(self.module)
        captured = captured_call(self.module, self.compile_graph, **self._settings)
        self._call = around(captured, *how)

    def _capture_anew(self) -> None:
        around, how = self._around
        self._capture(around, *how)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_exporting():  # by `torch.export`, for which Dynamo may read this line
            return plain_code(self.module)(*args, **kwargs)
        return self._mixed_call(*args, **kwargs)

    @torch.compiler.disable(reason="a model converted by amp_graph captures its own graphs")
    def _mixed_call(self, *args: Any, **kwargs: Any) -> Any:
        if wants_plain_code():
            return plain_code(self.module)(*args, **kwargs)
        if not can_capture():
            return self._own_code()(*args, **kwargs)
        if type(self.module) is not self._captured_as:  # fully_shard() changes it
            self._capture_anew()
        if self.scale is not None and torch.is_grad_enabled():
            self.scale.begin_forward()
        frames, uncaptured = frames_seen(), None
        kept = Kept(self.module) if self._is_new else None
        try:
            with self._watch or contextlib.nullcontext():
                result = self._call(*args, **kwargs)
        except DYNAMO_ERRORS as error:
            uncaptured = error
        except Exception as error:
            if frames_seen() != frames:  # Dynamo never again captures code that raised meanwhile
                without_words_of_dynamo(error)
                self._capture_anew()
            if self._watch is not None:
                self._watch = Outside(self.lists)
            raise
        if uncaptured is not None:  # outside of the handler: its error is no part of the user's own
            if kept is not None:
                kept.put_back()
            result = self._uncaptured(uncaptured, args, kwargs)
        if self._is_new or self._watch is not None:
            self._look_back()
        self._captures_in_a_row = self._captures_in_a_row + 1 if frames_seen() != frames else 0
        if self._captures_in_a_row and self._is_watched:
            self._watch = Outside(self.lists)
        if self._captures_in_a_row == MAX_CAPTURES_IN_A_ROW:
            self._stop_capturing()
        if self.policy.output_dtype is None:
            return result
        return tree_map(self._as_output, result)

    def compile_graph(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        compile_graph = without_autocast(super().compile_graph, AUTOCAST_DEVICES)
        # Saved-tensor hooks of the user (checkpoint's, say) are not for the tensors of a trace.
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            run = compile_graph(graph, example_inputs)
        index = len(self.record.plans) - 1

        def inside(*args: Any) -> Any:
            self.record.runs[index] += 1
            if self._watch is None:
                return run(*args)
            with self._watch.paused():
                return run(*args)

        self._runs.append(inside)
        return inside

    def _look_back(self) -> None:
        """Whether all that was asked for happened in the first call, or in one after a capture."""
        watch, self._watch, is_new, self._is_new = self._watch, None, self._is_new, False
        if watch and watch.found and not self._says_what_stays_float32():
            self._is_watched = False
            found = ", ".join(sorted(watch.found))
            reason = f"code between graphs ({found}) is not captured"
            under = not watch.met_sparse
            if under:
                self._capture(self._between_graphs, len(self.record.plans))
            self.record.plans.append(Plan(self._own_dtype(), fallback=reason, autocast=under))
        if not is_new:
            return
        if not any(plan.converts for plan in self.record.plans):
            name = type(self.module).__name__
            warn(f"nothing of {name} was converted: {why_nothing_is_low(self.record.plans)}")

    def _stop_capturing(self) -> None:
        """Something of Python is another at each call, a list that grows, say, and the model's own
        code is faster than capturing it each time."""
        reason = f"each of the last {MAX_CAPTURES_IN_A_ROW} calls was captured anew"
        self.record.plans.append(Plan(self._own_dtype(), fallback=reason, autocast=True))
        name = type(self.module).__name__
        advice = "TORCH_LOGS=recompiles tells what changes in it at each call"
        warn(f"{name} is no longer captured and runs under autocast: {reason}. {advice}")
        self._call = self._own_code(len(self.record.plans) - 1)
        self._watch, self._is_watched = None, False

    def _says_what_stays_float32(self) -> bool:
        return bool(self.policy.keep_float32 or self.policy.overrides)

    def _own_dtype(self) -> torch.dtype:
        """The precision of code that is not captured. It has no boundary at which gradients could
        be scaled, so where they have to be it is the one that does without."""
        if self.scale is not None:
            return torch.bfloat16
        return self.policy.dtype_for(devices_of(self.module))

    def capture_now(self, example_inputs: Sequence[Any] | Mapping[str, Any]) -> None:
        """Run the model once for its graphs; buffers and random state are put back."""
        with unchanged(self.module):
            call_with(self.module, example_inputs)

    def module_names(self) -> dict[str, str]:
        return {str(id(module)): name for name, module in self.module.named_modules()}

    def _between_graphs(self, run: Run, index: int) -> Run:
        """A captured call, with the code between its graphs, for which plan `index` stands, under
        autocast if it can be."""
        report = partial(self._not_under_autocast, index)
        run = self._under_autocast(run)
        return or_else(run, self._capture_in_float32, report, self.module, DYNAMO_ERRORS)

    def _capture_in_float32(self) -> Run:
        self._capture(without_autocast, AUTOCAST_DEVICES)
        return self._call

    def _own_code(self, index: int | None = None) -> Run:
        """The model's own code under autocast if it can be, for what Dynamo cannot capture and
        plan `index` stands for."""
        plain, report = plain_code(self.module), partial(self._not_under_autocast, index)
        model = None if index is None else self.module  # inside of a functorch transform it stays
        return or_else(self._under_autocast(plain), lambda: plain, report, model)

    def _under_autocast(self, run: Run) -> Run:
        return under_autocast(run, devices_of(self.module), self._own_dtype())

    def _not_under_autocast(self, index: int | None, reason: str) -> None:
        if index is not None:
            plan = self.record.plans[index]
            why = f"{plan.fallback}; autocast fails ({reason})"
            self.record.plans[index] = replace(plan, fallback=why, autocast=False)
        name = type(self.module).__name__
        warn(f"code of {name} that is not captured runs in float32: autocast fails ({reason})")

    def _uncaptured(self, error: Exception, args: Any, kwargs: Any) -> Any:
        """Run the model's own code under autocast, and go on so. If it raises, nothing could have
        been captured, and the next call is."""
        if depends_on_data(error) and not self._settings:
            self._settings = BREAK_AT_DATA
            self._capture_anew()
            return self(*args, **kwargs)
        cause = getattr(error, "inner_exception", None)
        if isinstance(cause, PlanError):
            self._capture_anew()
            raise cause from None
        call = self._own_code(len(self.record.plans))
        name = type(self.module).__name__
        reason = why_not_captured(error)
        not_captured = f"not captured ({reason})"
        self.record.plans.append(Plan(self._own_dtype(), fallback=not_captured, autocast=True))
        try:
            result = call(*args, **kwargs)
        except Exception:
            self.record.plans.pop()
            self._capture_anew()
            raise
        if self.record.plans[-1].autocast:
            warn(f"{name} was not captured and runs under autocast: {reason}")
        self._call, self._watch, self._is_watched = call, None, False
        return result

    def _as_output(self, value: Any) -> Any:
        is_float32 = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        return value.to(self.policy.output_dtype) if is_float32 else value

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        """Called while the model is copied, when its copy exists but is not filled in yet."""
        module = memo[id(self.module)]
        scale = self.scale.copy(module.parameters) if self.scale else None
        conversion = Conversion(module, self.policy, scale, self.saved)
        module.__dict__[SLOT] = conversion
        return conversion

    def __reduce__(self) -> Any:
        """Pickled as the method that it stands in front of, so that the model loads plain, also
        where this package is not installed."""
        return getattr, (self.module, SLOT)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def found_conversion(model: nn.Module) -> Conversion | None:
    """The conversion of `model` itself, or of the module in a wrapper; None if there is none."""
    found = unwrapped(model).__dict__.get(SLOT)
    return found if isinstance(found, Conversion) else None


def conversion_of(model: nn.Module) -> Conversion:
    """As `found_conversion`. Raises AmpGraphError if there is none."""
    conversion = found_conversion(model)
    if conversion is None:
        raise AmpGraphError(
            f"{type(model).__name__} is not converted; call amp_graph.convert first"
        )
    return conversion
