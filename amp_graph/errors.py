"""The exceptions a user may see. Every one derives from `AmpGraphError`."""


class AmpGraphError(Exception):
    """Base of all errors this package raises on purpose."""


class ListError(AmpGraphError):
    """An operator list is malformed, or names something it should not."""


class PolicyError(AmpGraphError):
    """A policy asks for something contradictory or impossible."""


class PlanError(AmpGraphError):
    """A saved plan cannot be read, or does not belong to the model."""


class CaptureError(AmpGraphError):
    """A model could not be captured as a graph."""


class VerifyError(AmpGraphError):
    """A rewritten graph failed one of the checks it must pass."""


class CheckpointError(AmpGraphError):
    """A saved state is damaged, or is not one of this package."""


class OverflowAbort(AmpGraphError):
    """Too many optimizer steps in a row were skipped, because gradients were not finite."""
