"""Do not capture a model again for what its first call wrote into its configuration.

    if self.config.problem_type is None:                classifiers of transformers (5.23), once
        self.config.problem_type = "regression"         they are given labels

Dynamo writes it once the graph has run, and guards what stood there before, so that the second call
is captured as well. Here it is written while the call is captured, and the guards, which are made
later, are of the new value. This is done only where None stood before, and for the name below.

Private names of PyTorch used here:

    torch._dynamo.side_effects.SideEffects.store_attr     of a variable, by name
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.side_effects import SideEffects

NAMES = {"problem_type"}
OF_TRANSFORMERS = "transformers.configuration_utils"


def _store(
    method: Any, effects: Any, item: Any, name: str, value: Any, *how: Any, **more: Any
) -> None:
    method(effects, item, name, value, *how, **more)
    config = getattr(item, "value", None)
    if name in NAMES and _is_config(config) and value.is_python_constant():
        if getattr(config, name) is None:
            setattr(config, name, value.as_python_constant())


def _is_config(value: Any) -> bool:
    return any(kind.__module__ == OF_TRANSFORMERS for kind in type(value).__mro__)


CHANGES = ((SideEffects, "store_attr", _store),)
