"""Types of settings beside numbers, text, true and false: enums, paths, tuples and lists, and unions.

In YAML an enum is its value, a path is text and a tuple is a list. A flag has commas: ``--layers 8,8``. msgspec reads
and writes them; few settings are of such types, so it is imported when one is.
"""

from __future__ import annotations

import collections.abc
import enum
import pathlib
import types
import typing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msgspec import inspect


def parts_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union; of another type itself alone."""
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return typing.get_args(kind) if is_union else (kind,)


def is_known(kind: Any) -> bool:
    """Whether `read` gives back what `plain` has written: not of dicts, nor of a union like ``str | Path`` or a
    ``Sequence``, whose types are written alike.

    >>> is_known(tuple[int, ...]), is_known(dict), is_known(str | pathlib.Path)
    (True, False, False)
    """
    if any(typing.get_origin(part) is collections.abc.Sequence for part in parts_of(kind)):
        return False
    from msgspec import inspect

    try:
        return _is_known(inspect.type_info(kind))
    except TypeError:
        return False


def _is_known(info: inspect.Type) -> bool:
    from msgspec import inspect

    if isinstance(info, inspect.UnionType):
        return all(map(_is_known, info.types))
    if isinstance(info, inspect.TupleType):
        return all(map(_is_known, info.item_types))
    if isinstance(info, inspect.ListType | inspect.VarTupleType):
        return isinstance(info.item_type, inspect.AnyType) or _is_known(info.item_type)
    if isinstance(info, inspect.CustomType):
        return issubclass(info.cls, pathlib.PurePath)
    scalars = (inspect.IntType, inspect.FloatType, inspect.BoolType, inspect.StrType, inspect.NoneType)
    return isinstance(info, (*scalars, inspect.EnumType, inspect.LiteralType))


def described(kind: Any) -> str:
    """What a value has to be, for messages and ``--help``.

    >>> described(tuple[int, ...])
    'tuple[int, ...]'
    """
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(str(member.value) for member in kind)}"
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def read(kind: Any, given: object, *, typed: bool = False) -> Any:
    """`given` as a value of a type that is known.

    Args:
        typed: whether it is a flag's text, in which 3 is a number; in a file and in Python it is text.

    Raises:
        ValueError: if it is none.

    >>> read(tuple[int, ...], "8,16", typed=True), read(tuple[int, ...], [8, 16]), read(int | str, "3")
    ((8, 16), (8, 16), '3')
    """
    import msgspec
    from msgspec import inspect

    parts = parts_of(kind)
    if typed and str in parts and len(parts) > 1:
        try:
            return read(typing.Union[tuple(part for part in parts if part is not str)], given, typed=True)  # noqa: UP007
        except ValueError:
            return given
    value = plain(given)
    if typed and isinstance(value, str):
        lists = (inspect.ListType, inspect.VarTupleType, inspect.TupleType)
        sequences = [isinstance(inspect.type_info(part), lists) for part in parts]
        if all(sequences) or ("," in value and any(sequences)):
            value = [element.strip() for element in value.split(",") if element.strip()]
    try:
        return msgspec.convert(value, kind, strict=not typed, dec_hook=lambda path, text: path(text))
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(str(error)) from error


def plain(value: Any) -> Any:
    """A value as YAML and JSON have it."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    import msgspec

    return msgspec.to_builtins(value, enc_hook=str)
