"""As a plugin of pytest: CUDA is the default device, so that tests written for the CPU run there.

    PYTHONPATH=tests python -m pytest -p on_cuda tests/test_gradients.py

Tests that expect the CPU's default precision, bfloat16, or put tensors on the CPU fail there.
"""

from __future__ import annotations

import torch


class Generator(torch.Generator):
    """On the default device if none is named."""

    def __new__(cls, device: str = "cuda") -> Generator:
        return super().__new__(cls, device)


torch.Generator = Generator  # type: ignore[misc]
torch.set_default_device("cuda")


def pytest_runtest_setup() -> None:
    """A test before may have set another."""
    torch.set_default_device("cuda")
