"""The rules of paint that look at one node alone. Each gives a Paint or leaves the node open."""

from __future__ import annotations

import math

import torch

from amp_graph.ir import Color, NodeFacts, Paint
from amp_graph.passes.scene import FREE, NodeRule, Scene


def fixed_as_captured(scene: Scene, f: NodeFacts) -> Paint | None:
    """Nothing to convert, or precision that the model's own code chose."""
    return Paint(Color.KEEP, "as captured", f.fixed) if f.fixed else None


def written_inputs(scene: Scene, f: NodeFacts) -> Paint | None:
    """Memory that came from outside and is written to stays what the caller handed over."""
    is_written = f.written and f.external
    return Paint(Color.DENY, "writes into", f.memory) if is_written else None


def shared_outputs(scene: Scene, f: NodeFacts) -> Paint | None:
    """Outputs that share memory with an input or with one another go on sharing it. The operator
    that made the memory may compute low all the same; its result is then cast on the spot. Not so
    one of several results, which is taken out as it is."""
    shared = f.memory if _shares(scene, f) and not _can_cast(scene, f) else None
    if len(f.tensors) > 1:
        taken = (scene.facts[reader] for reader in scene.flow.successors(f.name))
        shared = next((r.memory for r in taken if r.op == "getitem" and _shares(scene, r)), shared)
    if shared is None:
        return None
    return Paint(Color.DENY, "output shares memory with", shared, shares=True)


def _shares(scene: Scene, f: NodeFacts) -> bool:
    return scene.outputs_in.get(f.memory, 0) > (0 if f.external else 1)


def _can_cast(scene: Scene, f: NodeFacts) -> bool:
    return scene.colors[f.name] is Color.ALLOW and not f.is_view


def missing_kernels(scene: Scene, f: NodeFacts) -> Paint | None:
    if scene.colors[f.name] not in (Color.ALLOW, *FREE):
        return None
    device = f.tensors[0].device if f.tensors else "cpu"
    has_kernel = scene.lists.has_kernel(f.op, device, scene.dtype)
    if has_kernel and f.name not in scene.refused:
        return None
    return Paint(Color.DENY, "no kernel", f"{f.op} on {device}")


def saved_decisions(scene: Scene, f: NodeFacts) -> Paint | None:
    """The colours of a plan that was saved, and perhaps edited, hold as they are."""
    return scene.saved.get(f.name)


def user_overrides(scene: Scene, f: NodeFacts) -> Paint | None:
    color, because = scene.overrides.get(f.name, (Color.INFER, ""))
    return None if color in FREE else Paint(color, "override", because)


def user_casts(scene: Scene, f: NodeFacts) -> Paint | None:
    """An explicit `.float()` asks for float32 from there on."""
    because = "the model converts to float32"
    return Paint(Color.DENY, "user cast", because) if f.user_cast else None


def unrepresentable_numbers(scene: Scene, f: NodeFacts) -> Paint | None:
    """A constant that overflows or vanishes in low precision (a mask value, an epsilon)."""
    info = torch.finfo(scene.dtype)
    for number in f.scalars if scene.colors[f.name] in FREE else ():
        size = abs(number)
        if math.isfinite(size) and size and not info.smallest_normal <= size <= info.max:
            return Paint(Color.DENY, "constant out of range", f"{number:g}")
    return None


def listed(scene: Scene, f: NodeFacts) -> Paint | None:
    """Allow, deny, and operators on no list."""
    color = scene.colors[f.name]
    if color is None:
        return Paint(Color.DENY, "on no list", f.op)
    return None if color in FREE else Paint(color, "listed", f.group)


NODE_RULES: tuple[NodeRule, ...] = (
    fixed_as_captured,
    written_inputs,
    shared_outputs,
    missing_kernels,
    saved_decisions,
    user_overrides,
    user_casts,
    unrepresentable_numbers,
    listed,
)
