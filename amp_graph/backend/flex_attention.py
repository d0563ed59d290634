"""Calls of `flex_attention` in a graph that runs operator by operator are compiled by themselves.

    flex_attention(q, k, v, score_mod, ...)   ->   torch.compile of that, with `score_mod` inside

The operator is meant for compilers, which put the user's score functions into one kernel of
attention. Run as it is, it makes a tensor of all scores, in float32. Users therefore compile
`torch.nn.attention.flex_attention`, as it tells them to; in the captured graph that shows as a call
of the operator alone.

Layers whose functions compute the same share one compiled kernel, as they would share the user's.

On CPU torch 2.11 compiles code that overwrites other memory if there are two threads or more, and
kills the process; 2.13 and 2.15 do not. There the operator runs as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from amp_graph.backend.guarded import Guarded
from amp_graph.backend.inductor import inductor
from amp_graph.capture.dynamo import with_new_code
from amp_graph.errors import warn
from amp_graph.graphs.aten import FLEX_ATTENTION, arguments, device_of, get_attribute
from amp_graph.modules import Run

CPU_IS_SOUND = torch.__version__ >= "2.13"


def compiled_attention(module: fx.GraphModule) -> Mapping[str, Run]:
    """Return, by name of the node, the function to call for each `flex_attention` in a graph."""
    made: dict[Any, Run] = {}
    found = {}
    for node in module.graph.find_nodes(op="call_function", target=FLEX_ATTENTION):
        is_unsound = device_of(node) == "cpu" and not CPU_IS_SOUND
        if is_unsound or any(user.target is not operator.getitem for user in node.users):
            continue
        of = arguments(node)
        score_mod, mask_mod = (
            get_attribute(module, body.target) for body in (of["score_mod"], of["block_mask"][-1])
        )
        read = frozenset(user.args[1] for user in node.users)
        key = _form(score_mod), _form(mask_mod), read
        if key not in made:
            made[key] = _compiled(score_mod, mask_mod, read)
        found[node.name] = made[key]
    return found


def _form(body: fx.GraphModule) -> Any:
    """Return a key that is equal for bodies that compute the same. A body with constants equals
    none."""
    if body.graph.find_nodes(op="get_attr"):
        return id(body)
    form, numbers = [], {node: k for k, node in enumerate(body.graph.nodes)}
    for node in body.graph.nodes:
        operands = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        form.append((node.op, "" if node.op == "placeholder" else node.target, str(operands)))
    return tuple(form)


def _compiled(score_mod: fx.GraphModule, mask_mod: fx.GraphModule, read: frozenset[Any]) -> Run:
    """Compile one kernel. `read`: the results that are read; on CPU compiled code has no others
    (torch 2.13)."""
    score_mod, mask_mod = map(_as_written, (score_mod, mask_mod))

    def attend(*args: Any) -> Any:
        q, k, v, _, block_mask, scale, options, of_scores, of_mask = args

        def score(*values: Any) -> Any:
            return score_mod(*values, *of_scores)

        def mask(*values: Any) -> Any:
            return mask_mod(*values, *of_mask)

        results = FLEX_ATTENTION(q, k, v, score, (*block_mask[:-1], mask), scale, options)
        return [result if i in read else None for i, result in enumerate(results)]

    own = with_new_code(attend, attend.__name__)
    guarded = Guarded(torch.compile(own, backend=inductor), FLEX_ATTENTION, (), _say_why)

    def flex_attention(*args: Any) -> Any:
        return guarded(*args)

    return flex_attention


def _as_written(body: fx.GraphModule) -> fx.GraphModule:
    """Return the body with tensors indexed by `[]` again. The operator looks for that: the gradient
    of a tensor indexed otherwise is no operation on single scores, which is not compiled (torch
    2.11)."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor):
        tensor, indices = node.args
        node.target = operator.getitem
        node.args = tensor, tuple(slice(None) if i is None else i for i in indices)
    return fx.GraphModule(body, graph)


def _say_why(reason: str) -> None:
    warn(f"flex_attention is not compiled, and makes a tensor of all scores: {reason}")
