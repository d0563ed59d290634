"""All that Dynamo does otherwise while it captures for us."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from amp_graph.dynamo_changes.absent_names import absence_guarded
from amp_graph.dynamo_changes.asked_gradients import asked_gradients_kept_inside
from amp_graph.dynamo_changes.attention_calls import attention_calls_settled
from amp_graph.dynamo_changes.bound_methods import bound_methods_known
from amp_graph.dynamo_changes.cached_functions import cached_draws_left_to_python
from amp_graph.dynamo_changes.cached_properties import cached_properties_captured
from amp_graph.dynamo_changes.causal_masks import causal_masks_known
from amp_graph.dynamo_changes.checkpoint_sequences import checkpoint_sequences_known
from amp_graph.dynamo_changes.checkpointed_writes import checkpointed_writes_inside
from amp_graph.dynamo_changes.clamped_branches import clamped_branches_taken
from amp_graph.dynamo_changes.containers import containers_whole
from amp_graph.dynamo_changes.context_variables import context_variables_known
from amp_graph.dynamo_changes.copied_dicts import copied_dicts_left
from amp_graph.dynamo_changes.default_functions import default_functions_returned
from amp_graph.dynamo_changes.disabled_functions import disabled_functions_guarded
from amp_graph.dynamo_changes.given_twice import given_once
from amp_graph.dynamo_changes.handed_through import handed_through_unread
from amp_graph.dynamo_changes.hidden_names import hidden_names_found
from amp_graph.dynamo_changes.inner_gradients import gradients_end_graphs
from amp_graph.dynamo_changes.input_hooks import hooks_keep_dtypes
from amp_graph.dynamo_changes.known_values import known_values
from amp_graph.dynamo_changes.left_to_python import some_calls_left_to_python
from amp_graph.dynamo_changes.listed_numbers import listed_numbers_known
from amp_graph.dynamo_changes.logs import locations_untold, quiet_logs
from amp_graph.dynamo_changes.modes_apart import modes_above_autograd_apart
from amp_graph.dynamo_changes.namespaces import own_names
from amp_graph.dynamo_changes.no_generators import no_generators_left_out
from amp_graph.dynamo_changes.output_hooks import output_hooks_installed
from amp_graph.dynamo_changes.own_dicts import own_dicts_guarded
from amp_graph.dynamo_changes.recapture_reasons import own_reasons_told
from amp_graph.dynamo_changes.recurrent_layers import recurrent_layers_whole
from amp_graph.dynamo_changes.repeated_hooks import repeated_hooks_as_one
from amp_graph.dynamo_changes.retained_gradients import retained_gradients_end_graphs
from amp_graph.dynamo_changes.settled_once import settled_once
from amp_graph.dynamo_changes.symbolic_math import symbolic_math_known
from amp_graph.dynamo_changes.tensor_indices import tensor_indices_known
from amp_graph.dynamo_changes.told_breaks import breaks_told
from amp_graph.dynamo_changes.unneeded_masks import unneeded_masks_left_out
from amp_graph.dynamo_changes.unread_gradients import gradients_unread

CHANGES: tuple[Callable[[], contextlib.AbstractContextManager[None]], ...] = (
    recurrent_layers_whole,
    causal_masks_known,
    attention_calls_settled,
    quiet_logs,
    locations_untold,
    asked_gradients_kept_inside,
    known_values,
    clamped_branches_taken,
    given_once,
    context_variables_known,
    tensor_indices_known,
    repeated_hooks_as_one,
    checkpointed_writes_inside,
    checkpoint_sequences_known,
    retained_gradients_end_graphs,
    gradients_end_graphs,
    own_names,
    modes_above_autograd_apart,
    hidden_names_found,
    own_dicts_guarded,
    copied_dicts_left,
    absence_guarded,
    containers_whole,
    bound_methods_known,
    cached_draws_left_to_python,
    cached_properties_captured,
    hooks_keep_dtypes,
    gradients_unread,
    unneeded_masks_left_out,
    no_generators_left_out,
    listed_numbers_known,
    handed_through_unread,
    symbolic_math_known,
    some_calls_left_to_python,
    default_functions_returned,
    output_hooks_installed,
    settled_once,
    disabled_functions_guarded,
    breaks_told,
    own_reasons_told,
)


@contextlib.contextmanager
def changes_in_force() -> Iterator[None]:
    """Within, all of these are made. They are the process's: one thread at a time."""
    with contextlib.ExitStack() as changes:
        for change in CHANGES:
            changes.enter_context(change())
        yield
