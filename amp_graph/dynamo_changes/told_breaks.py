"""Why a graph ends is told also where Dynamo cannot go on behind what it could not capture.

    try: weight = torch.autograd.grad(loss, self.last)[0]       in a `try`, in a loop, beside what
    except RuntimeError: weight = torch.zeros(())               Python has looked up already

It ends the graph at an earlier place, from which it can go on, and names no other reason than
"step_unsupported". Here the graph has the reason and the place of what was not captured.

Where there is no graph yet, nothing has a reason but Dynamo's counters (`graph_break`). It counts
what it does not support, and not what it refuses as an error of the user's, such as a size that
depends on data (`nn.LSTM` on a packed sequence). Here that is counted, too.

Private names of PyTorch used here; of a version that lacks them nothing more is told:

    torch._dynamo.symbolic_convert.InstructionTranslatorBase.log_graph_break    is given what raised
    torch._dynamo.output_graph.OutputGraph.compile_subgraph                     and then the reason
    torch._dynamo.exc.Unsupported, UserError: .msg, .real_stack
    torch._dynamo.utils.counters                                                why graphs ended
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.exc import UserError
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.utils import counters

from amp_graph.dynamo_changes.replaced import existing
from amp_graph.patching import method_inside

UNTOLD = "step_unsupported"


@contextlib.contextmanager
def breaks_told() -> Iterator[None]:
    """Tell, within, why graphs end, for one frame. After a break Dynamo begins the frame anew, and
    ends the graph there."""
    last: dict[str, Any] = {}

    def log(method: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        error = next((e for e in (*args, *kwargs.values()) if isinstance(e, Exception)), None)
        said, where = getattr(error, "msg", ""), getattr(error, "real_stack", ())
        last.clear()
        if said and where:
            last.update(reason=said, user_stack=where)
        if said and isinstance(error, UserError):
            counters["graph_break"][said] += 1
        return method(frame, *args, **kwargs)

    def end(method: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("reason"), "reason", None) == UNTOLD:
            vars(kwargs["reason"]).update(last)
        return method(graph, *args, **kwargs)

    changes = existing(
        (InstructionTranslatorBase, "log_graph_break", log),
        (OutputGraph, "compile_subgraph", end),
    )
    with contextlib.ExitStack() as inside:
        for change in changes:
            inside.enter_context(method_inside(*change))
        yield


CONTEXTS = (breaks_told,)
