"""Two processes under torchrun: gradients, skipped steps and scales agree between ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("distributed_training.py")
WAYS = (
    "ddp around a converted model",
    "convert around ddp",
    "fsdp with converted blocks",
    "convert around fsdp",
)
CHECKS = ("gradients agree", "skipped together", "converted, one scale", "ranks agree")


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(SCRIPT), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks(way, dtype):
    output = run(way, dtype)
    for check in CHECKS:
        assert output.count(check) == 2, output


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_on_nccl(way):
    output = run(way, "float16", "nccl")
    for check in CHECKS:
        assert output.count(check) == 2, output
