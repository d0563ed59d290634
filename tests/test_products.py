"""The terms of matrix products, against what their elements are made of; and places that move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import W, X, run
from torch import Tensor

from amp_graph import Policy
from amp_graph.capture.retrace import trace
from amp_graph.graphs.products import terms_of

SPELLED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "mm": (torch.mm, (5, 3), (3, 7)),
    "matmul of a vector": (torch.matmul, (3,), (3, 7)),
    "matmul by a vector": (torch.matmul, (2, 5, 3), (3,)),
    "matmul of a batch by one matrix": (torch.matmul, (2, 5, 3), (3, 7)),
    "matmul of one matrix by a batch": (torch.matmul, (5, 3), (4, 3, 6)),
    "matmul of batches": (torch.matmul, (2, 1, 5, 3), (4, 3, 7)),
    "bmm": (torch.bmm, (2, 5, 3), (2, 3, 7)),
    "linear": (torch.nn.functional.linear, (2, 5, 3), (7, 3)),
    "addmm": (lambda a, b: torch.addmm(torch.zeros(7), a, b), (5, 3), (3, 7)),
    "baddbmm": (lambda a, b: torch.baddbmm(torch.zeros(7), a, b), (2, 5, 3), (2, 3, 7)),
    "einsum": (lambda a, b: torch.einsum("bnj,bji->bni", a, b), (2, 5, 3), (2, 3, 7)),
    "einsum without a result": (lambda a, b: torch.einsum("nj, ij", a, b), (5, 3), (7, 3)),
    "einsum with dots": (lambda a, b: torch.einsum("...j,ij->...i", a, b), (2, 5, 3), (7, 3)),
    "einsum of attention": (
        lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b),
        (2, 5, 4, 3),
        (2, 6, 4, 3),
    ),
    "einsum that expands": (
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        (2, 5, 1),
        (1, 3, 7),
    ),
    "einsum over two": (lambda a, b: torch.einsum("bij,bij->b", a, b), (2, 3, 4), (2, 3, 4)),
}


@pytest.mark.parametrize("name", SPELLED)
def test_terms_are_as_many_as_ones_add_up_to(name: str) -> None:
    function, *shapes = SPELLED[name]
    a, b = (torch.ones(shape) for shape in shapes)
    found = [terms_of(node) for node in trace(function, (a, b)).graph.nodes]
    (terms,) = (terms for terms in found if terms is not None)
    assert terms == function(a, b).flatten()[0]


def test_a_size_that_is_not_known_is_not_few() -> None:
    def squares(x: Tensor) -> Tensor:
        return x.nonzero().float().t() @ x.nonzero().float()

    found = [terms_of(node) for node in trace(squares, (torch.ones(3, 2),)).graph.nodes]
    assert max(terms for terms in found if terms is not None) > 1000


@pytest.mark.parametrize(
    "move",
    [
        lambda p, r: p @ r,
        lambda p, r: torch.einsum("nj,ji->ni", p, r),
        lambda p, r: torch.addmm(p, p, r),
        lambda p, r: torch.baddbmm(p[None], p[None], r[None])[0],
    ],
    ids=["matmul", "einsum", "addmm", "baddbmm"],
)
def test_places_that_are_rotated_are_not_rounded(move: Callable[[Tensor, Tensor], Tensor]) -> None:
    def function(x: Tensor, w: Tensor, places: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        c, s = angle.cos(), angle.sin()
        return x @ w, move(places, torch.stack([c, -s, s, c]).view(2, 2))

    given = X, W, torch.rand(50, 2) * 1000, torch.tensor(0.3)
    result = run(function, *given, policy=Policy("bfloat16"))
    torch.testing.assert_close(result(*given)[1], function(*given)[1], rtol=1e-5, atol=1e-3)
