"""A setting: a field of a frozen dataclass, declared once, and read alike from flags, YAML and Python.

Such a class is a group of settings. `asyncsgd.settings.flags` makes flags and files of several groups. Standard library
only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypeVar

from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings import kinds
from asyncsgd.settings.choices import Choices
from asyncsgd.settings.numbers import number, out_of_bounds, shortened, whole_number

T = TypeVar("T")
_BOUNDS = ("at_least", "above", "below", "at_most")
_PLAIN_KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
"""Type that is read here -> what its values are called in messages."""


def setting(
    default: object,
    help: str,
    *,
    unset: str = "",
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    aliases: tuple[str, ...] = (),
    name: str | None = None,
    or_number: bool = False,
    or_whole: bool = False,
    run: bool = False,
    repeats: bool = False,
    named: Choices[Any] | None = None,
) -> Any:
    """Declare a field of a group: its default, its help line and its bounds.

    A default of None means that the setting may be left open; `unset` says in ``--help`` what happens then. `name`
    is what the user calls it, where the field cannot bear that name. With `or_number` a number in a file needs no
    quotes, though the field is text. With `or_whole` a whole number stays one, though the field is a float. With `run`
    a flag's value may be the beginning of a run's path, or ``last``; see `asyncsgd.records.run_folder.find_run`. With
    `repeats`, of a field of type ``str | tuple[str, ...]``, the flag may be typed several times. With `named` the
    text is ``NAME[:key=value,...]`` of one of these choices, which ``FLAG help`` explains; the group itself reads it.
    """
    bounds = {"at_least": at_least, "above": above, "below": below, "at_most": at_most}
    reading = {"or_number": or_number, "or_whole": or_whole, "run": run, "repeats": repeats}
    metadata = {"help": help, "unset": unset, "aliases": aliases, "name": name, "named": named} | bounds | reading
    return dataclasses.field(default=default, metadata=metadata)


def group(kind: type, title: str) -> Any:
    """Declare a group of a settings class; `title` stands above its flags and its part of a YAML file."""
    return dataclasses.field(default_factory=kind, metadata={"title": title})


def flag_of(name: str) -> str:
    """The flag of a setting.

    >>> flag_of("seq_len")
    '--seq-len'
    """
    return "--" + name.replace("_", "-")


class Spec(NamedTuple):
    """What is known of one setting: the reading of a field that flags, YAML and Python share."""

    name: str
    field: str
    group: str
    kind: type
    choices: tuple[str, ...]
    default: object
    metadata: Mapping[str, Any]
    may_be_none: bool

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def is_plain(self) -> bool:
        """Whether its values are numbers, text or truth values. Others are read by `asyncsgd.settings.kinds`."""
        return self.kind in _PLAIN_KINDS

    @property
    def flags(self) -> list[str]:
        return [flag_of(name) for name in (self.name, *self.metadata["aliases"])]

    def of(self, settings: Any) -> Any:
        return getattr(getattr(settings, self.group), self.field)

    def converted(self, given: object, shown: str, *, typed: bool = False) -> Any:
        """Return what a file, a flag or Python gives as the type of the setting; `shown` is its name in the error.

        Args:
            typed: whether it is a flag's text.
        """
        if given is None and self.may_be_none:
            return None
        if self.metadata["repeats"]:
            texts = [given] if isinstance(given, str) else given
            if isinstance(texts, list | tuple) and texts and all(isinstance(text, str) and text for text in texts):
                return texts[0] if len(texts) == 1 else tuple(texts)
            raise UsageError(f"{shown} must be text or a list of texts, got {shortened(given)}")
        kind = self.kind
        if not self.is_plain:
            try:
                return kinds.read(kind, given, typed=typed)
            except ValueError as error:
                wanted = kinds.described(kind)
                raise UsageError(f"{shown} must be {wanted}, got {shortened(given)} ({error})") from error
        if isinstance(given, Real) and not isinstance(given, int | float):  # of numpy, as in seed=np.arange(8)[3]
            given = int(given) if isinstance(given, Integral) else float(given)
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if is_number and self.metadata["or_number"]:
            return str(given)
        if kind in (bool, str) and isinstance(given, kind) and given != "":
            return given
        if kind in (int, float) and (is_number or isinstance(given, str)):
            # A file may hold 1e4 samples, and YAML reads 1e-4 (without a dot) as text.
            with contextlib.suppress(ValueError):
                read = whole_number if kind is int else number
                value: float = read(str(given))
                return int(value) if self.metadata["or_whole"] and value.is_integer() else value
        hint = ""
        if kind is str and not isinstance(given, str | None):
            hint = "; put it in quotes"
        raise UsageError(f"{shown} must be {_PLAIN_KINDS[kind]}, got {shortened(given)}{hint}")

    def checked(self, given: object) -> Any:
        """Return what is given, converted; refuse it out of bounds."""
        value = self.converted(given, self.flag)
        shown = self.flag
        if value is None:
            return None
        bounds = {bound: self.metadata[bound] for bound in _BOUNDS}
        values = value if isinstance(value, list | tuple) else [value]
        complaints = [out_of_bounds(each, **bounds) for each in values]  # empty texts for those within bounds
        wanted = next(filter(None, complaints), "")
        hint = ""
        if self.choices and value not in self.choices:
            wanted = f"one of {', '.join(self.choices)}"
            hint = nearest(value, self.choices)
        if wanted:
            raise UsageError(f"{shown} must be {wanted}, got {shortened(value)}{hint}")
        return value


@functools.cache
def specs_of(kind: Any) -> Mapping[str, Spec]:
    """The settings that a frozen dataclass declares, by name; see `setting`."""
    specs: dict[str, Spec] = {}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.metadata.get("found"):
            continue  # declared with `asyncsgd.found`: a task finds its value by itself
        all_parts = [*kinds.parts_of(hints[field.name])]
        parts = [part for part in all_parts if part is not types.NoneType]
        # The type of a setting that may be left open is the type beside None; that of choices is text.
        kind_of_field = parts[0] if len(parts) == 1 else hints[field.name]
        choices = ()
        arguments = typing.get_args(kind_of_field)
        if typing.get_origin(kind_of_field) is Literal and all(isinstance(argument, str) for argument in arguments):
            kind_of_field = str
            choices = arguments
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is dataclasses.MISSING:
            raise UsageError(f"the field {field.name!r} of {kind.__name__} needs a default value")
        repeats = field.metadata.get("repeats", False)  # of text, or several
        if kind_of_field not in _PLAIN_KINDS and not repeats and not kinds.is_known(kind_of_field):
            raise UsageError(
                f"the field {field.name!r} of {kind.__name__} is of type {kinds.described(kind_of_field)}, which no "
                f"flag can give; make fields of numbers, text, true or false, enums, paths, or tuples and lists of them"
            )
        # The fields of a user's own task may be plain ones.
        metadata = field.metadata if "help" in field.metadata else setting(default, "").metadata
        name = metadata["name"] or field.name
        may_be_none = default is None or parts != all_parts
        specs[name] = Spec(name, field.name, "", kind_of_field, choices, default, metadata, may_be_none)
    return specs


def checked(kind: type[T], **values: object) -> T:
    """`kind` with these settings, each converted and within bounds; what is not named has its default.

    Raises:
        UsageError: in the words of the flag.
    """
    specs: Mapping[str, Spec] = specs_of(kind)  # type: ignore[arg-type]
    return kind(**{specs[name].field: specs[name].checked(value) for name, value in values.items()})
