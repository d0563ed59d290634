"""Fixtures that several test files share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def whole_models() -> Iterator[None]:
    """For tests that capture whole models: nothing of the model before is left in Dynamo or in
    memory, and one thread, so that several workers do not get in each other's way."""
    threads = torch.get_num_threads()
    torch._dynamo.reset()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    gc.collect()
