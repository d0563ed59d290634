"""The ways in which a model is captured: one after another, where capture fails."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from amp_graph.capture import dynamo
from amp_graph.modules import Run
from amp_graph.outer_autocast import without_autocast


class Settings(Enum):
    """Dynamo's settings, other than usual, in the order in which they are tried."""

    AS_USUAL = MappingProxyType[str, bool]({})
    BREAK_AT_DATA = dynamo.BREAK_AT_DATA
    EACH_SIZE_APART = dynamo.EACH_SIZE_APART


class Way(NamedTuple):
    """How a model is captured. `around`: what is put around a run."""

    settings: Settings
    around: Callable[[Run], Run]

    def untried(self, is_first: bool, settings_may_help: bool) -> Way | None:
        """The next one, in which capture may fail no more. In a first call all sizes are known."""
        if settings_may_help and self.settings is Settings.AS_USUAL:
            return self._replace(settings=Settings.BREAK_AT_DATA)
        if settings_may_help and self.settings is Settings.BREAK_AT_DATA and not is_first:
            return self._replace(settings=Settings.EACH_SIZE_APART)
        return None if self.around is without_autocast else PLAINLY


PLAINLY = Way(Settings.AS_USUAL, without_autocast)
