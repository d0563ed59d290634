"""With a PyTorch that is newer than any that was tried, what does not fit is left out."""

from __future__ import annotations

import pytest
from running import python, run

WITHOUT_A_NAME = """
import sys
import torch
from torch.torch_version import TorchVersion

sys.modules["amp_graph.dynamo_changes.powers"] = None  # raises ImportError
torch.__version__ = TorchVersion("{version}")

import amp_graph

model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
model, optimizer = amp_graph.convert(
    model, torch.optim.SGD(model.parameters(), 0.1), policy="bfloat16"
)
for _ in range(2):
    model(x).sum().backward()
    optimizer.step()
(plan,) = amp_graph.plans(model)
print(plan.has_low, plan.fallback)
"""


@pytest.mark.parametrize("version", ["2.99", "2.16.0.dev20300101+cpu"])
def test_changes_that_do_not_fit_are_left_out_with_a_warning(version: str) -> None:
    ran = run(python("-c", WITHOUT_A_NAME.format(version=version)))
    assert ran.code == 0, ran.err
    assert ran.out.split() == ["True", "None"]
    (told,) = [line for line in ran.err.splitlines() if "ConversionWarning" in line]
    assert told.startswith("<string>:")
    assert f"torch {version} is newer than 2.15" in told and "powers" in told


@pytest.mark.parametrize("version", ["2.11.0", "2.15.1"])
def test_with_one_that_was_tried_that_is_a_fault(version: str) -> None:
    ran = run(python("-c", WITHOUT_A_NAME.format(version=version)))
    assert ran.code == 1 and "Error: " in ran.err.splitlines()[-1]
