"""Gradients of what a model uses, which Dynamo looks at: `.grad` of each of its parameters.

Another thread that trains the model writes there, and lets go of what was there; nothing in PyTorch
keeps it from doing so in the middle of a look (torch 2.13: the process crashes). Here Dynamo looks
at no gradient but one that the captured code asks for itself.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.15:

    torch._dynamo.variables.builder.safe_has_grad       whether one is there whose dtype to compare
    torch._subclasses.meta_utils.safe_grad              one that a fake tensor is to have as well
"""

from __future__ import annotations

from torch._dynamo.variables import builder
from torch._subclasses import meta_utils

CHANGES = (
    (builder, "safe_has_grad", lambda *_: False),
    (meta_utils, "safe_grad", lambda *_: None),
)
