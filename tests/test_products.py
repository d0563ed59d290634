"""The sizes of matrix products, against what their elements are made of; and places that move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import W, X, run
from torch import Tensor

from amp_graph import Policy
from amp_graph.capture.products import product_of
from amp_graph.capture.retrace import trace
from amp_graph.ir import Product

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
def test_sizes_are_those_by_which_the_elements_are_made(name: str) -> None:
    function, *shapes = SPELLED[name]
    a, b = (torch.ones(shape) for shape in shapes)
    (product,) = filter(None, map(product_of, trace(function, (a, b)).graph.nodes))
    made = function(a, b)
    changed = []
    for one, other, make in ((a, b, function), (b, a, lambda b, a: function(a, b))):
        moved = one.clone()
        moved.view(-1)[0] += 1
        changed.append(int((make(moved, other) != made).sum()))
    assert product == Product(terms=int(made.flatten()[0]), width=min(changed))


def test_sizes_that_are_not_known_are_not_few() -> None:
    def flat(x: Tensor) -> Tensor:
        return x.nonzero().float() @ x.nonzero().float().t()

    (product,) = filter(None, map(product_of, trace(flat, (torch.ones(3, 2),)).graph.nodes))
    assert product.terms == 2 and product.width > 1000


@pytest.mark.parametrize(
    "move",
    [
        lambda p, r: p @ r,
        lambda p, r: torch.einsum("nj,ji->ni", p, r),
        lambda p, r: torch.addmm(p, p, r),
        lambda p, r: torch.baddbmm(p[None], p[None], r[None])[0],
        lambda p, r: (r @ p.t()).t(),
    ],
    ids=["matmul", "einsum", "addmm", "baddbmm", "in columns"],
)
def test_places_that_are_rotated_are_not_rounded(move: Callable[[Tensor, Tensor], Tensor]) -> None:
    def function(x: Tensor, w: Tensor, places: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        c, s = angle.cos(), angle.sin()
        return x @ w, move(places, torch.stack([c, -s, s, c]).view(2, 2))

    given = X, W, torch.rand(50, 2) * 1000, torch.tensor(0.3)
    result = run(function, *given, policy=Policy("bfloat16"))
    torch.testing.assert_close(result(*given)[1], function(*given)[1], rtol=1e-5, atol=1e-3)
