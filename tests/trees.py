"""Nested results, compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


def assert_alike(ours: Any, theirs: Any) -> None:
    """The same containers, with numbers and tensors as near as in a low precision."""
    leaves, structure = tree_flatten(ours)
    expected, expected_structure = tree_flatten(theirs)
    assert structure == expected_structure
    for found, leaf in zip(leaves, expected, strict=True):
        if isinstance(leaf, Tensor | float):
            torch.testing.assert_close(found, leaf, rtol=0.05, atol=0.05)
        else:
            assert found == leaf
