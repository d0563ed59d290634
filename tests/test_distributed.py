"""Processes under torchrun: gradients, skipped steps and scales agree between ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_training import BY_HAND, BY_METHOD, CHECKS, IN_FRONT, IN_PARTS, WAYS

SCRIPT = Path(__file__).with_name("distributed_training.py")


def assert_ranks_agree(dtype: str, backend: str, ranks: int = 2) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", f"{ranks}", str(SCRIPT), dtype, backend]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr[-6000:]
    for check in CHECKS:
        assert result.stdout.count(check) == ranks * len(WAYS), result.stdout
    for check in (BY_HAND, IN_FRONT, IN_PARTS, BY_METHOD):
        assert result.stdout.count(check) == ranks, result.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_ranks(dtype):
    assert_ranks_agree(dtype, "gloo")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_rank_on_nccl(dtype):
    """What one device can show: that every collective of ours is one that NCCL has."""
    assert_ranks_agree(dtype, "nccl", ranks=1)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_on_nccl():
    assert_ranks_agree("float16", "nccl")
