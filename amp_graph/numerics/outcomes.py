"""The outcomes of two runs beside each other, and whether there is anything to compare."""

from __future__ import annotations

from amp_graph.errors import AmpGraphError
from amp_graph.numerics.rerun import Outcome
from amp_graph.numerics.statistics import not_finite, relative_error


def outcome_errors(reference: Outcome, mixed: Outcome) -> tuple[float, float, float]:
    """Relative errors of outputs, loss and gradients."""
    names = [n for n in reference.gradients if n in mixed.gradients]
    losses = [[o.loss] if o.loss is not None else [] for o in (reference, mixed)]
    return (
        relative_error(list(reference.outputs), list(mixed.outputs)),
        relative_error(losses[0], losses[1]),
        relative_error(
            [reference.gradients[n] for n in names], [mixed.gradients[n] for n in names]
        ),
    )


def not_finite_shares(reference: Outcome) -> dict[str, float]:
    """How much of what a float32 run gave is not finite, if anything is."""
    gradients = list(reference.gradients.values())
    losses = [reference.loss] if reference.loss is not None else []
    results = {"outputs": list(reference.outputs), "loss": losses, "gradients": gradients}
    shares = {what: not_finite(tensors) for what, tensors in results.items()}
    return {what: share for what, share in shares.items() if share}


def check_reference(reference: Outcome, number: int) -> None:
    """Refuse a float32 run that nothing can be compared with."""
    if not any(t.numel() for t in (*reference.outputs, *reference.gradients.values())):
        raise AmpGraphError(
            "the model returns no floating-point tensor and has no gradients, so that no error "
            "can be bounded"
        )
    shares = not_finite_shares(reference)
    if "gradients" in shares or shares.get("outputs") == 1:
        found = ", ".join(f"{share:.1%} of {what}" for what, share in shares.items())
        raise AmpGraphError(
            f"float32 itself is not finite, in {found} of batch {number}, so that no precision "
            f"meets a bound; find_nonfinite says where that begins"
        )
