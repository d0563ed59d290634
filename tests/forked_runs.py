"""Runs scripts in forks of this process, which has imported torch: the longest part of a short run.

Each line of the input asks for one, as JSON; its exit code is the answer.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

import torch  # noqa: F401


def next_request() -> dict[str, Any]:
    """In a fork of its own for each; the process itself ends with its input."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            request: dict[str, Any] = json.loads(line)
            return request
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


if __name__ == "__main__":
    request = next_request()
    os.chdir(request["cwd"])
    for number, file in enumerate((os.devnull, request["out"], request["err"])):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    sys.argv = request["arguments"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
