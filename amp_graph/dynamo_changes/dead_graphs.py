"""Keep no proxies of dead objects in the tracers that Dynamo leaves behind.

    sum(torch.is_tensor(o) for o in gc.get_objects())   raises ReferenceError, after a first call

A tracer lies in a garbage cycle with its nodes until a collection, and Dynamo has it hold a weak
proxy of its OutputGraph. Of a dead one nobody may even ask the class, as checks for leaks do of all
objects. (Under `torch.compile` it is so, too: torch 2.13.)

Private names of PyTorch used here:

    torch._dynamo.output_graph.SubgraphTracer.__init__, .output_graph
"""

from __future__ import annotations

import weakref
from typing import Any

from torch._dynamo.output_graph import SubgraphTracer

from amp_graph.dynamo_changes.replaced import Change


def _made(method: Any, tracer: Any, output_graph: Any, *args: Any, **kwargs: Any) -> None:
    method(tracer, output_graph, *args, **kwargs)
    if type(tracer.output_graph) is weakref.ProxyType:
        alive = weakref.ref(tracer)

        def let_go(_: Any) -> None:
            tracer = alive()
            if tracer is not None:
                tracer.output_graph = None

        tracer.output_graph = weakref.proxy(output_graph, let_go)


CHANGES: tuple[Change, ...] = ((SubgraphTracer, "__init__", _made),)
