"""The state of a run: of each part the attributes that decide what follows, and nothing else.

A part names them in `KEPT`. A part within a part is kept in the same way. An object with a `state_dict` (torch's
optimizers, ranks that have to gather theirs) is kept as what that returns. A state is live: a caller that keeps it
copies it, as `asyncsgd.core.checkpoints` does. It holds tensors, numbers, strings, and lists, tuples, sets, dicts,
structs and dataclasses of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


def state_of(part: Any) -> Any:
    """The state of a part, or of several by a key.

    >>> class Clock:
    ...     KEPT = ("seconds",)
    ...     seconds, running = 2.5, True
    >>> state_of(Clock()), state_of({3: Clock()})
    ({'seconds': 2.5}, {3: {'seconds': 2.5}})
    """
    if hasattr(part, "KEPT"):
        return {name: state_of(getattr(part, name)) for name in part.KEPT}
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if type(part) is dict:
        return {key: state_of(value) for key, value in part.items()}
    return part


def restore(part: Any, state: State) -> None:
    """Load `state` into `part`, which must have been built with the same arguments as the part whose state it is.

    The part takes the objects of the state over, so the caller uses it no more. An attribute that is a tensor is copied
    to where that of the part is, since others share its memory. A tensor within a list, tuple, dict or struct stays on
    the device to which the state was loaded. Afterwards ``part.restored()`` is called if there is one; it brings such
    tensors to the CPU where they belong there.
    """
    for name in part.KEPT:
        before = getattr(part, name)
        value = state[name]
        if hasattr(before, "KEPT"):
            restore(before, value)
        elif hasattr(before, "load_state_dict"):
            before.load_state_dict(value)
        elif type(before) is dict and before and all(hasattr(each, "KEPT") for each in before.values()):
            for key, each in before.items():
                restore(each, value[key])
        elif isinstance(before, Tensor):
            with torch.no_grad():
                before.copy_(value)
        else:
            setattr(part, name, value)
    if hasattr(part, "restored"):
        part.restored()
