"""Mixed precision for PyTorch as a graph-rewriting compiler pass."""

from amp_graph.convert import (
    convert,
    has_finite_gradients,
    is_converted,
    plans,
    restore,
    scale_of,
)
from amp_graph.errors import (
    AmpGraphError,
    CaptureError,
    CheckpointError,
    ListError,
    OverflowAbort,
    PolicyError,
    VerifyError,
)
from amp_graph.grad_scaler import GradScaler, scale_loss
from amp_graph.graph_scale import GraphScale
from amp_graph.ir import Cast, Color, NodeFacts, Paint, Plan, TensorFacts
from amp_graph.loss_scale import LossScale
from amp_graph.policy import Override, Policy
from amp_graph.runtime import ConversionWarning
from amp_graph.step_guard import StepCounts
from amp_graph.training import step_counts

__version__ = "0.1.0"

__all__ = [
    "AmpGraphError",
    "CaptureError",
    "Cast",
    "CheckpointError",
    "Color",
    "ConversionWarning",
    "GradScaler",
    "GraphScale",
    "ListError",
    "LossScale",
    "NodeFacts",
    "OverflowAbort",
    "Override",
    "Paint",
    "Plan",
    "Policy",
    "PolicyError",
    "StepCounts",
    "TensorFacts",
    "VerifyError",
    "convert",
    "has_finite_gradients",
    "is_converted",
    "plans",
    "restore",
    "scale_loss",
    "scale_of",
    "step_counts",
]
