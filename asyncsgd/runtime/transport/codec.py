"""Messages as bytes: JSON of dataclasses from a closed table, with every name, type and length checked.

What arrives from another process is never unpickled, since unpickling runs whatever the sender wrote. Decoding here can
only make one of the dataclasses that the codec was given, with fields of their declared types."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

LONGEST = 1 << 20
"""Bytes of the longest message."""

_LARGEST_INTEGER = 1 << 63

T = TypeVar("T")

_Read = Callable[[Any], Any]
"""Turns a value that came out of JSON into a field's value, or raises a TypeError."""


class ProtocolError(ValueError):
    """Bytes that are no message of this library: the sender is not one of its processes, or another version of it."""


class Codec:
    """Encodes and decodes dataclasses of the given kinds.

    Fields are int, float, str, bool, None, tuples of these, named or not, and unions of these.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Point:
    ...     x: float
    ...     labels: tuple[str, ...] = ()
    >>> codec = Codec(Point)
    >>> codec.encode(Point(0.1, ("a",)))
    b'{"kind":"Point","x":0.1,"labels":["a"]}'
    >>> codec.decode(codec.encode(Point(0.1, ("a",))))
    Point(x=0.1, labels=('a',))
    >>> codec.decode(b'{"kind":"Point","x":"0.1","labels":[]}')
    Traceback (most recent call last):
        ...
    asyncsgd.runtime.transport.codec.ProtocolError: field x of Point cannot be '0.1'
    """

    def __init__(self, *kinds: type) -> None:
        self._fields: dict[str, tuple[Callable[..., Any], dict[str, _Read]]] = {
            kind.__name__: (kind, {name: _reader(hint) for name, hint in typing.get_type_hints(kind).items()})
            for kind in kinds
        }

    def encode(self, message: Any) -> bytes:
        """The message's bytes; `message` is of one of the kinds."""
        name = type(message).__name__
        values = {field: getattr(message, field) for field in self._fields[name][1]}
        return json.dumps({"kind": name, **values}, separators=(",", ":")).encode()

    def decode(self, payload: bytes) -> Any:
        """The message behind `payload`.

        Raises:
            ProtocolError: if the bytes are anything else than what `encode` gives.
        """
        if len(payload) > LONGEST:
            raise ProtocolError(f"a message of {len(payload)} bytes is longer than any of this library's")
        try:
            values = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{payload[:40]!r} is no JSON") from error
        name = values.pop("kind", None) if isinstance(values, dict) else None
        if not isinstance(name, str) or name not in self._fields:
            raise ProtocolError(f"{payload[:40]!r} is no message of this library")
        kind, readers = self._fields[name]
        if values.keys() != readers.keys():
            raise ProtocolError(f"{name} has the fields {', '.join(readers)}, not {', '.join(values)[:200]}")
        return kind(**{field: self._read(name, field, read, values[field]) for field, read in readers.items()})

    @staticmethod
    def _read(kind: str, field: str, read: _Read, value: object) -> Any:
        try:
            return read(value)
        except TypeError:
            raise ProtocolError(f"field {field} of {kind} cannot be {str(value)[:40]!r}") from None


def encode_found(task: Any) -> bytes:
    """JSON of the fields that a task's `prepare` has filled in."""
    return json.dumps({name: getattr(task, name) for name in _found(task)}, separators=(",", ":")).encode()


def decode_found(task: T, payload: bytes) -> T:
    """`task` with the fields that `encode_found` wrote for a task of its class, and with nothing else from the bytes.

    Raises:
        ProtocolError: if a field is missing, unknown or of another type.
    """
    readers = _found(task)
    try:
        values = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{payload[:40]!r} is no JSON") from error
    if not isinstance(values, dict) or values.keys() != readers.keys():
        raise ProtocolError(f"{type(task).__name__} finds out {', '.join(readers) or 'nothing'}, not {payload[:60]!r}")
    return dataclasses.replace(  # type: ignore[type-var]
        task, **{name: Codec._read(type(task).__name__, name, read, values[name]) for name, read in readers.items()}
    )


def _found(task: Any) -> dict[str, _Read]:
    if not dataclasses.is_dataclass(task):
        return {}
    names = [field.name for field in dataclasses.fields(task) if field.metadata.get("found")]
    hints = typing.get_type_hints(type(task)) if names else {}
    return {name: _reader(hints[name]) for name in names}


def _reader(hint: Any) -> _Read:
    """What reads a field of the type `hint`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _any_of([_reader(argument) for argument in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        each = _reader(arguments[0])
        return lambda value: tuple(each(item) for item in _list(value))
    if isinstance(hint, type) and issubclass(hint, tuple):  # a NamedTuple
        fields = [_reader(of_field) for of_field in typing.get_type_hints(hint).values()]
        return lambda value: hint(*(read(item) for read, item in zip(fields, _list(value, len(fields)), strict=True)))
    if origin is tuple:
        readers = [_reader(argument) for argument in arguments]
        return lambda value: tuple(read(item) for read, item in zip(readers, _list(value, len(readers)), strict=True))
    return _SIMPLE[hint]


def _any_of(readers: list[_Read]) -> _Read:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except TypeError:
                continue
        raise TypeError

    return read


def _list(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
        raise TypeError
    return value


def _float(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise TypeError
    return float(value) if type(value) is float else float(_integer(value))


def _exactly(kind: type) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError
        return value

    return read


_SIMPLE: dict[Any, _Read] = {
    int: _integer,
    float: _float,
    str: _exactly(str),
    bool: _exactly(bool),
    types.NoneType: _exactly(types.NoneType),
}
