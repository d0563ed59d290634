"""Mixed precision for PyTorch as a graph-rewriting compiler pass."""

from amp_graph.convert import convert, is_converted, plans, restore
from amp_graph.errors import (
    AmpGraphError,
    CaptureError,
    ListError,
    PlanError,
    PolicyError,
    VerifyError,
)
from amp_graph.inspection.difference import diff
from amp_graph.inspection.dump import dump
from amp_graph.inspection.explain import explain
from amp_graph.ir import Cast, Color, NodeFacts, Paint, Plan, TensorFacts
from amp_graph.numerics.calibrate import Calibration, calibrate
from amp_graph.numerics.compare import Comparison, compare
from amp_graph.numerics.nonfinite import NonFinite, find_nonfinite
from amp_graph.plan_file import load_plan, save_plan
from amp_graph.policy import Override, Policy
from amp_graph.runtime import ConversionWarning

__version__ = "0.1.0"

__all__ = [
    "AmpGraphError",
    "Calibration",
    "CaptureError",
    "Cast",
    "Color",
    "Comparison",
    "ConversionWarning",
    "ListError",
    "NodeFacts",
    "NonFinite",
    "Override",
    "Paint",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyError",
    "TensorFacts",
    "VerifyError",
    "calibrate",
    "compare",
    "convert",
    "diff",
    "dump",
    "explain",
    "find_nonfinite",
    "is_converted",
    "load_plan",
    "plans",
    "restore",
    "save_plan",
]
