"""The line of the user's code that called an operator.

A call goes through the modes around it, such as that of `torch.set_default_device`, and through
PyTorch's own code, as in a vmap or `functional_call`; neither is meant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from traceback import FrameSummary

from torch import fx

from amp_graph.callers import is_users, place

OF_MODES = ("__torch_function__", "handle_torch_function")
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s+(.*))?')


def without_mode_frames(frames: Sequence[FrameSummary]) -> Sequence[FrameSummary]:
    """Return the frames without those of modes at the end. The outermost comes first, as given."""
    last = len(frames)
    while last and frames[last - 1].name in OF_MODES:
        last -= 1
    return frames[:last]


def called_at(node: fx.Node) -> FrameSummary | None:
    """Return the user's frame that called a node, from the text that Dynamo keeps with it."""
    found = FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [FrameSummary(file, int(at), name, line=line) for file, at, name, line in found]
    users = (f for f in reversed(without_mode_frames(frames)) if is_users(f.filename))
    return next(users, None)


def place_of(frame: FrameSummary) -> str:
    """Return a frame's place, as "net.py:12"."""
    return place(frame.filename, frame.lineno)
