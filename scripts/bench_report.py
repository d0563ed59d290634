"""The results of the benchmark as a table and as a plot."""

from __future__ import annotations

import statistics
from typing import Any

from jinja2 import Environment
from rich.table import Table

# Compiled variants are set beside compiled ones.
BASES = ("float32", "autocast", "pure low")

PLOT = Environment(autoescape=True).from_string("""\
<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{{ height }}" font-family="sans-serif"
     font-size="12">
<rect width="100%" height="100%" fill="white"/>
<text x="10" y="20" font-size="14">{{ title }}</text>
{% for x, label in ticks %}
<path d="M{{ x }} 32V{{ height - 24 }}" stroke="{{ "#888" if label == "1.0" else "#ddd" }}"/>
<text x="{{ x }}" y="{{ height - 8 }}" text-anchor="middle">{{ label }}</text>
{% endfor %}
{% for row in rows %}
<text x="10" y="{{ row.y + 4 }}" font-weight="bold">{{ row.model }}</text>
<text x="300" y="{{ row.y + 4 }}" text-anchor="end">{{ row.variant }}</text>
<path d="M{{ row.low }} {{ row.y }}H{{ row.high }}" stroke="{{ row.color }}" stroke-width="3"/>
<circle cx="{{ row.middle }}" cy="{{ row.y }}" r="4" fill="{{ row.color }}"/>
{% endfor %}
</svg>
""")


def quartiles(seconds: dict[str, list[float]], variant: str, base: str) -> list[float] | None:
    """Quartiles of the ratios of two variants' times within one turn."""
    if variant not in seconds or base not in seconds:
        return None
    ratios = [a / b for a, b in zip(seconds[variant], seconds[base], strict=True)]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3


def is_compiled(variant: str) -> bool:
    return variant.endswith((" compiled", " inductor"))


def base_of(variant: str, base: str) -> str:
    return f"{base} compiled" if is_compiled(variant) else base


def _error(found: float | None) -> str:
    return "–" if found is None else f"{100 * found:.3f}"


def step_table(results: list[dict[str, Any]]) -> Table:
    counted = ("operators", "casts", "cast MiB", "host reads", "saved MiB", "peak MiB")
    columns = ("model", "variant", "ms", *(f"/ {b}" for b in BASES), "grad. error %", *counted)
    shown = Table(*columns, title="one training step; compiled variants / compiled ones")
    for result in results:
        seconds = result["seconds"]
        for variant, times in seconds.items():
            shown.add_row(
                result["model"] if variant == "float32" else "",
                variant,
                f"{statistics.median(times) * 1e3:.1f}",
                *(_ratio(quartiles(seconds, variant, base_of(variant, b))) for b in BASES),
                _error(result["gradient_error"][variant]),
                *_counts(result["counters"][variant], is_compiled(variant)),
            )
        shown.add_section()
    return shown


def first_call_table(results: list[dict[str, Any]]) -> Table:
    shown = Table(
        "model", "variant", "first call s", "capture s", "pass s", "compile s", "pass / capture"
    )
    for result in results:
        for variant, found in result["first_call"].items():
            if not found["capture"]:
                continue
            ratio = found["rewrite"] / found["capture"] if found["rewrite"] else None
            shown.add_row(
                result["model"],
                variant,
                *(f"{found[k]:.2f}" for k in ("total", "capture", "rewrite", "compile")),
                "" if ratio is None else f"{ratio:.2f}",
            )
        shown.add_section()
    return shown


def _counts(c: dict[str, int], compiled: bool) -> list[str]:
    seen = [str(c["operators"]), str(c["casts"]), _mib(c["cast_bytes"])]
    # A compiled graph does not show what it does.
    shown = ["", "", ""] if compiled or not c["operators"] else seen
    return [*shown, str(c["host_reads"]), _mib(c["saved_bytes"]), _mib(c["peak_bytes"])]


def _ratio(found: list[float] | None) -> str:
    if found is None:
        return ""
    low, middle, high = found
    return f"{middle:.2f} [dim]({low:.2f}-{high:.2f})[/dim]"


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


def plot(results: list[dict[str, Any]], title: str) -> str:
    """An SVG of times relative to autocast (compiled: to compiled autocast)."""
    rows, y = [], 44
    for result in results:
        name = result["model"]
        for variant in result["seconds"]:
            found = quartiles(result["seconds"], variant, base_of(variant, "autocast"))
            if found is None or variant in ("autocast", "autocast compiled"):
                continue
            low, middle, high = (_x(ratio) for ratio in found)
            color = "#c03" if variant.startswith("amp_graph") else "#678"
            rows.append(
                {"model": name, "variant": variant, "y": y, "low": low, "middle": middle,
                 "high": high, "color": color}
            )  # fmt: skip
            name, y = "", y + 18
        y += 8
    ticks = [(_x(t / 4), f"{t / 4:.2f}" if t % 4 else f"{t / 4:.1f}") for t in range(10)]
    return PLOT.render(rows=rows, ticks=ticks, height=y + 20, title=title)


def _x(ratio: float) -> float:
    return round(320 + 180 * min(ratio, 2.3), 1)
