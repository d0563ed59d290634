"""What AMP_GRAPH_DUMP writes when a script ends."""

from __future__ import annotations

import json

import pytest
import torch
from nets import X, net
from torch import Tensor, nn

from amp_graph.autopatch.exit_report import write_report


class Raising(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        raise ValueError("never runs")


def test_the_dump_holds_the_report_and_every_graph(start, tmp_path, capsys):
    installation, model = start(COMPILER="eager"), net()
    model(X)
    model.eval()(X)
    with torch.no_grad():
        model(X)
    write_report(installation.models.seen, tmp_path / "new" / "folder")
    text = capsys.readouterr().err
    assert "amp_graph: Sequential: 9 of 9 operators on bfloat16 tensors, 6 casts moving" in text
    files = sorted(f.name for f in (tmp_path / "new" / "folder").iterdir())
    plans = [f"0-Sequential-{i}.txt" for i in range(len(files) - 2)]
    assert files == ["0-Sequential", *plans, "report.json"] and plans
    assert "aten.linear" in (tmp_path / "new" / "folder" / plans[0]).read_text()
    assert (tmp_path / "new" / "folder" / "0-Sequential" / "index.html").is_file()


def test_a_model_that_was_never_captured_hides_no_other(start, tmp_path, capsys):
    installation, first, second = start(), Raising(8, 8), net()
    with pytest.raises(ValueError, match="never runs"):
        first(X)
    second(X)
    write_report(installation.models.seen, tmp_path)
    assert "cannot write" not in capsys.readouterr().err
    assert len(json.loads((tmp_path / "report.json").read_text())["models"]) == 2
    assert (tmp_path / "1-Sequential" / "index.html").is_file()


def test_graphs_that_an_earlier_run_has_left_of_a_model_are_removed(start, tmp_path):
    installation, model = start(), net()
    for i in range(4):
        (tmp_path / f"0-Sequential-{i}.txt").write_text("of an earlier run")
    (tmp_path / "1-Other-0.txt").write_text("of another model")
    model(X)
    write_report(installation.models.seen, tmp_path)
    texts = {path.name for path in tmp_path.glob("*.txt")}
    assert texts == {"0-Sequential-0.txt", "1-Other-0.txt"}
    assert "aten.linear" in (tmp_path / "0-Sequential-0.txt").read_text()
