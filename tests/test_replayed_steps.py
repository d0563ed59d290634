"""A whole training step that is captured once and then replayed without Python, as a CUDA graph.

Replays are emulated (tests/replaying.py): what must persist between them is the same. On a GPU
tests/test_cuda.py captures the real thing.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from replaying import Recording
from torch import nn

import amp_graph
from amp_graph import LossScale, Policy
from amp_graph.scaling import graph_scale

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WARM_UP, GROWTH_INTERVAL = 3, 2
OVERFLOWS = (False, True, False, False, True, True, False, False, False, False)


class Training:
    """Whole steps on one batch that stays where it is."""

    def __init__(self, scale: LossScale, clips: bool):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        policy = Policy("float16", loss_scale=scale)
        self.model, self.optimizer = amp_graph.convert(model, optimizer, policy=policy)
        self.x, self.y, self.clips = torch.randn(4, 4), torch.randn(4, 2), clips

    def step(self) -> None:
        F.mse_loss(self.model(self.x), self.y).backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> tuple[list[torch.Tensor], float, int]:
        scale = amp_graph.scale_of(self.model)
        parameters = [p.detach().clone() for p in self.model.parameters()]
        return parameters, scale.get_scale(), scale.skips


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_replays_go_on_as_steps_would(clips, hysteresis, monkeypatch) -> None:
    scale = LossScale(2.0**4, growth_interval=GROWTH_INTERVAL, hysteresis=hysteresis)
    stepped, replayed = Training(scale, clips), Training(scale, clips)
    for _ in range(WARM_UP):
        stepped.step(), replayed.step()
    with monkeypatch.context() as patch, Recording() as recording:
        patch.setattr(graph_scale, "is_captured", lambda device: True)
        replayed.step()
    stepped.step()
    batch = stepped.x.clone()
    scales = []
    for overflows in OVERFLOWS:
        for training in (stepped, replayed):
            training.x.copy_(batch * torch.inf if overflows else batch)
        stepped.step()
        recording.replay()
        (parameters, value, skips), expected = replayed.result(), stepped.result()
        torch.testing.assert_close(parameters, expected[0], rtol=0, atol=0)
        assert (value, skips) == expected[1:]
        scales.append(value)
    assert len(set(scales)) > 2 and skips == sum(OVERFLOWS)
