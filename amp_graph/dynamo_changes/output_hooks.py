"""Hooks that a model puts into itself when it is first asked for something do not end a graph.

    model(tokens, output_hidden_states=True)    transformers (5.23), at the first such call, takes a
                                                lock and hooks onto each layer what collects these

So do its models of images and text, which ask their encoders. Dynamo cannot capture that. Here the
hooks are put there while the call is captured; they do nothing where nobody collects.

Of transformers: the function of `FINDS`. Versions without it are captured as they are.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo.variables import ConstantVariable

from amp_graph.dynamo_changes.known_calls import Find


def _install(code: Any, frame: Any, model: Any) -> Any:
    module = getattr(model, "value", None)
    if not isinstance(module, nn.Module):
        return None
    code(module)
    return ConstantVariable.create(None)


FINDS: dict[tuple[str, str], Find] = {
    ("transformers.utils.output_capturing", "maybe_install_capturing_hooks"): _install
}
