"""Mixed precision for PyTorch as a graph-rewriting compiler pass."""

# The private names of PyTorch that files list in their docstrings were seen to work on 2.11, 2.13
# and 2.15, unless these say otherwise.

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
    ConversionWarning,
    ListError,
    OverflowAbort,
    PlanError,
    PolicyError,
    VerifyError,
)
from amp_graph.export import export
from amp_graph.inspection.difference import Difference, diff
from amp_graph.inspection.dump import dump
from amp_graph.inspection.explain import Report, explain
from amp_graph.inspection.plan_text import render
from amp_graph.ir import Cast, Color, NodeFacts, Paint, Plan, TensorFacts
from amp_graph.levels import Level
from amp_graph.numerics.calibrate import Calibration, calibrate
from amp_graph.numerics.compare import compare
from amp_graph.numerics.comparison import Comparison
from amp_graph.numerics.nonfinite import NonFinite, find_nonfinite
from amp_graph.optimizers.guards import step_counts
from amp_graph.optimizers.step_record import StepCounts
from amp_graph.override import Override
from amp_graph.plans.plan_file import load_plan, save_plan
from amp_graph.policy import Policy
from amp_graph.scaling.grad_scaler import GradScaler, scale_loss
from amp_graph.scaling.graph_scale import GraphScale
from amp_graph.scaling.loss_scale import LossScale

__version__ = "0.1.0"

__all__ = [
    "AmpGraphError",
    "Calibration",
    "CaptureError",
    "Cast",
    "CheckpointError",
    "Color",
    "Comparison",
    "ConversionWarning",
    "Difference",
    "GradScaler",
    "GraphScale",
    "Level",
    "ListError",
    "LossScale",
    "NodeFacts",
    "NonFinite",
    "OverflowAbort",
    "Override",
    "Paint",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyError",
    "Report",
    "StepCounts",
    "TensorFacts",
    "VerifyError",
    "calibrate",
    "compare",
    "convert",
    "diff",
    "dump",
    "explain",
    "export",
    "find_nonfinite",
    "has_finite_gradients",
    "is_converted",
    "load_plan",
    "plans",
    "render",
    "restore",
    "save_plan",
    "scale_loss",
    "scale_of",
    "step_counts",
]
