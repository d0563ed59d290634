"""The path of a parameter or buffer, of the name that Dynamo gave to the input that it is.

l_self_modules_head_modules_fc_parameters_weight_     head.fc.weight
"""

from __future__ import annotations

import re


def stored_path(name: str, reader: str) -> str | None:
    """The path in the model of what an input of this name stands for, read first by the module of
    the path `reader`; None if it is no parameter or buffer."""
    stored = re.search(r"^(\w*?)(_dict)?_(?:parameters|buffers)_(\w+?)_*$", name)
    if stored is None:
        return None
    chain = re.split(r"(?:_dict)?_modules_", stored[1])[1:]
    return ".".join([*_owner(reader, chain), stored[3]])


def _owner(reader: str, chain: list[str]) -> list[str]:
    """The path of the module whose parameter a module reads. `chain` is how Dynamo spells it, from
    the module on in which the graph begins, in snake case and without dots. Where it begins with an
    end of the reader's path, it is that module, or inside of it."""
    path = reader.split(".") if reader else []
    for begin in range(len(path)):
        end = _letters(path[begin:])
        for length in range(1, len(chain) + 1):
            if _letters(chain[:length]) == end:
                return path + chain[length:]
    return chain or path


def _letters(path: list[str]) -> str:
    return re.sub(r"[\W_]", "", "_modules_".join(path)).lower()
