"""The backend under its name: `torch.compile(model, backend="amp_graph")`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

from torch import fx

from amp_graph.backend.compiler import Compiler
from amp_graph.dynamo_changes.inner_gradients import compile_in_parts
from amp_graph.errors import PolicyError, did_you_mean
from amp_graph.policy import Policy
from amp_graph.weights.store import LowPrecisionWeights

_of_all_graphs = cache(LowPrecisionWeights)  # that were captured by name, by whether they are kept


def backend(
    graph_module: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Any = None,
    mode: Any = None,
) -> Callable[..., Any]:
    """The backend of `torch.compile(model, backend="amp_graph", options={"dtype": "float16"})`.

    Nobody tells it of which model a graph is, so that low-precision weights are shared by all. A
    mode, which is Inductor's notion, compiles with Inductor. Gradients are not scaled: in float16
    use a GradScaler. Raises PolicyError for an option that is no field of a Policy, and for
    `output_dtype` and `loss_scale`, which are of a whole model.
    """
    given = {"compiler": "inductor", "compiler_options": mode} if mode else options or {}
    names = [field.name for field in fields(Policy)]
    for name in given:
        if name not in names:
            raise PolicyError(
                f"options: {name!r} is no field of amp_graph.Policy.{did_you_mean(name, names)}"
            )
    policy = Policy(**given)
    for name in ("output_dtype", "loss_scale"):
        if name in given and getattr(policy, name) is not None:
            raise PolicyError(f"options: {name!r} is for convert(), which knows the whole model")
    weights = _of_all_graphs(policy.keeps_weights)
    compile_graph = Compiler(policy, weights=weights).compile_graph
    return compile_in_parts(graph_module, example_inputs, compile_graph)
