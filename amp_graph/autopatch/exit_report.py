"""The exit report on a script's models: a few lines on stderr, and JSON."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amp_graph.autopatch.left_alone import BY_SCRIPT
from amp_graph.autopatch.script_models import Model, folded
from amp_graph.autopatch.summary import (
    ModelSummary,
    RunTotals,
    ScaleSummary,
    in_lines,
    summary_of,
)
from amp_graph.calls.conversion import found_conversion
from amp_graph.errors import say
from amp_graph.files import write_whole
from amp_graph.inspection import render
from amp_graph.inspection.dump import dump
from amp_graph.inspection.spelling import byte_count, plural

OF_CHILDREN = "the processes that it started tell of theirs, if they called any"


def write_report(
    models: Sequence[Model],
    folder: Path | None,
    process: str = "",
    missed: Mapping[str, str] | None = None,
    compiles: bool = False,
    has_children: bool = False,
) -> None:
    """Print the report; with a folder also write report.json and the annotated graphs there: a
    text for each plan, without those that an earlier run has left of a model, and, of models that
    still live, all that `dump` writes. `process` names one of several that report: it begins each
    line, and its files have a folder of that name. `missed` has the globs that match no module of a
    converted model, with what comes close. `compiles`: whether the script compiles something by
    itself. `has_children`: whether it has started processes that report, too."""
    models = folded(models)
    summaries = [summary_of(m) for m in models]
    breaks = [*dict.fromkeys(b for s in summaries for b in s.graph_breaks or ())]
    entries = [s.as_json() for s in summaries]
    report = {"models": entries, "graph_breaks": breaks, "script_compiles": compiles}
    missing = (
        f"AMP_GRAPH_SKIP={glob} matches no module that was converted{hint and f'.{hint}'}"
        for glob, hint in (missed or {}).items()
    )
    lines = in_lines(models, summaries)
    say(
        *_headlines(lines, compiles, has_children),
        *_of_converted(lines, breaks),
        *missing,
        of=process,
    )
    if folder is not None:
        _write(models, report, folder / process.replace(" ", ""))


def _write(models: Sequence[Model], report: dict[str, Any], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "report.json", json.dumps(report, indent=2))
        for number, model in enumerate(models):
            stem = f"{number}-{re.sub(r'[^A-Za-z0-9_.-]', '_', model.name)}"
            plans = model.record.plans if model.record else ()
            for graph, plan in enumerate(plans):
                write_whole(folder / f"{stem}-{graph}.txt", render(plan))
            for graph in itertools.count(len(plans)):
                if not (left := folder / f"{stem}-{graph}.txt").exists():
                    break
                left.unlink()
            module = model.module()
            conversion = None if module is None else found_conversion(module)
            if conversion is not None and conversion.places_in_force():
                dump(conversion.module, folder / stem)
    except Exception as error:
        say(f"cannot write to {folder}: {error}")


def _headlines(models: Sequence[ModelSummary], compiles: bool, has_children: bool) -> Iterator[str]:
    """Say why nothing was converted or, if something was, why nothing of which models."""
    if not models and has_children:
        yield f"nothing was converted here, because {_why_none(compiles)}; {OF_CHILDREN}"
    elif not any(m.converted for m in models):
        whys = "; ".join(f"{_name(m)}: {m.why}" for m in models) or _why_none(compiles)
        is_well = models and all(m.why == BY_SCRIPT for m in models)
        nothing = "nothing was converted here" if is_well else "NOTHING WAS CONVERTED"
        yield f"{nothing}, because {whys}"
    else:  # what was left alone was told of when it was first called, and parts have own lines
        tried = (m for m in models if m.ran and not m.converted and not m.parts)
        yield from (f"{_name(m)}: nothing was converted, because {m.why}" for m in tried)


def _why_none(compiles: bool) -> str:
    why = (
        "no module with parameters was called in this process by nn.Module.__call__ "
        "outside of torch.func, vmap and tracers"
    )
    return f"{why}, and what the script compiles is left as it is" if compiles else why


def _of_converted(models: Sequence[ModelSummary], breaks: Iterable[str]) -> Iterator[str]:
    """Tell of the models that were converted, and then of the breaks of others, if those are not
    why these were not; of a break in code that several share, once."""
    told: set[str] = set()
    for m in models:
        if m.converted and m.ran:
            yield f"{_name(m)}: {_figures(m.ran, m.dtype)}"
            yield from _fallbacks(m.ran)
            if m.scaled:
                yield f"  {_scale(m.scaled, m.alike)}"
            yield from _breaks(m.graph_breaks or (), told)
    whys = " ".join(m.why for m in models if m.why is not None)
    yield from _breaks((b for b in breaks if b not in whys), told)


def _figures(ran: RunTotals, dtype: str | None) -> str:
    if not ran.runs:
        return "no captured graph ran"
    least = "at least " if ran.casts_of_unknown_size else ""
    return (
        f"{ran.operators_low} of {ran.operators} operators on {dtype} tensors, "
        f"{ran.casts} {plural(ran.casts, 'cast')} moving {least}{byte_count(ran.cast_bytes)}, "
        f"in {ran.runs} {plural(ran.runs, 'run')} of {ran.graphs} {plural(ran.graphs, 'graph')}"
    )


def _fallbacks(ran: RunTotals) -> Iterator[str]:
    for fallback, graphs in Counter(ran.fallbacks).items():
        yield f"  {fallback}" + (f" ({graphs} graphs)" if graphs > 1 else "")


def _scale(scaled: ScaleSummary, alike: int) -> str:
    scale, skipped = f"loss scale {scaled.loss_scale:g}", scaled.steps_skipped
    steps = f"{skipped} {plural(skipped, 'step')} skipped"
    return f"{scale} at the lowest, {steps} in all" if alike > 1 else f"{scale}, {steps}"


def _breaks(breaks: Iterable[str], told: set[str]) -> Iterator[str]:
    yield from (f"  graph break at {b}" for b in breaks if b not in told)
    told.update(breaks)


def _name(m: ModelSummary) -> str:
    how = " alike" if m.are_alike else ", not all alike"
    return f"{m.model} ({m.alike}{how})" if m.alike > 1 else m.model
