"""Find the operators without a low-precision kernel and write allow_deny_lists/kernels.toml.

    python scripts/missing_kernels.py --device cpu            # prints what it finds
    python scripts/missing_kernels.py --device cpu --write    # and replaces that device's tables

Every sample input of torch's own operator database is captured as an ATen graph in float32
and run node by node. Each node that could be given low-precision tensors is then run alone
on them, forward and backward. A node that fails for want of a kernel, and does not in
float32, names its overload. Operators on the deny list always run in float32 and are left
out, unless their tensors may be low.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from amp_graph.dtypes import LOW_DTYPES
from amp_graph.ir import Color
from amp_graph.listing import Listing
from amp_graph.oplists import OpLists, load_lists

NO_KERNEL = ("not implemented for", "not supported for", "does not support", "could not create a")
"""How torch and oneDNN say that a kernel is missing."""

HEADER = """\
# Operators without a kernel, forward or backward, in a low precision on a device.
# Written by scripts/missing_kernels.py; run that instead of editing this.

schema = 1
"""

Failures = dict[torch.dtype, dict[str, collections.Counter[str]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=20, help="sample inputs per operator")
    parser.add_argument("--only", default="", help="a part of the database names to try")
    parser.add_argument("--write", action="store_true", help="replace the tables of this device")
    parser.add_argument("--file", type=Path, default=Path("allow_deny_lists/kernels.toml"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    lists = OpLists(load_lists(strict=True).entries, {})
    failures: Failures = {dtype: {} for dtype in LOW_DTYPES.values()}
    for index, info in enumerate(op_db):
        if options.only in info.name:
            print(f"{index}/{len(op_db)} {info.name}", file=sys.stderr, flush=True)
            for node, args, kwargs in _nodes(info, options.device, options.samples, lists):
                _try_node(node, args, kwargs, lists, failures)
    missing = {d: _report(name, failures[d]) for name, d in LOW_DTYPES.items()}
    if options.write:
        options.file.write_text(_toml(options.file, options.device, missing))


def _nodes(
    info: Any, device: str, samples: int, lists: OpLists
) -> Iterator[tuple[torch.fx.Node, Any, Any]]:
    """Every convertible node of the graphs of `info`'s samples, with its float32 arguments."""
    if torch.float32 not in info.supported_dtypes(device):
        return
    inputs = info.sample_inputs(device, torch.float32, requires_grad=False)
    for sample in itertools.islice(inputs, samples):
        leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def call(
            *tensors: torch.Tensor, leaves: Any = leaves, spec: Any = spec, places: Any = places
        ) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args, kwargs = tree_unflatten(filled, spec)
            return info.op(*args, **kwargs)

        tensors = [leaves[i] for i in places]
        try:
            graph = make_fx(call, pre_dispatch=True)(*[t.clone() for t in tensors])
        except Exception as error:  # a sample that cannot be captured says nothing of kernels
            print(f"  not captured: {info.name}: {str(error)[:80]!r}", file=sys.stderr)
            continue
        recorder = _Recorder(graph, lists)
        try:
            recorder.run(*tensors)
        except Exception as error:
            print(f"  does not run: {info.name}: {str(error)[:80]!r}", file=sys.stderr)
        yield from recorder.seen


class _Recorder(torch.fx.Interpreter):
    """Runs a graph and keeps the arguments of every node that may get low-precision tensors."""

    def __init__(self, graph: torch.fx.GraphModule, lists: OpLists) -> None:
        super().__init__(graph)
        self.lists = lists
        self.seen: list[tuple[torch.fx.Node, Any, Any]] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        if isinstance(n.target, torch._ops.OpOverload) and _may_be_low(self.lists.lookup(n.target)):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.seen.append((n, *_cloned(args, kwargs)))
        return super().run_node(n)


def _may_be_low(listing: Listing | None) -> bool:
    if listing is None:
        return False
    return listing.color is not Color.DENY or bool(listing.storage)


def _cloned(args: Any, kwargs: Any) -> Any:
    return tree_map(
        lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs)
    )


def _try_node(
    node: torch.fx.Node, args: Any, kwargs: Any, lists: OpLists, failures: Failures
) -> None:
    op: Any = node.target
    if not any(_is_float32(x) for x in tree_flatten((args, kwargs))[0]):
        return
    if _outcome(op, args, kwargs, lists, torch.float32) is not None:
        return
    for dtype, by_op in failures.items():
        error = _outcome(op, args, kwargs, lists, dtype)
        by_op.setdefault(_entry(op), collections.Counter())[error or ""] += 1


def _is_float32(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is torch.float32


def _entry(op: Any) -> str:
    """In-place forms share the kernel of the functional form."""
    namespace, packet, overload = str(op).split(".")
    packet = packet[:-1] if packet.endswith("_") and not packet.endswith("__") else packet
    return f"{namespace}.{packet}.{overload}"


def _outcome(op: Any, args: Any, kwargs: Any, lists: OpLists, dtype: torch.dtype) -> str | None:
    """What running `op` forward and backward with its tensors in `dtype` raised, or None."""
    listing = lists.lookup(op)
    assert listing is not None
    names = [a.name for a in op._schema.arguments]
    low = [listing.computes_on(n, "cpu") or n in listing.metadata_args for n in names]
    args = [_leaf(a, dtype if low[i] else torch.float32) for i, a in enumerate(args)]
    kwargs = {
        k: _leaf(v, dtype if low[names.index(k)] else torch.float32) for k, v in kwargs.items()
    }
    mutates = op._schema.is_mutable
    try:
        with torch.enable_grad():
            # a leaf that requires grad cannot be written to, its copy can
            result = op(*tree_map(_copy, args) if mutates else args, **kwargs)
            _backward(result)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
    return None


def _leaf(x: Any, dtype: torch.dtype) -> Any:
    def one(t: Any) -> Any:
        return t.detach().to(dtype).clone().requires_grad_() if _is_float32(t) else t

    return tree_map(one, x)


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _backward(result: Any) -> None:
    outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
    outputs = [t for t in outputs if t.requires_grad and t.is_floating_point()]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _report(dtype: str, by_op: dict[str, collections.Counter[str]]) -> list[str]:
    """Print every failure with how often it struck; return the names that lack a kernel."""
    missing = []
    for name, outcomes in sorted(by_op.items()):
        errors = {e: n for e, n in outcomes.items() if e}
        lacks = any(sign in e for e in errors for sign in NO_KERNEL)
        missing += [name] if lacks else []
        for error, count in errors.items():
            mark = "missing" if lacks else "other"
            print(f"{dtype} {mark:8}{name:45}{count}/{outcomes.total()} {error}")
    print(f"{dtype}: {len(missing)} of {len(by_op)} overloads tried lack a kernel")
    return missing


def _toml(file: Path, device: str, missing: dict[torch.dtype, list[str]]) -> str:
    """The file with the tables of `device` replaced and those of other devices as they were."""
    old = tomllib.loads(file.read_text()) if file.exists() else {}
    tables = {d: t for d, t in old.items() if d not in ("schema", device)}
    short = {dtype: name for name, dtype in LOW_DTYPES.items()}
    tables[device] = {
        short[dtype]: {
            "why": f"torch {torch.__version__.partition('+')[0]} raised for want of a kernel, "
            "forward or backward.",
            "ops": names,
        }
        for dtype, names in missing.items()
        if names
    }
    lines = [HEADER]
    for place, by_dtype in sorted(tables.items()):
        for dtype, group in sorted(by_dtype.items()):
            ops = "".join(f'  "{name}",\n' for name in group["ops"])
            lines.append(f'[{place}.{dtype}]\nwhy = "{group["why"]}"\nops = [\n{ops}]\n')
    return "\n".join(lines)


if __name__ == "__main__":
    main()
