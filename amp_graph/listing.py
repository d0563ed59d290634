"""One group of a list file, checked.

[softmax]
why = "Exponentials and their sum need the range of float32."
storage = "balanced"
ops = ["aten.softmax"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch

from amp_graph.dtypes import LOW_DTYPES, dtype_name
from amp_graph.errors import ListError, did_you_mean
from amp_graph.ir import Color
from amp_graph.levels import LEVELS, Level
from amp_graph.outer_autocast import autocast_devices

T = TypeVar("T")

OTHER_DEVICES = "other"


@dataclass(frozen=True)
class Listing:
    """Why an operator has its colour, and what else the group says of it.

    bounded: the result is bounded whatever the input, so deny does not spread to its readers.
    storage: the kernel computes in float32 on low-precision tensors, and from this level on they
        may be low; a level for each kind of device, or low precision.
    widens: asked for `dtype=float32`, the kernel reads low-precision tensors as well.
    promotes: operands of several dtypes may meet; a 0-dimensional one does not widen the result.
    orders: which elements come out depends on the last digits, so that what it reads is not rounded
        for storage.
    saturates: the result comes so close to a bound that low precision has no number in between.
    reads_phase: of a large operand the last digits alone matter, so that few coordinates are not
        multiplied in low precision for it.
    exact: the result holds only numbers that every precision has, such as zeros.
    own_gradients: backward makes the gradient of a parameter in memory of its own, so that it may
        be unscaled there.
    low_args: only these arguments may be low, the others stay float32; by kind of device.
    metadata_args: arguments of which only shape, type and device are read.
    position_args: arguments that say where something is, in pixels, say, and are not rounded.
    said: the keys of the group, among them `optional`: what is not in this version of torch, or in
        a library that was not imported, is passed over.
    """

    color: Color
    group: str
    why: str
    file: str
    bounded: bool = False
    storage: Mapping[str, Level] = field(default_factory=dict)
    widens: bool = False
    promotes: bool = False
    orders: bool = False
    saturates: bool = False
    reads_phase: bool = False
    exact: bool = False
    own_gradients: bool = False
    low_args: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metadata_args: tuple[str, ...] = ()
    position_args: tuple[str, ...] = ()
    said: frozenset[str] = frozenset()

    def storage_on(self, device_type: str, dtype: torch.dtype) -> Level | None:
        """Return the level from which on the operator's tensors may be in a low precision on such a
        device."""
        return self.storage.get(dtype_name(dtype)) or _on(device_type, self.storage)

    def computes_on(self, argument: str, device_type: str) -> bool:
        """Whether the operator's arithmetic takes this argument in the precision it runs in."""
        low_args = _on(device_type, self.low_args)
        if low_args is not None:
            return argument in low_args
        return argument not in self.metadata_args

    def arguments(self) -> list[str]:
        """The arguments that the listing names."""
        low = (name for names in self.low_args.values() for name in names)
        return [*dict.fromkeys((*low, *self.metadata_args, *self.position_args))]

    def knowing(self, shipped: Listing) -> Listing:
        """Return this listing, a user's, completed by what the shipped one knows of the operator.
        Whether the operator's tensors may be low is left to the user."""
        known = KNOWN if self.color is Color.DENY else KNOWN - DENY_ONLY
        return replace(self, **{k: getattr(shipped, k) for k in known - self.said})


FLAGS = (*(f.name for f in fields(Listing) if f.type == "bool"), "optional")
LISTS = ("ops", "metadata_args", "position_args")
KEYS: dict[str, tuple[type, ...]] = {
    "why": (str,),
    "storage": (str, dict),
    "low_args": (list, dict),
    **dict.fromkeys(FLAGS, (bool,)),
    **dict.fromkeys(LISTS, (list,)),
}
DENY_ONLY = frozenset({"bounded", "widens", "storage"})
NOT_IN_LISTING = frozenset({"ops", "optional", "storage", "low_args"})
NOT_INHERITED = frozenset({"color", "group", "why", "file", "bounded", "storage", "said"})
KNOWN = frozenset(f.name for f in fields(Listing)) - NOT_INHERITED


def _on(device_type: str, by_device: Mapping[str, T]) -> T | None:
    return by_device.get(device_type, by_device.get(OTHER_DEVICES))


def check_group(table: Any, color: Color, group: str, file: str, where: str) -> Listing:
    """Return the listing that a group's operators share. Raises ListError for a group that makes no
    sense."""
    if not isinstance(table, Mapping):
        raise ListError(f"{where}: a group is a table with `why` and `ops`, not {table!r}.")
    for key, value in table.items():
        _check_key(key, value, color, where)
    if not table.get("why"):
        raise ListError(f"{where}: 'why' is missing. Give the reason in one sentence.")
    if not table.get("ops"):
        raise ListError(f"{where}: 'ops' is missing. List operators, as in [\"aten.gelu\"].")
    given = {key: value for key, value in table.items() if key not in NOT_IN_LISTING}
    given |= {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
    storage = {d: _level(level, where) for d, level in _by_device(table.get("storage")).items()}
    low_args = {d: tuple(names) for d, names in _by_device(table.get("low_args")).items()}
    given |= {"storage": storage, "low_args": low_args, "said": frozenset(table)}
    return Listing(color, group, file=file, **given)


def _by_device(value: Any) -> Mapping[str, Any]:
    """Return a table `{cpu = ..., other = ...}` as it is, and one value for all devices as
    `other`."""
    if value is None or isinstance(value, Mapping):
        return value or {}
    return {OTHER_DEVICES: value}


def _level(name: Any, where: str) -> Level:
    if name not in LEVELS:
        raise ListError(f"{where}: storage is a level, {', '.join(LEVELS)}, not {name!r}.")
    return LEVELS[name]


def _check_key(key: str, value: Any, color: Color, where: str) -> None:
    if key not in KEYS:
        raise ListError(f"{where}: unknown key {key!r}.{did_you_mean(key, KEYS)}")
    _check_kind(repr(key), value, KEYS[key], where)
    if isinstance(value, dict):
        _check_devices(key, value, where)
    if key in DENY_ONLY and color is not Color.DENY:
        raise ListError(f"{where}: {key!r} means something on the deny list only; remove it.")


def _check_kind(key: str, value: Any, kinds: tuple[type, ...], where: str) -> None:
    if not isinstance(value, kinds):
        wanted = " or ".join("table" if k is dict else k.__name__ for k in kinds)
        raise ListError(f"{where}: {key} must be a {wanted}, not {value!r}.")
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise ListError(f"{where}: {key} must hold strings only, not {value!r}.")


def _check_devices(key: str, value: Mapping[str, Any], where: str) -> None:
    """Check that a table names kinds of devices and, for `storage`, low precisions."""
    dtypes = [*LOW_DTYPES] if key == "storage" else []
    of_one = tuple(kind for kind in KEYS[key] if kind is not dict)
    for name, own in value.items():
        if name not in (OTHER_DEVICES, *dtypes) and not _is_device_type(name):
            hint = did_you_mean(name, (OTHER_DEVICES, *dtypes, *autocast_devices()))
            kinds = "type of device, low precision" if dtypes else "type of device"
            raise ListError(f"{where}: {key!r} has {name!r}, which is no {kinds} or 'other'.{hint}")
        _check_kind(f"{key!r} for {name!r}", own, of_one, where)


def _is_device_type(name: str) -> bool:
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False
