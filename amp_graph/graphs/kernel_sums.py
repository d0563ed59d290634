"""How many numbers a kernel adds up in the precision of its tensors, in torch 2.11 to 2.14.

    avg_pool2d(x, 31, stride=1)           backward: 961 gradients for each element of x
    pad(x, 8, mode="replicate")           backward: up to 81, for an element of a corner
    x.index_put((i,), y, accumulate=True) as many as are put, if all in one place
    adaptive_avg_pool3d(x, 2)             on a CPU: a window for each result, unless it is all of x
    addbmm(x, a, b)                       on a CPU: the products of all the batch
    x.unfold(1, 400, 1), F.unfold(x, 9)   backward: as many gradients as windows that overlap
    torch.stack([x] * 300)                backward: 300, which autograd adds up

A sum that a kernel keeps in float32 meanwhile (a matrix product, `index_add`) counts as one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import fx
from torch._ops import OpOverload

from amp_graph.graphs.aten import arguments, device_of
from amp_graph.graphs.fake import size_hint


def added_up(node: fx.Node) -> int:
    """Return the most numbers that a node adds up for an element of its result, or of a
    gradient."""
    if not isinstance(node.target, OpOverload):
        return 1
    count = COUNTS.get(node.target._schema.name.removeprefix("aten::").rstrip("_"))
    return 1 if count is None else count(node, arguments(node))


def _overlap(dimensions: int, node: fx.Node, given: Any) -> int:
    """Return how many windows an element is in."""
    kernel, stride = given["kernel_size"], given.get("stride") or given["kernel_size"]
    sizes, steps = ([*each] * (dimensions // len(each)) for each in (kernel, stride))
    return _product(-(-k // s) for k, s in zip(sizes, steps, strict=True))


def _slid(node: fx.Node, given: Any) -> int:
    return -(-_size(given["size"]) // max(1, _size(given["step"])))


def _strided(node: fx.Node, given: Any) -> int:
    """Return how many elements of the result share one element of the operand."""
    results, elements = (size_hint(x.meta["val"].numel()) for x in (node, given["self"]))
    return -(-results // max(1, elements))


def _repeated(node: fx.Node, given: Any) -> int:
    return max(Counter(given["tensors"]).values(), default=1)


def _window(node: fx.Node, given: Any) -> int:
    if device_of(node) != "cpu":
        return 1
    sizes, results = (x.meta["val"].shape[-3:] for x in (given["self"], node))
    if all(size == 1 for size in results):
        return 1
    sides = zip(map(size_hint, sizes), map(size_hint, results), strict=True)
    return _product(-(-size // max(1, count)) for size, count in sides)


def _border(node: fx.Node, given: Any) -> int:
    padding: Sequence[Any] = given.get("padding") or given["pad"]
    if "pad" in given and given.get("mode") != "replicate":
        return 1
    sides = zip(padding[::2], padding[1::2], strict=True)
    return _product(1 + max(0, *map(_size, side)) for side in sides)


def _put(node: fx.Node, given: Any) -> int:
    if not given.get("accumulate"):
        return 1
    indices = given.get("indices", [given.get("index")])
    return max((size_hint(i.meta["val"].numel()) for i in indices if i is not None), default=1)


def _batch(node: fx.Node, given: Any) -> int:
    return size_hint(given["batch1"].meta["val"].shape[0]) if device_of(node) == "cpu" else 1


def _size(value: Any) -> int:
    return size_hint(value.meta["val"] if isinstance(value, fx.Node) else value)


def _product(counts: Iterable[Any]) -> int:
    return math.prod(map(_size, counts))


COUNTS: dict[str, Callable[[fx.Node, Any], int]] = {
    **{f"avg_pool{d}d": partial(_overlap, d) for d in (1, 2, 3)},
    **{f"replication_pad{d}d": _border for d in (1, 2, 3)},
    "pad": _border,
    "index_put": _put,
    "put": _put,
    "adaptive_avg_pool3d": _window,
    "_adaptive_avg_pool3d": _window,
    "addbmm": _batch,
    "unfold": _slid,
    "as_strided": _strided,
    "im2col": partial(_overlap, 2),
    "cat": _repeated,
    "stack": _repeated,
}
