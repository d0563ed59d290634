"""The parameters that are a model's own."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amp_graph.weak_references import are_still

LISTS = 16  # of parameters, about which answers are kept


class OwnedParameters:
    """The parameters that a model has, and those of others that its graphs read as such.

    of_model: the method that returns those that it has; it is held weakly.
    """

    def __init__(self, of_model: Callable[[], Iterable[Tensor]]):
        self._of_model = weakref.WeakMethod(of_model)
        self._entered = WeakTensorKeyDictionary()  # those that graphs read
        self._known: dict[tuple[int, ...], _Owned] = {}

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Take note that graphs read these."""
        self._known.clear()
        self._entered.update(dict.fromkeys(parameters))

    def among(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the own ones among some parameters. The answers are kept until they change."""
        given = list(parameters)
        asked = tuple(map(id, given))
        found = self._known.get(asked)
        if found is None or not found.is_for(given):
            if len(self._known) >= LISTS:
                self._known.clear()
            all_own = {id(p) for p in self._all()}
            are_own = [id(p) in all_own or p in self._entered for p in given]
            found = self._known[asked] = _Owned([*map(weakref.ref, given)], are_own)
        return list(itertools.compress(given, found.are_own))

    def are_trained(self) -> bool:
        """Whether any parameter that the model has is trained."""
        return any(p.requires_grad for p in self._all())

    def _all(self) -> Iterable[Tensor]:
        of_model = self._of_model()
        return () if of_model is None else of_model()


@dataclass(frozen=True)
class _Owned:
    """The answer for one list of parameters: which of them are a model's own."""

    parameters: list[weakref.ref[Tensor]]
    are_own: list[bool]

    def is_for(self, given: Sequence[Tensor]) -> bool:
        return are_still(self.parameters, given)
