"""While a model is captured, nobody looks at the gradients of its parameters.

Dynamo looks at `.grad` of each tensor that a model uses. Another thread that trains the model may
free a gradient in the middle of such a look, and the process crashes (torch 2.13). Here Dynamo
looks only at a gradient that the captured code asks for itself.

Private names of PyTorch used here:

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
