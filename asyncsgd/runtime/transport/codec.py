"""Messages as bytes: JSON of dataclasses from a closed table.

What arrives from another process is never unpickled, since unpickling runs whatever the sender wrote."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any, TypeVar

T = TypeVar("T")


class ProtocolError(ValueError):
    """Bytes that are no message of this library: the sender is not one of its processes, or another version of it."""


class Codec:
    """Encodes and decodes dataclasses of the given kinds, whose fields are numbers, texts, None and tuples of these.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Point:
    ...     x: float
    ...     labels: tuple[str, ...] = ()
    >>> codec = Codec(Point)
    >>> codec.encode(Point(0.1, ("a",)))
    b'["Point",0.1,["a"]]'
    >>> codec.decode(codec.encode(Point(0.1, ("a",))))
    Point(x=0.1, labels=('a',))
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds = {
            kind.__name__: (kind, [getattr(hint, "_make", _itself) for hint in typing.get_type_hints(kind).values()])
            for kind in kinds
        }

    def encode(self, message: Any) -> bytes:
        """The message's bytes; `message` is of one of the kinds."""
        return json.dumps([type(message).__name__, *vars(message).values()], separators=(",", ":")).encode()

    def decode(self, payload: bytes) -> Any:
        """The message behind `payload`.

        Raises:
            ProtocolError: if the bytes are no message of these kinds.
        """
        try:
            name, *values = json.loads(payload)
            kind, readers = self._kinds[name]
            return kind(*(read(_tuples(value)) for read, value in zip(readers, values, strict=True)))
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ProtocolError(f"{payload[:40]!r} is no message of this library") from error


def encode_found(task: Any) -> bytes:
    """JSON of the fields that a task's `prepare` has filled in."""
    return json.dumps({name: getattr(task, name) for name in _found(task)}, separators=(",", ":")).encode()


def decode_found(task: T, payload: bytes) -> T:
    """`task` with the fields that `encode_found` wrote for a task of its class, and with nothing else from the bytes.

    Raises:
        ProtocolError: if a field is missing or unknown.
    """
    try:
        values = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{payload[:40]!r} is no JSON") from error
    if not isinstance(values, dict) or values.keys() != set(_found(task)):
        raise ProtocolError(f"{payload[:40]!r} is not what a {type(task).__name__} finds out")
    return dataclasses.replace(task, **{name: _tuples(value) for name, value in values.items()})  # type: ignore[type-var]


def _found(task: Any) -> list[str]:
    fields = dataclasses.fields(task) if dataclasses.is_dataclass(task) else ()
    return [field.name for field in fields if field.metadata.get("found")]


def _itself(value: Any) -> Any:
    return value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
