"""The body of a checkpoint may write to what the captured code around it has made.

    logits = []
    h = checkpoint(layer, h, logits, use_reentrant=False)   # appends to logits
    loss = head(h) + balance(logits)

So do models that collect values of their layers, with hooks as in transformers (router logits,
hidden states). Dynamo ends the graph at such a write: the model's own code does it again when it
computes the body again. Where the object is made anew in each call nobody sees that, so here it is
written to once. A write to what was there before the call (a counter) ends the graph as ever, and
so does one in a reentrant checkpoint, of which such values have no gradient.

Private names of PyTorch used here:

    torch._dynamo.side_effects.SideEffects.check_allowed_side_effect, ..., _maybe_record_side_effect
    torch._dynamo.variables.higher_order_ops.CheckpointHigherOrderVariable._call_function
    torch._dynamo.variables.base.ValueMutationNew, AttributeMutationNew
    torch._dynamo.current_scope_id.current_scope_id
    OutputGraph.current_tracer.traced_with_externally_visible_side_effects
                                             whether the body is to return all of its values
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.current_scope_id import current_scope_id
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable

from amp_graph.patching import method_inside


@contextlib.contextmanager
def checkpointed_writes_inside() -> Iterator[None]:
    """Have Dynamo go on, within, after such a write."""
    around: list[int] = []  # the scopes that bodies now traced are called from

    def check(method: Any, effects: Any, item: Any) -> Any:
        outside = current_scope_id() - 1
        if outside not in around or not _is_made_in(outside, item.mutation_type):
            return method(effects, item)
        if hasattr(effects, "_maybe_record_side_effect"):  # since 2.13
            effects._maybe_record_side_effect(item)
        tracer = effects.output_graph_weakref().current_tracer
        tracer.traced_with_externally_visible_side_effects = True
        return True

    def call(method: Any, checkpoint: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        reentrant = kwargs.get("use_reentrant")
        if reentrant is None or reentrant.as_python_constant() is not False:
            return method(checkpoint, frame, args, kwargs)
        around.append(current_scope_id())
        try:
            return method(checkpoint, frame, args, kwargs)
        finally:
            around.pop()

    with (
        method_inside(SideEffects, "check_allowed_side_effect", check),
        method_inside(CheckpointHigherOrderVariable, "_call_function", call),
    ):
        yield


def _is_made_in(scope: int, mutation: Any) -> bool:
    is_new = isinstance(mutation, (ValueMutationNew, AttributeMutationNew))
    return is_new and bool(mutation.scope == scope)


CONTEXTS = (checkpointed_writes_inside,)
