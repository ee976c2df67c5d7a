"""State as plain values, so that a checkpoint can be read without running any code that it names.

A `state_dict` holds tensors, numbers, strings, None, lists and dicts only, so ``torch.load(..., weights_only=True)``
reads it. `pack` turns what a rule keeps (dataclasses, tuples, sets, deques of tensors and numbers) into such values and
`unpack` makes it again, with classes from a closed table. Tensors are not copied. A caller that keeps a state while
training goes on must copy it first.
"""

from __future__ import annotations

import array
import collections
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

Plain = Any
"""Tensors, numbers, strings, None, and lists and dicts of them."""

_SEQUENCES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}


def pack(value: Any) -> Plain:
    """Plain values that hold all of `value`.

    >>> pack({"workers": (0, 2), "weight": 0.5})
    ['dict', [['workers', ['tuple', [0, 2]]], ['weight', 0.5]]]

    Raises:
        TypeError: for what has no state that could be kept, such as a function.
    """
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return value
    kind = type(value).__name__
    if type(value) in _SEQUENCES.values():
        items = sorted(value) if kind in ("set", "frozenset") else value
        return [kind, [pack(item) for item in items]]
    if isinstance(value, Mapping):
        return ["dict", [[pack(key), pack(item)] for key, item in value.items()]]
    if isinstance(value, np.ndarray):
        return ["ndarray", torch.from_numpy(value)]
    if isinstance(value, array.array):
        return ["array", value.typecode, torch.tensor(value.tolist(), dtype=torch.int64)]
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    if isinstance(value, tuple):  # a named one
        return ["named", name, [pack(item) for item in value]]
    if isinstance(value, msgspec.Struct):
        return ["named", name, [pack(item) for item in msgspec.structs.astuple(value)]]
    if callable(value) or not hasattr(value, "__dict__"):
        raise TypeError(f"{name} has no state that could be kept in a checkpoint")
    return ["object", name, [[field, pack(item)] for field, item in vars(value).items()]]


def unpack(plain: Plain, classes: Mapping[str, type]) -> Any:
    """The value that was packed.

    Args:
        classes: by ``module:name``, what objects may be of; see `classes_in`.

    Raises:
        ValueError: for anything that `pack` does not write, and for other classes.
    """
    if not isinstance(plain, list):
        return plain
    kind, *rest = plain
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](unpack(item, classes) for item in rest[0])
    if kind == "dict":
        return {unpack(key, classes): unpack(item, classes) for key, item in rest[0]}
    if kind == "ndarray":
        return rest[0].cpu().numpy().copy()
    if kind == "array":
        return array.array(rest[0], rest[1].tolist())
    if kind not in ("named", "object") or rest[0] not in classes:
        raise ValueError(f"a state holds {kind} {rest[0] if rest else ''}, which is not known here")
    if kind == "named":
        return classes[rest[0]](*[unpack(item, classes) for item in rest[1]])
    made: Any = object.__new__(classes[rest[0]])
    for field, item in rest[1]:
        object.__setattr__(made, field, unpack(item, classes))
    return made


def classes_in(*modules: str) -> dict[str, type]:
    """The classes that modules define which are imported already, by ``module:name``; a name ending in a dot stands for
    all modules below it.

    >>> sorted(classes_in("asyncsgd.packing"))
    []
    """
    classes = {}
    for name, module in list(sys.modules.items()):
        if any(name == wanted or (wanted.endswith(".") and name.startswith(wanted)) for wanted in modules):
            for kind in list(vars(module).values()):
                if isinstance(kind, type) and kind.__module__ == name:
                    classes[f"{name}:{kind.__qualname__}"] = kind
    return classes
