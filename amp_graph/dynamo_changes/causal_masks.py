"""Masks of `nn.Transformer` are applied as given while a model is captured.

    encoder(x, mask)   ->   attention(q, k, v, mask) in each layer, whatever the mask holds

Encoder and decoder look into a mask whether it is the causal one, for which attention has a kernel
without a mask. The answer depends on data, so that the graph would break inside torch.nn, whose
code Dynamo does not capture by itself. To the same result the mask may be applied either way.

Dynamo is told what to call instead of that function. The function itself stays where it is: to
replace it would fail the guards that Dynamo makes for it, in every call.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.15:

    torch.nn.modules.transformer._detect_is_causal_mask
    torch._dynamo.variables.builder.VariableBuilder._id_dispatch    what an object is to Dynamo
    torch._dynamo.variables.UserFunctionVariable                    a function to capture
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor
from torch._dynamo.variables import UserFunctionVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch.nn.modules.transformer import _detect_is_causal_mask as DETECT

from amp_graph.dynamo_changes.replaced import with_entries


def masks_unread() -> contextlib.AbstractContextManager[None]:
    """Within, Dynamo captures `is_said_to_be_causal` where the model looks into a mask."""
    return with_entries(VariableBuilder._id_dispatch(), {id(DETECT): _stand_in})


def _stand_in(builder: VariableBuilder, detect: Any) -> UserFunctionVariable:
    return UserFunctionVariable(is_said_to_be_causal)  # type: ignore[arg-type]


def is_said_to_be_causal(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Whether the caller says so; not whether the mask is."""
    return is_causal is True
