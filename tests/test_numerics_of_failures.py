"""A graph that fails in low precision is compared as it was captured, from where it began."""

from __future__ import annotations

import torch
from torch import nn

import amp_graph


@torch.library.custom_op("choosy::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """It has no kernel in low precision, of which fake tensors know nothing."""
    if x.dtype is not torch.float32:
        raise NotImplementedError(f"not for {x.dtype}")
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: gradient * 2)


class Counting(nn.Module):
    """Writes into a buffer in front of such an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return twice(self.layer(x) * self.count)


def test_a_graph_that_fails_is_compared_as_captured() -> None:
    policy = amp_graph.Policy(
        "bfloat16", overrides=(amp_graph.Override("allow", op="choosy.twice"),)
    )
    found = amp_graph.compare(Counting(), torch.randn(4, 8), policy=policy)
    assert found.outputs == 0 and all(node.forward.error == 0 for node in found.nodes)
    (fallback,) = found.fallbacks
    assert fallback == ("graph 0: runs as captured: NotImplementedError: not for torch.bfloat16")
