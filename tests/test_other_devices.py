"""What holds on the CPU holds on a device of its own, with a thread of its own for backward passes.

The device is emulated (`emulated_device.py`) in a process of its own, in which tests of training
run that were written for the CPU.
"""

from __future__ import annotations

import os
import shutil

import pytest
from running import TESTS, python, run

FILES = [
    "gradients", "overflow", "backward_passes", "explicit_scaling", "input_views", "optimizer_use"
]  # fmt: skip
TWO_DEVICES = """
import os
import torch, emulated_device
from torch import nn
import amp_graph

class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).to(self.second.weight.device))

def losses(dtype, devices):
    torch.manual_seed(0)
    model = Split()
    model.first.to(devices[0]), model.second.to(devices[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if dtype:
        amp_graph.convert(model, optimizer, policy=dtype)
    x, y = torch.randn(16, 8).to(devices[0]), torch.randint(0, 4, (16,)).to(devices[1])
    found = []
    for step in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if step == 3 and dtype == "float16":
            model.first.weight.grad[0, 0] = float("inf")
            assert optimizer.step() is False
            continue
        if step != 3:
            optimizer.step()
        found.append(loss.item())
    if dtype:
        assert [plan.fallback for plan in amp_graph.plans(model)] == [None]
    return torch.tensor(found[:3] + found[-4:])

expected = losses(None, ["cpu", "cpu"])
for devices in (["emulated:0", "emulated:1"], ["emulated:1", "cpu"], ["cpu", "emulated:0"]):
    for dtype, bound in (("float16", 1e-3), ("bfloat16", 1e-2)):
        assert (losses(dtype, devices) - expected).abs().max() < bound, (devices, dtype)
assert emulated_device.ran_elsewhere() > 0
os._exit(0)  # a thread of backward passes may abort Python's own exit (pytorch issue 38228)
"""

MASK_ON_THE_CPU = """
import torch, emulated_device
from torch import nn
import amp_graph

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 2)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, x, tgt_mask=mask)

torch.manual_seed(0)
plain = Decoder().to("emulated")
model = amp_graph.convert(Decoder().to("emulated"), policy="float16")
model.load_state_dict(plain.state_dict())
for length in (5, 7, 8):
    x = torch.randn(2, length, 16).to("emulated")
    assert (model(x) - plain(x)).norm() < 0.002 * plain(x).norm()
assert [plan.fallback for plan in amp_graph.plans(model)] == [None, None], amp_graph.plans(model)
"""

STREAMS = """
import torch, emulated_device
from torch import nn
from test_kept_weights import refreshes
import amp_graph

model, x = nn.Linear(4, 4).to("emulated"), torch.randn(2, 4).to("emulated")
policy = amp_graph.Policy("float16", refresh_weights="on_change")
amp_graph.convert(model, policy=policy)
own, other = torch.accelerator.current_stream(), torch.Stream("emulated")
model(x)
found = []
for stream in (own, own, other, other, own):
    with stream:
        found.append(refreshes(lambda: model(x)))
assert found == [0, 0, 1, 0, 1], found
"""

pytestmark = pytest.mark.skipif(
    not (shutil.which("c++") and shutil.which("ninja")),
    reason="the device is built from C++, for which c++ and ninja have to be there",
)


def succeeds(*arguments: object) -> None:
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = run(python(*arguments), cwd=TESTS.parent, PYTHONPATH=paths)
    assert done.code == 0, done.out[-5000:] + done.err[-5000:]


def test_training_on_a_device_of_its_own() -> None:
    files = [TESTS / f"test_{name}.py" for name in FILES]
    succeeds("-m", "pytest", "-q", "-x", "-p", "emulated_device", "-p", "no:cacheprovider", *files)


def test_a_model_on_two_devices() -> None:
    succeeds("-c", TWO_DEVICES)


def test_a_mask_on_the_cpu_that_attention_is_not_to_read() -> None:
    """`nn.Transformer` sees that it is the causal one, and calls attention without."""
    succeeds("-c", MASK_ON_THE_CPU)


def test_kept_weights_are_written_anew_on_another_stream() -> None:
    succeeds("-c", STREAMS)
