"""Processes whose plain gradients are parts of a whole: they skip steps together."""

import os
import subprocess
import sys
from pathlib import Path

from distributed_fsdp1 import NO_PART, TOLD, WAYS

SCRIPT = Path(__file__).with_name("distributed_fsdp1.py")


def test_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr[-6000:]
    for way in WAYS:
        assert result.stdout.count(f"{way}: skipped together") == 2, result.stdout
    for check in (NO_PART, TOLD):
        assert result.stdout.count(check) == 2, result.stdout
