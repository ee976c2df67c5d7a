"""Things that a user names on the command line with their parameters: ``NAME[:key=value,...]``. Standard library only.

Such a thing is a frozen dataclass, a `Named`; its fields are its parameters, and a value out of its bounds is a
ValueError.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from asyncsgd.errors import UsageError, nearest
from asyncsgd.extensions import Registry
from asyncsgd.settings.numbers import number, out_of_bounds, shortened, whole_number

T = TypeVar("T")


def parameter(default: Any = dataclasses.MISSING, **bounds: float) -> Any:
    """Declare a parameter of a `Named`, with bounds such as ``above=0, at_most=1``; see `out_of_bounds`."""
    return dataclasses.field(default=default, metadata={"bounds": bounds})


def name_of_class(cls: type) -> str:
    """The name of a class as it is typed.

    >>> name_of_class(Named)
    'named'
    """
    return re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()


@dataclasses.dataclass(frozen=True)
class Named:
    """Base of what has a name and parameters; its text is read back to an equal object.

    Raises:
        ValueError: if a `parameter` is out of its bounds, or a number that is not finite.
    """

    name: ClassVar[str]
    """What the user types after the flag: that of the class, ``two_groups`` for `TwoGroups`, if it says no other."""
    summary: ClassVar[str]
    """For ``... help``: the first line of the docstring."""

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = name_of_class(cls)
        cls.summary = (cls.__doc__ or "").partition("\n")[0].replace("`", "")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (bounds := field.metadata.get("bounds")) is None:
                continue
            value = getattr(self, field.name)
            wanted = out_of_bounds(value, **bounds)
            if not wanted and isinstance(value, float) and not math.isfinite(value):
                wanted = "finite"
            if wanted:
                raise ValueError(f"{field.name} must be {wanted}, got {value}")

    def __str__(self) -> str:
        return spell(self)


def _float(text: str) -> float:
    # inf and nan are refused by the parameters themselves, each with what it wants.
    return float(text) if text in ("inf", "-inf", "nan") else number(text)


_READ: Mapping[type, Callable[[str], Any]] = {
    int: whole_number,
    float: _float,
    str: str,
    bool: {"true": True, "false": False, "True": True, "False": False}.__getitem__,
}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


@dataclasses.dataclass(frozen=True)
class Choices(Generic[T]):
    """What is named, in messages: ``rule``, several ``rules``, given with ``--rule``; and what there is, by name."""

    one: str
    several: str
    flag: str
    by_name: Mapping[str, type[T]]
    first_is_positional: bool = False
    """Whether a first value may stand without its key, for the first parameter."""

    def read(self, text: str) -> T:
        """Return what ``NAME[:key=value,...]`` means.

        Raises:
            UsageError: for an unknown name or parameter (the nearest one is suggested) or a value out of range.
        """
        name, _, parameters = text.partition(":")
        if name not in self.by_name:
            raise UsageError(
                f"unknown {self.one} {name!r}{nearest(name, self.by_name)}; {self.several}: {', '.join(self.by_name)} "
                f"({self.flag} help explains them){self._of_packages(name)}"
            )
        kind = self.by_name[name]
        values = self._read_parameters(text, name, parameters, kind)
        try:
            return kind(**values)
        except ValueError as error:
            raise UsageError(f"{self.flag} {text}: {error}") from None

    def _of_packages(self, name: str) -> str:
        """What else to do about an unknown name, where packages may bring some."""
        if not isinstance(self.by_name, Registry):
            return ""
        return f"; if {name} came with a package, install that package"

    def _read_parameters(self, text: str, name: str, parameters: str, named: type) -> dict[str, Any]:
        types = typing.get_type_hints(named)
        fields = dataclasses.fields(named)
        known = [field.name for field in fields]
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        one = self.one
        values: dict[str, Any] = {}
        for position, part in enumerate(filter(None, parameters.split(","))):
            key, equals, value = part.partition("=")
            if self.first_is_positional and known and not equals and not position:
                key = known[0]
                equals = "="
                value = part
            if key not in known:
                raise UsageError(f"{one} {name!r} has no parameter {key!r}{nearest(key, known)}; {takes}")
            if key in values:
                raise UsageError(f"{one} parameter {key!r} is given twice in {text!r}; keep one")
            if not equals:
                raise UsageError(f"{one} parameter {key!r} has no value; type {self.flag} {name}:{key}=VALUE")
            kind = types[key]
            if kind not in _READ:
                raise UsageError(
                    f"{one} parameter {key} has a type that cannot be typed; give the field of {named.__name__} one of "
                    f"the types {', '.join(readable.__name__ for readable in _READ)}"
                )
            try:
                values[key] = _READ[kind](value)
            except (KeyError, ValueError):
                raise UsageError(f"{one} parameter {key}={shortened(value)} is not {_KINDS[kind]}") from None
        for field in fields:
            if field.default is dataclasses.MISSING and field.name not in values:
                raise UsageError(f"{one} {name!r} needs {field.name}; type {self.flag} {name}:{field.name}=VALUE")
        return values

    def help(self) -> str:
        """The text of ``FLAG help``: each with its one line and its parameters."""
        first = "; a first value without key= is the first parameter" if self.first_is_positional else ""
        width = max(map(len, self.by_name))
        lines = [f"{self.several} ({self.flag} NAME[:key=value,...]{first}):"]
        for name in self.by_name:
            try:
                shown = _summary(self.by_name[name])
            except UsageError as error:  # of a package that is broken
                shown = f"not to be had: {error}"
            lines.append(f"  {name:{width}} {shown}")
        return "\n".join(lines)


def _summary(named: Any) -> str:
    """The one line of a choice, and its parameters, if it has any."""
    if not dataclasses.is_dataclass(named):
        return str(named.__doc__).partition("\n")[0]
    fields = ", ".join(
        f"{field.name}={'VALUE' if field.default is dataclasses.MISSING else field.default}"
        for field in dataclasses.fields(named)
    )
    summary: str = named.summary  # type: ignore[union-attr]
    return f"{summary}  [{fields}]" if fields else summary


def spell(named: Any) -> str:
    """The text that is read back to an equal object."""
    parameters = ",".join(f"{field.name}={getattr(named, field.name)}" for field in dataclasses.fields(named))
    return f"{named.name}:{parameters}" if parameters else str(named.name)
