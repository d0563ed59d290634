"""Record: the history of one conversion. It outlives the model, for the exit report, and must not
keep the model alive.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, replace

from amp_graph.capture.budget import Cost
from amp_graph.errors import warn
from amp_graph.ir import Plan
from amp_graph.scaling.graph_scale import GraphScale


@dataclass
class Record:
    """The plans of a model's graphs in order of capture, how often each graph ran, where and why
    graphs ended before the model did, the cost of capturing, and the loss scale.

    model: the model's name, if it is known.
    """

    model: str = ""
    plans: list[Plan] = field(default_factory=list)
    runs: Counter[int] = field(default_factory=Counter)
    breaks: list[str] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)
    scale: GraphScale | None = None
    _said: set[str] = field(default_factory=set, repr=False, compare=False)
    _adding: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, plan: Plan) -> int:
        """Add the plan of a captured graph, or of code without one, and return its index."""
        with self._adding:
            self.plans.append(plan)
            return len(self.plans) - 1

    def drop(self, index: int) -> None:
        """Take back the plan of code without a graph. If a plan was added since, an empty plan
        stays in its place, as plans are known by their indices."""
        with self._adding:
            if index == len(self.plans) - 1:
                del self.plans[index]
            else:
                self.plans[index] = Plan(self.plans[index].dtype)

    def warn_once(self, message: str) -> None:
        """Warn, unless this was said of the model before."""
        if message not in self._said:
            self._said.add(message)
            warn(message)

    def fall_back(self, index: int, reason: str) -> None:
        self.plans[index] = self.plans[index].as_captured(reason)
        self.tell_as_captured(index)

    def tell_as_captured(self, index: int) -> None:
        reason = self.plans[index].fallback
        warn(f"{self.graph(index)} runs as it was captured, in its own precision: {reason}")

    def graph(self, index: int) -> str:
        """Return the name of a graph for warnings."""
        return f"graph {index} of {self.model}" if self.model else f"graph {index}"

    def not_under_autocast(self, index: int, what: str, reason: str) -> None:
        plan = self.plans[index]
        why = f"{plan.fallback}; autocast fails ({reason})"
        self.plans[index] = replace(plan, fallback=why, autocast=False)
        warn(f"{what} runs in float32: autocast fails ({reason})")

    def in_float32(self, index: int, function: str) -> str:
        """Note that a custom function runs in float32 in code that runs under autocast. Returns
        what to tell about it, or "" if it was told before."""
        said = f"{function} in float32: no torch.amp.custom_fwd for the device decorates it"
        is_told = any(said in (plan.fallback or "") for plan in self.plans)
        plan = self.plans[index]
        if said not in (plan.fallback or ""):  # the same code, captured anew
            self.plans[index] = replace(plan, fallback=f"{plan.fallback}; {said}")
        return "" if is_told else said

    def not_compiled(self, index: int, reason: str) -> None:
        self.plans[index] = replace(self.plans[index], uncompiled=reason)
        warn(f"{self.graph(index)} is not compiled, but runs operator by operator: {reason}")
