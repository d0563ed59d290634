"""Unmodified scripts in the styles people write, with and without AMP_GRAPH_ENABLE=1.

tests/scripts holds them. Each runs in float32, and again with the variable set while a dispatch
counter looks on (tests/hooks).
"""

from __future__ import annotations

import functools
import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from running import SCRIPTS, Run, python, run, run_plain

# Rounding to bfloat16 is off by 2**-9 at most. The loss of most scripts goes astray by less than
# that; it may by four times as much. Two differ by more: LBFGS (0.008), whose line of steps parts
# from float32's, and an LSTM trained to a small loss (0.018); another seed moves them by 0.4 and
# 0.1. So may a script of 40 steps of which the loss scale skipped one (0.008; 0.00004 with none).
TOLERANCE = 2**-7
WIDER = 5 * 2**-7
LOW_SHARE = 0.9


@dataclass(frozen=True)
class Script:
    """What is to come of one script.

    file, arguments: of its command line, if the file is not called as the script is.
    models: those in the report, in the order of their first calls.
    why: what the report says of a model that is left alone.
    uncaptured: casts that the report does not have: of the one call in which the script's own
        error was raised.
    """

    models: tuple[str, ...] = ("Sequential",)
    file: str = ""
    arguments: tuple[str, ...] = ()
    code: int = 0
    why: str = ""
    uncaptured: bool = False
    tolerance: float = TOLERANCE
    trains: bool = True
    has_folder: bool = False
    ranks: int = 0


EXPECTED = {
    "plain_loop": Script(),
    "functions_and_classes": Script(("Net",)),
    "gan": Script(("Sequential", "Sequential")),
    "two_optimizers": Script(("AutoEncoder", "Sequential")),  # its encoder by itself at the end
    "clip_and_accumulate": Script(("LanguageModel",)),
    "lbfgs_closure": Script(tolerance=WIDER),
    "scheduler": Script(("TwoHeads",)),
    "workers_fork": Script(file="workers", arguments=("fork",)),
    "workers_spawn": Script(file="workers", arguments=("spawn",)),
    "data_parallel": Script(),
    "ddp": Script(ranks=2),
    "hf_trainer": Script(("BertForSequenceClassification",), has_folder=True),
    "lightning_trainer": Script(),
    "accelerate_loop": Script(),
    "own_autocast": Script(why="the script uses torch.autocast"),
    "own_compile": Script(why="the script uses torch.compile"),
    "reinforce": Script(("Policy",)),
    "recurrent": Script(("CharacterModel",), tolerance=WIDER),
    "evaluate": Script(trains=False),
    "raises": Script(code=1, uncaptured=True),
    "exits": Script(("Bilinear",), code=3),
    "notebook": Script(("Net", "Net")),
    "executed": Script(("Net",)),
}


def command(name: str, script: Script, folder: Path) -> list[str]:
    file = SCRIPTS / f"{script.file or name}.py"
    if script.ranks:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", script.ranks)
        return python(*launcher, file)
    return python(file, folder) if script.has_folder else python(file, *script.arguments)


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory):
    """Runs a script as it is, once."""

    @functools.cache
    def reference(name: str) -> Run:
        folder = tmp_path_factory.mktemp(name)
        return run_plain(command(name, EXPECTED[name], folder), folder)

    return reference


def check(name: str, low: Run, high: Run) -> None:
    """What must hold of a script in mixed precision."""
    script = EXPECTED[name]
    skipped = any(m.get("steps_skipped") for m in low.report["models"])
    tolerance = WIDER if skipped else script.tolerance
    assert high.code == script.code, high.err
    assert not high.said
    assert low.code == script.code, low.err
    assert low.words == high.words
    assert low.final_loss == pytest.approx(high.final_loss, rel=tolerance)
    assert tuple(m["model"] for m in low.report["models"]) == script.models
    for model in low.report["models"]:
        place = r"(, first called at \S+:\d+)?" if len(script.models) > 1 else ""
        told = re.compile(rf"amp_graph: {model['model']}{place}( \(\d+ alike\))?: ")
        assert any(map(told.match, low.said)) or script.why
    if script.why:
        check_left_alone(script, low, high)
    else:
        check_figures(script, low)


def check_left_alone(script: Script, low: Run, high: Run) -> None:
    assert low.final_loss == high.final_loss
    assert [m["why"] for m in low.report["models"]] == [script.why]
    assert [line for line in low.said if "NOTHING WAS CONVERTED" in line and script.why in line]
    assert len([line for line in low.said if "is left as it is" in line]) == 1


def check_figures(script: Script, low: Run) -> None:
    counts, models = low.counts, low.report["models"]
    assert all(m["converted"] for m in models)
    assert counts["forward_low"] >= LOW_SHARE * counts["forward"] > 0
    assert counts["backward_low"] >= LOW_SHARE * counts["backward"]
    assert (counts["backward"] > 0) == script.trains
    assert not any(m["fallbacks"] for m in models)
    if not script.uncaptured:
        assert counts["casts"] > 0
        for figure in ("casts", "cast_bytes", "operators", "operators_low"):
            assert sum(m[figure] for m in models) == counts[figure], figure


@pytest.mark.parametrize("name", EXPECTED)
def test_a_script_runs_in_mixed_precision_or_as_before(name, in_float32, tmp_path):
    of_script = command(name, EXPECTED[name], tmp_path)
    low = run(of_script, tmp_path / "dump", cwd=tmp_path, AMP_GRAPH_ENABLE="1")
    check(name, low, in_float32(name))


@pytest.mark.parametrize(
    ("name", "scale", "skips"),
    [
        ("lbfgs_closure", "dynamic", 0),
        ("two_optimizers", "dynamic", 0),
        ("scheduler", "dynamic", 1),  # the first scale, 2**16, is too high for its first gradients
        ("scheduler", "1024", 0),
    ],
)
def test_a_script_trains_in_float16_with_its_gradients_scaled(
    name, scale, skips, in_float32, tmp_path
):
    low = run(
        command(name, EXPECTED[name], tmp_path),
        tmp_path / "dump",
        cwd=tmp_path,
        AMP_GRAPH_ENABLE="1",
        AMP_GRAPH_DTYPE="float16",
        AMP_GRAPH_LOSS_SCALE=scale,
    )
    check(name, low, in_float32(name))
    model = low.report["models"][0]
    assert model["dtype"] == "float16"
    assert model["steps_skipped"] == skips
    first = 2.0**16 if scale == "dynamic" else float(scale)
    assert model["loss_scale"] == first / 2**skips


def test_each_spawned_rank_reports_by_itself(tmp_path):
    file, dump = SCRIPTS / "spawned_ranks.py", tmp_path / "dump"
    for folder in ("high", "low"):  # of the file by which ranks find each other
        (tmp_path / folder).mkdir()
    high = run_plain(python(file, tmp_path / "high"), tmp_path)
    low = run(python(file, tmp_path / "low"), dump, AMP_GRAPH_ENABLE="1")
    assert high.code == low.code == 0, low.err
    assert low.words == high.words
    assert low.final_loss == pytest.approx(high.final_loss, rel=TOLERANCE)
    assert sorted(line.partition(" operators")[0] for line in low.said) == [
        "amp_graph: nothing was converted here, because no module with parameters was called in "
        "this process by nn.Module.__call__ outside of torch.func, vmap and tracers; the processes "
        "that it started tell of theirs, if they called any",
        "amp_graph: rank 0: Sequential: 75 of 75",
        "amp_graph: rank 1: Sequential: 72 of 72",
    ]
    for rank, runs in enumerate((25, 24)):  # rank 0 also evaluates
        (model,) = json.loads((dump / f"rank{rank}" / "report.json").read_text())["models"]
        assert (model["model"], model["converted"], model["runs"]) == ("Sequential", True, runs)


def killed_and_resumed(run: Callable[..., Run], folder: Path, dump: Path | None = None) -> Run:
    command = python(SCRIPTS / "resume.py", folder / "checkpoint.pt")
    killed = run(command, cwd=folder)
    assert killed.code == -signal.SIGKILL and killed.out == "killed\n" and not killed.said
    resumed = run(command, cwd=folder, **({"folder": dump} if dump else {}))
    assert resumed.code == 0, resumed.err
    assert resumed.out.startswith("resumed at step 12\n")
    return resumed


@pytest.fixture(scope="module")
def resumed_in_float32(tmp_path_factory):
    return killed_and_resumed(run_plain, tmp_path_factory.mktemp("resume"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_killed_script_goes_on_from_its_checkpoint(dtype, tmp_path, resumed_in_float32):
    mixed = functools.partial(run, AMP_GRAPH_ENABLE="1", AMP_GRAPH_DTYPE=dtype)
    resumed = killed_and_resumed(mixed, tmp_path, tmp_path / "dump")
    assert resumed.final_loss == pytest.approx(resumed_in_float32.final_loss, rel=TOLERANCE)
    check_figures(Script(), resumed)
