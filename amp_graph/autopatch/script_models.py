"""The models that a script called, as the report at its end tells of them.

A script may make models without end, copies for a search or for each of many rounds. While a model
lives, its record is the conversion's, with its loss scale. Of those that are gone the plans stay,
how often they ran and what became of the scale; models that were alike are one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import nn

from amp_graph.backend.record import Record
from amp_graph.capture.budget import REPAID_BY
from amp_graph.capture.long_captures import LONG
from amp_graph.errors import line_of_user
from amp_graph.modules import below_compile
from amp_graph.scaling.loss_scale import ScaleOutcome

SECONDS = 2.0  # of the processor's for capturing count as one capture
AGAIN = 2  # models that were captured by themselves: before that none was captured anew


@dataclass
class Model:
    """A model of a script, or several that are gone and were alike.

    spelled: for a single layer, as it prints itself: `Linear(in_features=8, ...)`.
    place: the line that called it first: "train.py:12".
    record: the record of its conversion, while that is in place.
    left_alone: why it is not converted, if it is not.
    is_in_other_dtypes: whether that is why; it may be cast.
    parts: the names of its parts that were called by themselves, as models.
    stands_for: how many models it is, once they are gone, or told of in one line.
    outcomes: the outcomes of the loss scales of models that are gone.
    began, lived: when it was first called, and for how long it lived from then on, once it is gone;
        in seconds of processor time, which other work on the machine does not change.
    """

    name: str
    module: weakref.ref[nn.Module]
    spelled: str = ""
    place: str = ""
    record: Record | None = None
    left_alone: str = ""
    is_in_other_dtypes: bool = False
    parts: tuple[str, ...] = ()
    stands_for: int = 0
    outcomes: tuple[ScaleOutcome, ...] = ()
    began: float = field(default_factory=time.process_time, compare=False)
    lived: float = field(default=0.0, compare=False)

    def let_go(self) -> None:
        """Let go of the loss scale of a model that is gone: each step of every optimizer looks at
        it. It lives on with whatever else needs it, such as a backward pass that is still to come.

        Called by Python's garbage collector, hence at any time, in any thread, under any mode: it
        computes nothing and takes no lock.
        """
        self.lived = self.lived or time.process_time() - self.began
        record = self.record
        scale = None if record is None else record.scale
        if record is not None and scale is not None:
            self.outcomes = (scale.outcome(),)
            record.scale = None

    def scales(self) -> tuple[ScaleOutcome, ...]:
        scale = None if self.record is None else self.record.scale
        return self.outcomes if scale is None else (scale.outcome(),)


def model_of(module: nn.Module) -> Model:
    """Return the entry for a module that was called now."""
    shown = below_compile(module)
    is_layer = type(shown).__module__.startswith("torch.nn.") and not shown._modules
    spelled = repr(shown) if is_layer else ""
    model = Model(type(shown).__name__, weakref.ref(module), spelled, line_of_user())
    weakref.finalize(module, model.let_go).atexit = False
    return model


def owed(models: Iterable[Model], name: str) -> float:
    """Return how many captures the models of this name that are gone have not repaid by calls, as
    `CaptureBudget` has it for one model. Long captures count as several. 0 if all but one were
    called by captures of others: the next one may be, too, at no cost."""
    records = [record for record, _ in _gone(models, name)]
    cost = sum(max(r.cost.captures, r.cost.work / SECONDS) for r in records)
    return cost - _calls(records) / REPAID_BY


def calls_of_captured(models: Iterable[Model], name: str) -> int:
    """How many calls those of this name, which are gone, had, if they were being captured for most
    of the time in which they lived, and that long: no number of calls as small repaid it. Else 0.
    """
    gone = _gone(models, name)
    work = sum(record.cost.work for record, _ in gone)
    is_too_long = work > LONG and 2 * work > sum(lived for _, lived in gone)
    return _calls(record for record, _ in gone) if is_too_long else 0


def _gone(models: Iterable[Model], name: str) -> list[tuple[Record, float]]:
    """The records of those of this name that are gone, and how long they lived; none before some
    were captured again."""
    gone = (model for model in models if model.name == name and model.module() is None)
    found = [(model.record, model.lived) for model in gone if model.record is not None]
    return found if sum(record.cost.models for record, _ in found) >= AGAIN else []


def _calls(records: Iterable[Record]) -> int:
    return sum(max(record.runs.values(), default=0) for record in records)


def folded(models: Iterable[Model]) -> list[Model]:
    """Return the models, with one entry for all that are gone and were alike; live ones come
    last."""
    models = list(models)
    gone = [model for model in models if model.stands_for]
    alive = []
    for model in models:
        if model.stands_for:
            continue
        if model.module() is not None:
            alive.append(model)
            continue
        model.let_go()  # its turn may not have come yet
        _add(gone, replace(model, stands_for=1))
    return [*gone, *alive]


def alike_together(models: Iterable[Model]) -> list[Model]:
    """Return the models, with one entry for all that are alike, live or not."""
    found: list[Model] = []
    for model in models:
        _add(found, model)
    return found


def _add(models: list[Model], new: Model) -> None:
    """Add another one, to the one that it is like if there is that."""
    twin = next((i for i, other in enumerate(models) if _are_alike(other, new)), None)
    if twin is None:
        models.append(new)
    else:
        models[twin] = _together(models[twin], new)


def _are_alike(one: Model, other: Model) -> bool:
    if (one.name, one.spelled, one.left_alone) != (other.name, other.spelled, other.left_alone):
        return False
    if one.record is None or other.record is None:
        return one.record is other.record
    return one.record.plans == other.record.plans and one.record.breaks == other.record.breaks


def _together(one: Model, other: Model) -> Model:
    record = one.record
    if record is not None and other.record is not None:
        runs, cost = record.runs + other.record.runs, record.cost + other.record.cost
        record = replace(record, runs=runs, cost=cost, scale=None)
    outcomes = (*one.scales(), *other.scales())
    number = max(1, one.stands_for) + max(1, other.stands_for)
    parts = (*dict.fromkeys(one.parts + other.parts),)
    lived = one.lived + other.lived
    return replace(
        one, record=record, parts=parts, stands_for=number, outcomes=outcomes, lived=lived
    )
