"""Graph breaks: where and why Dynamo stopped capturing, as it says.

Private names of PyTorch used here:

    GraphModule.compile_subgraph_reason      why a graph ended; reports say nothing without it
    TorchDynamoException.real_stack          where Dynamo was in the model's code
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from amp_graph.callers import is_users
from amp_graph.errors import AmpGraphError
from amp_graph.graphs.lines import place_of, without_mode_frames

REQUIRES = "a value that is computed there is told to require a gradient"
ON_NUMBERS = "Python branches on a number or a size that depends on the numbers in a tensor"
DRAWN = "Python goes by what cannot be captured, such as a number that its `random` draws"
FLAT = "FSDP with use_orig_params=False"
# How what it says begins, where that is but a name or of a setting that the user did not choose.
IN_WORDS = {
    "step_unsupported": "something in it cannot be captured, TORCH_LOGS=graph_breaks tells what",
    "Unsupported Tensor.item() call with capture_scalar_outputs=False": (
        "it takes a number out of a tensor, and what follows depends on that number"
    ),
    "using `torch.autograd.grad` with `torch._dynamo.config.trace_autograd_ops=False`": (
        "a gradient is taken there"
    ),
    "generic_jump TensorVariable()": "Python branches on the numbers in a tensor",
    "Data-dependent branching": "Python branches on the numbers in a tensor",
    "generic_jump SymNodeVariable()": ON_NUMBERS,
    "Could not guard on data-dependent expression": ON_NUMBERS,
    "Skip inlining `torch.compiler.disable()`d function": (
        "it calls what is kept out of graphs by `torch.compiler.disable`, as is a part that was "
        "converted by itself under another policy"
    ),
    "Dynamic shape operator": "the size of its result depends on the numbers in a tensor",
    "Could not extract specialized integer from data-dependent expression": (
        "Python needs a number or a size that depends on the numbers in a tensor"
    ),
    "unimplemented builtin op on tensor arguments": (
        "Python computes with a tensor, or a number that it drew, as cannot be captured"
    ),
    "Unsupported python_type() call": DRAWN,
    "Unsupported next() call": DRAWN,  # as torch 2.11 has it
    "attempted to trace torch._numpy.random function": "a random number of NumPy's",
    "attempted to trace numpy function unsupported": (
        "it calls a function of NumPy's that Dynamo does not know"
    ),
    "requires_grad_() intermediate leaked as output": REQUIRES,
    "Unsupported Tensor.requires_grad_() call": REQUIRES,  # as torch 2.11 has it
    FLAT: f"{FLAT} (pass use_orig_params=True)",
    "Tensor.retain_grad() with AOTDispatcher": "the gradient of a value is kept there",
    "Module-level backwards hooks require compiled autograd": "a module has backward hooks",
}
ADVICE = "Consider annotating your code using torch._check*(). "  # which may stand before that
LAZY = re.compile(r"LazyVariableTracker\(realized: (.+)\)")  # or around it

RAISED = re.compile(r"raised exception (\w+\(.*\))")  # and what
OF_LIST = re.compile(r"\[ConstantVariable\(\w+: (.+)\)\]")  # as torch 2.11 has an argument

MODEL = "the call of the model"
OF_A_FRAME = re.compile(r"[^,]+, in \S+: ")  # "net.py:12, in forward: why"

SAID_OF_DATA = (
    "PendingUnbackedSymbolNotFound",  # raised as an internal error
    "Expected bool, got FakeTensor",  # asserted where sizes are compared with a tensor
)


def break_in(graph: fx.GraphModule) -> list[str]:
    """Return where and why Dynamo ended this graph early: "net.py:12, print(x): why". Empty if it
    did not."""
    ending: Any = getattr(graph, "compile_subgraph_reason", None)
    if not getattr(ending, "graph_break", False):
        return []
    return [_at(ending.user_stack, in_other_words(str(ending.reason)) or "unknown reason")]


def in_other_words(said: str) -> str:
    """Reword the first line of a message of Dynamo's for users of another tool, and add the
    function that it is about."""
    first = LAZY.sub(r"\1", said.strip().partition("\n")[0].removeprefix(ADVICE))
    words = next((words for start, words in IN_WORDS.items() if first.startswith(start)), first)
    if first.startswith("Observed exception") and (raised := RAISED.search(said)):
        error = OF_LIST.sub(r"\1", raised[1])
        return f"it raises {error} while it is captured"
    called = re.search(r"qualname: ([^,\n]+)", said)
    return f"{words} ({called[1]})" if called else words


def each_once(breaks: Collection[str]) -> list[str]:
    """Return the distinct breaks. Of several with the same reason only the most exact are kept:
    lines if there are any, else frames that Dynamo left to Python, else the call of the model."""
    best: dict[str, int] = {}  # of each reason
    for told in breaks:
        reason = _reason(told)
        best[reason] = min(_rank(told), best.get(reason, 2))
    return [told for told in dict.fromkeys(breaks) if _rank(told) == best[_reason(told)]]


def _reason(told: str) -> str:
    return told.rpartition(": ")[2]


def _rank(told: str) -> int:
    """Return 0 for a line, 1 for a frame, 2 for the call of the model."""
    return 2 if told.startswith(f"{MODEL}: ") else int(OF_A_FRAME.match(told) is not None)


def why_not_captured(error: Exception) -> str:
    """Return where and why Dynamo gave up on a model, with the error that an operator raised on
    fake tensors; for an error of this package, its message."""
    own = getattr(error, "inner_exception", None)
    text = str(own if isinstance(own, AmpGraphError) else error).strip()
    reason = text.splitlines()[0] if text else type(error).__name__
    _, got, raised = text.partition(": got ")
    if got:
        reason = f"{reason}: {raised.splitlines()[0]}"
    frames = getattr(error, "real_stack", None)
    if not frames and reason.endswith((":", type(error).__name__)):  # it says nothing itself
        return f"{_raised_in(error)}{reason.removesuffix(':')}"
    return _at(frames or (), in_other_words(reason))


def depends_on_data(error: Exception) -> bool:
    """Whether Dynamo gave up at a number or a size that is known only with the data, as it says in
    some of its messages."""
    if isinstance(error, GuardOnDataDependentSymNode):
        return True
    return str(error).startswith(SAID_OF_DATA)


def _raised_in(error: Exception) -> str:
    """Return the innermost function of the user's behind an error: "net.py:12, __len__: "."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{place_of(f)}, {f.name}: " for f in frames if is_users(f.filename)]
    return "".join(where[-1:])


def _at(frames: Sequence[Any], reason: str) -> str:
    users = without_mode_frames(frames)
    if not users:
        return reason
    line = users[-1].line
    where = f"{place_of(users[-1])}, {line.removesuffix(':')}" if line else place_of(users[-1])
    return f"{where}: {reason}"
