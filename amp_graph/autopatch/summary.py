"""The exit report on a script's models as data: of one model, or of several in one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add
from typing import Any, TypeVar

from amp_graph.autopatch.script_models import Model, alike_together
from amp_graph.backend.record import Record
from amp_graph.capture.breaks import each_once
from amp_graph.dtypes import dtype_name
from amp_graph.reasons import dtype_of, why_nothing_is_low
from amp_graph.sums import Summable

FEW = 3  # lines of models that only differ in what they are made of


@dataclass(frozen=True)
class RunTotals(Summable):
    """The captured graphs of a model, their operators and casts as often as they ran, and how those
    run that are not as was asked for. `runs`: without those of graphs that are left to autocast."""

    graphs: int = 0
    runs: int = 0
    operators: int = 0
    operators_low: int = 0
    casts: int = 0
    cast_bytes: int = 0
    casts_of_unknown_size: int = 0
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScaleSummary:
    """The loss scale, the lowest of several, and the steps skipped under it."""

    loss_scale: float
    steps_skipped: int

    def __add__(self, other: ScaleSummary) -> ScaleSummary:
        lowest = min(self.loss_scale, other.loss_scale)
        return ScaleSummary(lowest, self.steps_skipped + other.steps_skipped)


@dataclass(frozen=True)
class ModelSummary:
    """The report on one model, or on several together, in the order of the JSON report.

    model: its class's name; in a line, told from those of others.
    spelled: as a layer prints itself; "" for no layer, or layers that print otherwise.
    alike: how many models it is.
    dtype, ran, graph_breaks: None for a model that was left alone.
    why: why nothing was converted; None if something was.
    parts: the parts that were called by themselves; None: none.
    scaled: None if no optimizer ever stepped under a loss scale, as of averages or a teacher.
    are_alike: whether they are alike if they are several.
    """

    model: str
    spelled: str
    first_called_at: str
    alike: int
    converted: bool
    dtype: str | None = None
    ran: RunTotals | None = None
    graph_breaks: tuple[str, ...] | None = None
    why: str | None = None
    parts: tuple[str, ...] | None = None
    scaled: ScaleSummary | None = None
    are_alike: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the entry of the JSON report, which has what there is."""
        entry = dict(_entries(self))
        del entry["are_alike"]  # said in lines alone: models with one entry are
        return entry


def _entries(found: ModelSummary | RunTotals | ScaleSummary) -> Iterator[tuple[str, Any]]:
    for field in fields(found):
        value = getattr(found, field.name)
        if isinstance(value, RunTotals | ScaleSummary):
            yield from _entries(value)
        elif value is not None:
            yield field.name, [*value] if isinstance(value, tuple) else value


def summary_of(model: Model) -> ModelSummary:
    """Return the report on one model, or on several that were alike: sums, but for the loss scale,
    which is the lowest."""
    named = model.name, model.spelled, model.place, max(1, model.stands_for)
    if model.record is None:
        return ModelSummary(*named, converted=False, why=model.left_alone)
    plans = model.record.plans
    scales = (scale for scale in model.scales() if scale.is_used)
    return ModelSummary(
        *named,
        converted=any(plan.converts for plan in plans),
        dtype=dtype_name(dtype_of(plans)) if plans else "",
        ran=sum(_totals(model.record), RunTotals()),
        graph_breaks=(*each_once(model.record.breaks),),
        why=why_nothing_is_low(plans) or None,
        parts=model.parts or None,
        scaled=_total(ScaleSummary(scale.get_scale(), scale.skips) for scale in scales),
    )


def _totals(record: Record) -> Iterator[RunTotals]:
    """Yield the figures of each graph of a model, and of code without one."""
    for index, plan in enumerate(record.plans):
        runs = record.runs[index]
        yield RunTotals(
            graphs=1,
            runs=runs if plan.facts or not plan.fallback else 0,  # else it is left to autocast
            operators=runs * plan.operators,
            operators_low=runs * plan.operators_low,
            casts=runs * len(plan.casts_inside),
            cast_bytes=runs * plan.cast_bytes,
            casts_of_unknown_size=runs * len(plan.unsized_casts),
            fallbacks=tuple(why for why in (plan.otherwise, plan.uncompiled) if why),
        )


def in_lines(models: Sequence[Model], summaries: Sequence[ModelSummary]) -> list[ModelSummary]:
    """Return the models, with a summary of each, as lines of the report.

    Models that are alike share a line, as layers that a script calls one by one; so do models of
    one name that were first called at one place, as in a search, if they are many. For models that
    were not converted the reason is enough. Models with the same name are told apart by what they
    print, if they are layers, or by where they were first called.
    """
    known = {id(model): summary for model, summary in zip(models, summaries, strict=True)}
    by_reason: dict[Any, list[ModelSummary]] = {}
    for number, model in enumerate(alike_together(models)):
        summary = known.get(id(model)) or summary_of(model)
        kind = number if summary.converted else (summary.model, summary.why)
        by_reason.setdefault(kind, []).append(summary)
    by_place: dict[Any, list[ModelSummary]] = {}
    for summary in map(_of_one_reason, by_reason.values()):
        place = summary.model, summary.first_called_at, summary.dtype, summary.why
        by_place.setdefault(place, []).append(summary)
    lines: list[ModelSummary] = []
    for group in by_place.values():
        lines += group if len(group) <= FEW else [_summed(group)]
    return [replace(summary, model=_full_name(summary, lines)) for summary in lines]


def _of_one_reason(models: Sequence[ModelSummary]) -> ModelSummary:
    """Return the line of models of one name that were not converted for one reason."""
    spelled = {summary.spelled for summary in models}
    return replace(
        models[0],
        alike=sum(summary.alike for summary in models),
        spelled=models[0].spelled if len(spelled) == 1 else "",
    )


def _summed(models: Sequence[ModelSummary]) -> ModelSummary:
    """Return the line of converted models that are not all alike."""
    breaks = [b for summary in models for b in summary.graph_breaks or ()]
    return replace(
        models[0],
        spelled="",
        alike=sum(summary.alike for summary in models),
        ran=_total(summary.ran for summary in models),
        graph_breaks=(*each_once(breaks),),
        scaled=_total(summary.scaled for summary in models),
        are_alike=False,
    )


Summand = TypeVar("Summand", RunTotals, ScaleSummary)


def _total(parts: Iterable[Summand | None]) -> Summand | None:
    """Return the sum of those that are there; None if none is."""
    found = [part for part in parts if part is not None]
    return reduce(add, found) if found else None


def _full_name(summary: ModelSummary, lines: Sequence[ModelSummary]) -> str:
    name, place = summary.model, summary.first_called_at
    others = [other for other in lines if other.model == name and other is not summary]
    if others and summary.spelled:
        return summary.spelled
    differs = any(other.first_called_at != place for other in others)
    return f"{name}, first called at {place}" if differs else name
