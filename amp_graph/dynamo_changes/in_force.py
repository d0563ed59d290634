"""All that Dynamo does otherwise while it captures for us.

Most files of this folder say what to change, in tables:

    CALLS      how the call of a function is captured, by function of PyTorch or of `math`
    BUILTINS   the same, by function of Python's
    FINDS      what the call of a function returns, by module and name (`known_calls`)
    ENTRIES    what is in tables of Dynamo's
    CHANGES    what its methods do

Others need something for each capture of a frame, and have a context manager.

Private names of PyTorch used here:

    torch._dynamo.variables.TorchInGraphFunctionVariable    a function that becomes an operator
    torch._dynamo.variables.BuiltinVariable.fn              a function of Python's
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch._dynamo.variables import BuiltinVariable, TorchInGraphFunctionVariable

from amp_graph.dynamo_changes import (
    absent_names,
    asked_gradients,
    attention_calls,
    bound_methods,
    cached_functions,
    cached_properties,
    causal_masks,
    checkpoint_sequences,
    checkpointed_writes,
    clamped_branches,
    contained,
    containers,
    context_variables,
    copied_dicts,
    dead_graphs,
    default_functions,
    disabled_functions,
    extremes,
    given_twice,
    handed_through,
    hidden_names,
    inner_gradients,
    input_hooks,
    instance_checks,
    known_values,
    left_to_python,
    listed_numbers,
    logs,
    modes_apart,
    namespaces,
    no_generators,
    old_variables,
    output_hooks,
    own_dicts,
    own_lengths,
    random_bounds,
    ranges_in_steps,
    recapture_reasons,
    recurrent_layers,
    repeated_hooks,
    retained_gradients,
    settled_once,
    symbolic_math,
    tensor_classes,
    tensor_indices,
    told_breaks,
    unneeded_masks,
    unread_gradients,
)
from amp_graph.dynamo_changes.known_calls import by_name
from amp_graph.dynamo_changes.replaced import (
    Change,
    Entries,
    by_function,
    method_inside,
    with_entries,
)


def _joined(*tables: Mapping[Any, Any]) -> dict[Any, Any]:
    """Join tables that have no key in common."""
    found = {key: value for table in tables for key, value in table.items()}
    assert len(found) == sum(map(len, tables))
    return found


CALLS = _joined(
    attention_calls.CALLS,
    left_to_python.CALLS,
    listed_numbers.CALLS,
    no_generators.CALLS,
    symbolic_math.CALLS,
)
BUILTINS = _joined(extremes.BUILTINS, instance_checks.BUILTINS, ranges_in_steps.BUILTINS)
FINDS = _joined(causal_masks.FINDS, output_hooks.FINDS, unneeded_masks.FINDS)
ENTRIES: tuple[Entries, ...] = (
    *known_values.ENTRIES,
    *checkpoint_sequences.ENTRIES,
    *containers.ENTRIES,
    *unneeded_masks.ENTRIES,
)
CHANGES: tuple[Change, ...] = (  # of one method, the later is asked first
    by_function(TorchInGraphFunctionVariable, CALLS),
    by_function(BuiltinVariable, BUILTINS, held_as="fn"),
    by_name(FINDS),
    *asked_gradients.CHANGES,
    *known_values.CHANGES,
    *old_variables.CHANGES,
    *clamped_branches.CHANGES,
    *given_twice.CHANGES,
    *context_variables.CHANGES,
    *tensor_indices.CHANGES,
    *tensor_classes.CHANGES,
    *repeated_hooks.CHANGES,
    *retained_gradients.CHANGES,
    *random_bounds.CHANGES,
    *inner_gradients.CHANGES,
    *namespaces.CHANGES,
    *hidden_names.CHANGES,
    *own_dicts.CHANGES,
    *own_lengths.CHANGES,
    *copied_dicts.CHANGES,
    *absent_names.CHANGES,
    *contained.CHANGES,
    *containers.CHANGES,
    *bound_methods.CHANGES,
    *cached_functions.CHANGES,
    *cached_properties.CHANGES,
    *input_hooks.CHANGES,
    *unread_gradients.CHANGES,
    *listed_numbers.CHANGES,
    *handed_through.CHANGES,
    *left_to_python.CHANGES,
    *default_functions.CHANGES,
    *settled_once.CHANGES,
    *dead_graphs.CHANGES,
    *recapture_reasons.CHANGES,
    *disabled_functions.CHANGES,
)
CONTEXTS: tuple[Callable[[], contextlib.AbstractContextManager[None]], ...] = (
    recurrent_layers.recurrent_layers_whole,
    attention_calls.attention_kernels_guarded,
    logs.quiet_logs,
    logs.locations_untold,
    logs.guards_untimed,
    checkpointed_writes.checkpointed_writes_inside,
    modes_apart.modes_above_autograd_apart,
    told_breaks.breaks_told,
)


@contextlib.contextmanager
def changes_in_force() -> Iterator[None]:
    """Within, all of these are made. They are the process's: one thread at a time."""
    with contextlib.ExitStack() as inside:
        for table, own in ENTRIES:
            inside.enter_context(with_entries(table(), own))
        for kind, name, around in CHANGES:
            inside.enter_context(method_inside(kind, name, around))
        for context in CONTEXTS:
            inside.enter_context(context())
        yield
