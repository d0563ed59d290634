"""The exit report on a script's models: a few lines on stderr, and JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amp_graph.autopatch.left_alone import BY_SCRIPT
from amp_graph.autopatch.script_models import Model, alike_together, folded
from amp_graph.autopatch.standard_error import say
from amp_graph.capture.breaks import each_once
from amp_graph.convert import is_converted
from amp_graph.dtypes import dtype_name
from amp_graph.inspection import render
from amp_graph.inspection.dump import dump
from amp_graph.inspection.spelling import byte_count, plural
from amp_graph.reasons import dtype_of, why_nothing_is_low

FEW = 3  # lines of models that only differ in what they are made of
SUMS = (
    *("alike", "runs", "graphs", "operators", "operators_low"),
    *("casts", "cast_bytes", "casts_of_unknown_size"),
)
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
    text for each plan and, of models that still live, all that `dump` writes. `process` names one
    of several that report: it begins each line, and its files have a folder of that name. `missed`
    has the globs that match no module of a converted model, with what comes close. `compiles`:
    whether the script compiles something by itself. `has_children`: whether it has started
    processes that report, too."""
    models = folded(models)
    described = [describe(m) for m in models]
    breaks = dict.fromkeys(b for m in described for b in m.get("graph_breaks", ()))
    report = {"models": described, "graph_breaks": [*breaks], "script_compiles": compiles}
    missing = (
        f"AMP_GRAPH_SKIP={glob} matches no module that was converted{hint and f'.{hint}'}"
        for glob, hint in (missed or {}).items()
    )
    say(*_lines(_in_lines(models), breaks, compiles, has_children), *missing, of=process)
    if folder is None:
        return
    folder /= process.replace(" ", "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
        for number, model in enumerate(models):
            stem = f"{number}-{re.sub(r'[^A-Za-z0-9_.-]', '_', model.name)}"
            for graph, plan in enumerate(model.record.plans if model.record else ()):
                text = render(plan)
                (folder / f"{stem}-{graph}.txt").write_text(text, encoding="utf-8")
            module = model.module()
            if module is not None and is_converted(module):
                dump(module, folder / stem)
    except Exception as error:
        say(f"cannot write to {folder}: {error}")


def describe(model: Model) -> dict[str, Any]:
    """The figures of one model, operators and casts as often as they ran; or of several that were
    `alike`: sums, but for the loss scale, which is the lowest. One under which no optimizer ever
    stepped, as of averages or a teacher, is left out."""
    named = {
        "model": model.name,
        "spelled": model.spelled,
        "first_called_at": model.place,
        "alike": max(1, model.stands_for),
    }
    if model.record is None:
        return named | {"converted": False, "why": model.left_alone}
    ran = low = total = casts = moved = unsized = 0
    for graph, plan in enumerate(model.record.plans):
        runs = model.record.runs[graph]
        ran += runs if plan.facts or not plan.fallback else 0  # what is left to autocast has none
        low += runs * plan.operators_low
        total += runs * plan.operators
        casts += runs * len(plan.casts_inside)
        moved += runs * plan.cast_bytes
        unsized += runs * len(plan.unsized_casts)
    described = named | {
        "converted": any(plan.converts for plan in model.record.plans),
        "dtype": dtype_name(dtype_of(model.record.plans)) if model.record.plans else "",
        "graphs": len(model.record.plans),
        "runs": ran,
        "operators": total,
        "operators_low": low,
        "casts": casts,
        "cast_bytes": moved,
        "casts_of_unknown_size": unsized,
        "fallbacks": [
            why for plan in model.record.plans for why in (plan.otherwise, plan.uncompiled) if why
        ],
    }
    described["graph_breaks"] = each_once(model.record.breaks)
    if not described["converted"]:
        described["why"] = why_nothing_is_low(model.record.plans)
    if model.parts:
        described["parts"] = [*model.parts]
    scales = [scale for scale in model.scales() if scale.is_used]
    if scales:
        skipped = sum(scale.skips for scale in scales)
        lowest = min(scale.get_scale() for scale in scales)
        described |= {"loss_scale": lowest, "steps_skipped": skipped}
    return described


def _lines(
    models: Sequence[dict[str, Any]], breaks: Iterable[str], compiles: bool, has_children: bool
) -> Iterator[str]:
    told: set[str] = set()  # of breaks in code that models share
    if not models and has_children:
        yield f"nothing was converted here, because {_why_none(compiles)}; {OF_CHILDREN}"
    elif not any(m["converted"] for m in models):
        whys = "; ".join(f"{_name(m)}: {m['why']}" for m in models) or _why_none(compiles)
        is_well = models and all(m["why"] == BY_SCRIPT for m in models)
        nothing = "nothing was converted here" if is_well else "NOTHING WAS CONVERTED"
        yield f"{nothing}, because {whys}"
    else:  # what was left alone was told of when it was first called, and parts have own lines
        whole = (m for m in models if "graphs" in m and not m.get("parts"))
        tried = [m for m in whole if not m["converted"]]
        yield from (f"{_name(m)}: nothing was converted, because {m['why']}" for m in tried)
    for m in models:
        if not m["converted"]:
            continue
        if not m["runs"]:
            yield f"{_name(m)}: no captured graph ran"
        else:
            least = "at least " if m["casts_of_unknown_size"] else ""
            yield (
                f"{_name(m)}: {m['operators_low']} of {m['operators']} operators on "
                f"{m['dtype'].removeprefix('torch.')} tensors, {m['casts']} "
                f"{plural(m['casts'], 'cast')} moving {least}{byte_count(m['cast_bytes'])}, "
                f"in {m['runs']} {plural(m['runs'], 'run')} of "
                f"{m['graphs']} {plural(m['graphs'], 'graph')}"
            )
        for fallback, graphs in Counter(m["fallbacks"]).items():
            yield f"  {fallback}" + (f" ({graphs} graphs)" if graphs > 1 else "")
        if "loss_scale" in m:
            yield f"  {_scale(m)}"
        yield from (f"  graph break at {b}" for b in m["graph_breaks"] if b not in told)
        told.update(m["graph_breaks"])
    in_reasons = " ".join(m["why"] for m in models if not m["converted"])
    untold = (b for b in breaks if b not in told and b not in in_reasons)
    yield from (f"  graph break at {b}" for b in untold)


def _why_none(compiles: bool) -> str:
    why = (
        "no module with parameters was called in this process by nn.Module.__call__ "
        "outside of torch.func.grad and tracers"
    )
    return f"{why}, and what the script compiles is left as it is" if compiles else why


def _in_lines(models: Sequence[Model]) -> list[dict[str, Any]]:
    """Return the models as lines of the report.

    Models that are alike share a line, as layers that a script calls one by one; so do models of
    one name that were first called at one place, as in a search, if they are many. For models that
    were not converted the reason is enough. Models with the same name are told apart by what they
    print, if they are layers, or by where they were first called.
    """
    lines: list[dict[str, Any]] = []
    for described in map(describe, alike_together(models)):
        twin = next((m for m in lines if _is_told_with(m, described)), None)
        if twin is None:
            lines.append(described)
            continue
        twin["alike"] += described["alike"]
        if twin["spelled"] != described["spelled"]:
            twin["spelled"] = ""
    lines = _few(lines)
    return [m | {"model": _full_name(m, lines)} for m in lines]


def _few(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines with one in place of many of the same name and place, which has their
    sums."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for m in lines:
        kind = (m["model"], m["first_called_at"], m.get("dtype"), m.get("why"))
        groups.setdefault(kind, []).append(m)
    few: list[dict[str, Any]] = []
    for group in groups.values():
        few += group if len(group) <= FEW else [_summed(group)]
    return few


def _summed(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum up lines of converted models. Lines of models that were not converted are all the
    same."""
    sums = {key: sum(m[key] for m in models) for key in SUMS}
    scaled = [m for m in models if "loss_scale" in m]
    if scaled:
        sums["loss_scale"] = min(m["loss_scale"] for m in scaled)
        sums["steps_skipped"] = sum(m["steps_skipped"] for m in scaled)
    breaks = each_once([b for m in models for b in m["graph_breaks"]])
    fallbacks = [f for m in models for f in m["fallbacks"]]
    lists = {"graph_breaks": breaks, "fallbacks": fallbacks}
    return models[0] | sums | lists | {"spelled": "", "are_alike": False}


def _full_name(described: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    name, place = described["model"], described["first_called_at"]
    others = [m for m in lines if m["model"] == name and m is not described]
    if others and described["spelled"]:
        return str(described["spelled"])
    differs = any(m["first_called_at"] != place for m in others)
    return f"{name}, first called at {place}" if differs else str(name)


def _is_told_with(one: dict[str, Any], other: dict[str, Any]) -> bool:
    is_same = all(one.get(key) == other.get(key) for key in ("model", "why"))
    return is_same and not one["converted"]


def _scale(described: dict[str, Any]) -> str:
    scale, skipped = f"loss scale {described['loss_scale']:g}", described["steps_skipped"]
    steps = f"{skipped} {plural(skipped, 'step')} skipped"
    if described["alike"] > 1:
        return f"{scale} at the lowest, {steps} in all"
    return f"{scale}, {steps}"


def _name(described: dict[str, Any]) -> str:
    name, alike = described["model"], described["alike"]
    how = " alike" if described.get("are_alike", True) else ", not all alike"
    return f"{name} ({alike}{how})" if alike > 1 else str(name)
