"""A graph break inside of inlined functions is found once, not once in each of them.

    class Net:      def forward(self, images): return self.head(self.encoder(images))
    class Encoder:  def forward(self, images): return self.mixed(self.stages(images))
    class Mixed:    def forward(self, features): ...; print(features.mean().item())

Dynamo inlines calls, as deep as they go. If one of them breaks, it ends the graph in front of the
outermost and has Python make that call, whose code it captures next: down to the same break, in
front of which Python makes the next call, and so on. The stages of the encoder are captured as
often as functions lie around the break, and twice, since Dynamo begins a function anew when it has
found that a call in it breaks. Here the graph of each function inside of the outermost ends at the
call that has just been seen to break, and nothing is captured in vain. Where no graph can end, as
in a loop, the call raises as it would.

What was seen counts for the call of the model that it was seen in, and for one capture, and only of
calls of functions by functions. A break may be due to a size that varies. It does not count for a
function that was not captured before: there Dynamo takes all sizes for constants, and may capture
it as a whole.

Private names of PyTorch used here:

    torch._dynamo.symbolic_convert.InstructionTranslatorBase    captures one function, `.parent` for
                                                                another that calls it, None if none
        .run, .call_function, .f_code, .instruction_pointer     a call that it makes, and where
        .speculate                          begins an instruction at which a graph can end; returns
            SpeculationEntry: .failed, ._failed, .error_on_graph_break, .reason         whether, why
        .output.shape_env.backed_var_to_val                     the sizes that vary
    torch._dynamo.variables.UnspecializedNNModuleVariable, .functions.BaseUserFunctionVariable
                                                                what is called, `.realize`d
    torch._C._dynamo.eval_frame._debug_get_cache_entry_list     what was captured of some code
    torch._dynamo.exc.Unsupported, UserError: .msg, .real_stack, .gb_type
    torch._dynamo.output_graph.GraphCompileReason
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeAlias

from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import UnspecializedNNModuleVariable
from torch._dynamo.variables.functions import BaseUserFunctionVariable

from amp_graph.dynamo_changes.ended_graphs import can_end
from amp_graph.dynamo_changes.lengths_in_lists import ENDED

Place: TypeAlias = tuple[CodeType, int]  # a call: in which code, at which instruction
RUN = InstructionTranslatorBase.run.__code__


class _Expected(threading.local):
    """The calls that break, from the outermost, in what one thread captures next; and why."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.reason: Any = None

    def take(self, place: Place) -> bool:
        """Whether the call at this place is expected to break. Neither it nor those around it are
        expected from now on."""
        if place not in self.places:
            return False
        del self.places[: self.places.index(place) + 1]
        return True


_expected = _Expected()


def forget() -> None:
    """Expect nothing in this thread: a call of a model is over."""
    _expected.places = []


def _begin(method: Any, frame: Any) -> Any:
    begun = method(frame)
    if frame.parent is None and _expected.places and can_end(frame) and _expected.take(_at(frame)):
        begun._failed, begun.error_on_graph_break = True, frame.error_on_graph_break
        begun.reason = _expected.reason
    return begun


def _call(method: Any, frame: Any, *called: Any) -> None:
    place, is_outermost = _at(frame), frame.parent is None
    if is_outermost and _expected.take(place):
        raise Unsupported(_expected.reason.reason, real_stack=_expected.reason.user_stack)
    try:
        method(frame, *called)
    except (Unsupported, UserError) as error:
        through: list[Place] = vars(error).setdefault("_calls_through", [])  # innermost first
        if not _is_function(called[0]):
            through.clear()
        elif not is_outermost and _was_inlined(error):
            through.append(place)
        if is_outermost:
            _expected.places = [*filter(_is_due(frame, error), reversed(through))]
            _expected.reason = GraphCompileReason(error.msg, error.real_stack)
        raise


def _is_due(outermost: Any, error: Any) -> Callable[[Place], bool]:
    """Return whether a call that has broken in the outermost function breaks outside of it, too.
    A list whose lengths vary has ended the graph before there is a symbol for one."""
    varies = outermost.output.shape_env.backed_var_to_val or getattr(error, "gb_type", "") == ENDED
    return lambda place: not varies or bool(_debug_get_cache_entry_list(place[0]))


def _is_function(called: Any) -> bool:
    """Whether Python runs a function of the model's code for this call, and nothing around it: not
    a hook, which Dynamo captures where it is registered, or the body of a checkpoint."""
    return isinstance(called.realize(), (BaseUserFunctionVariable, UnspecializedNNModuleVariable))


def _was_inlined(error: Exception) -> bool:
    """Whether a call has raised in a function that it inlined. Why it inlines none, Dynamo is to
    see once more: some of its changes go by that."""
    return any(frame.f_code is RUN for frame, _ in traceback.walk_tb(error.__traceback__))


def _at(frame: Any) -> Place:
    return frame.f_code, frame.instruction_pointer


CHANGES = (
    (InstructionTranslatorBase, "speculate", _begin),
    (InstructionTranslatorBase, "call_function", _call),
)
