"""Frozen dataclasses as the one source of flags, YAML keys, help and defaults. Standard library only.

A settings class is a frozen dataclass whose fields are groups (frozen dataclasses too, declared with `group`), whose
fields are the settings (declared with `setting`). `Flags` reads it. PyYAML is imported when a file is read or written,
so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from asyncsgd import __version__
from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings import kinds
from asyncsgd.settings.shipped import config_file
from asyncsgd.settings.specs import Spec, flag_of, specs_of
from asyncsgd.settings.specs import setting as setting  # tasks of one's own import it from here
from asyncsgd.settings.yaml_reader import (
    ABOUT_THE_RUN,
    FORMAT,
    OPTIMIZER_OPTIONS,
    TASK,
    check_format,
    read_yaml,
)


class Parser(argparse.ArgumentParser):
    """argparse with usage errors raised instead of printed, so that only one of several ranks needs to print them.

    A flag may be typed with underscores: ``--eval_data`` is ``--eval-data``.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._with_dashes(argument) for argument in given], namespace)

    def _with_dashes(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        if not name.startswith("--"):
            return argument
        dashed = flag_of(name.removeprefix("--"))
        return f"{dashed}{equals}{value}" if dashed in self._option_string_actions else argument

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists every flag")


def _path_of_run(text: str) -> str:
    """The path of the run that `last` or an unambiguous beginning of a path names. Any other text stays as it is."""
    from asyncsgd.records.run_folder import find_run

    path = Path(text)
    if text == "last" or (path.parent != Path() and not path.exists()):
        with contextlib.suppress(UsageError):
            return str(find_run(text))
    return text


def _refuse_own_parts(settings: Mapping[Any, Any], path: str | Path) -> None:
    """Refuse settings of a run that had a rule or an optimizer of the user's own."""
    own = []
    # Of such a rule null is written, of an optimizer what it was made with, of a schedule MODULE:NAME.
    if settings.get("rule", "") is None:
        own.append("rule")
    if OPTIMIZER_OPTIONS in settings:
        own.append("optimizer")
    if ":" in str(settings.get("schedule")):
        own.append("schedule")
    if own:
        raise UsageError(
            f"{path}: the {' and the '.join(own)} of the run are the user's own, which no flag can give; go on in "
            f"Python, with asyncsgd.train(..., resume=True)"
        )


def yaml_of(parts: Mapping[str, Mapping[str, Any]], comment: str = "") -> str:
    """Settings as YAML, part by part under their titles; a part without a title is the first one.

    Args:
        comment: lines for the head of the file.
    """
    import yaml

    # A control character would make the whole file unreadable, even in a comment.
    printable = ("".join(c if c.isprintable() else "?" for c in line) for line in comment.splitlines())
    head = "".join(f"# {line}\n" for line in printable)
    blocks = [head] if head else []
    for title, values in parts.items():
        if not values:
            continue
        # allow_unicode would leave U+0085 unquoted, which reads back as a line break; escapes are exact.
        text = yaml.safe_dump(dict(values), sort_keys=False, width=math.inf)
        blocks.append(f"# {title}\n{text}" if title else text)
    return "\n".join(blocks)


class Parsed(NamedTuple):
    """A command line, understood: valid `settings`, and the names `given` by a flag or by the file."""

    settings: Any
    given: frozenset[str]


class Flags:
    """What a settings class means on a command line, in a YAML file and in Python.

    Args:
        settings: the class, see the module.
        contradictions: yields what is wrong between settings that are each within bounds, the first cause first.
        task, task_class: the name of the task that is trained and that of its class. A file may name either, and one
            that names another task is refused. Empty: no task is trained.

    >>> from asyncsgd.settings.specs import group, setting
    >>> Width = dataclasses.make_dataclass("Width", [("width", int, setting(8, "columns", at_least=1))], frozen=True)
    >>> Model = dataclasses.make_dataclass("Model", [("shape", Width, group(Width, "shape"))], frozen=True)
    >>> flags = Flags(Model)
    >>> flags.make({"width": "16"})
    Model(shape=Width(width=16))
    >>> flags.parse(["--widht", "16"], prog="train", description="", examples="")
    Traceback (most recent call last):
        ...
    asyncsgd.errors.UsageError: unknown flag --widht; did you mean '--width'?
    """

    def __init__(
        self,
        settings: Any,
        contradictions: Callable[[Any], Iterable[str]] = lambda settings: (),
        task: str = "",
        task_class: str = "",
    ) -> None:
        self._class = settings
        self._contradictions = contradictions
        self._task = task
        self._task_class = task_class

    @functools.cached_property
    def specs(self) -> Mapping[str, Spec]:
        """Every setting by name, in the order of the declarations."""
        specs: dict[str, Spec] = {}
        for group_name, group_class in typing.get_type_hints(self._class).items():
            for name, spec in specs_of(group_class).items():
                if name in specs:
                    raise UsageError(
                        f"two settings are called {name!r}, one of the group {specs[name].group!r} and one of "
                        f"{group_name!r}; rename the field of one, or give it setting(..., name=...)"
                    )
                specs[name] = spec._replace(group=group_name)
        return specs

    @functools.cached_property
    def names(self) -> Mapping[str, str]:
        """Name or alias of a setting -> its name."""
        names: dict[str, str] = {}
        for spec in self.specs.values():
            for name in (spec.name, *spec.metadata["aliases"]):
                names.setdefault(name, spec.name)
        return names

    def known(self, key: object, where: str) -> Spec:
        """The setting of that name or alias, dashes allowed; `where` stands in front of a refusal."""
        name = str(key).replace("-", "_")
        if name not in self.names:
            raise UsageError(f"{where}unknown key {str(key)!r}{nearest(name, self.specs)}")
        return self.specs[self.names[name]]

    def make(self, values: Mapping[str, object]) -> Any:
        """Build valid settings from names and values without their groups; what is not named has its default.

        Raises:
            UsageError: for an unknown name, a value of a wrong type, and all that a task's own checks of its fields and
                `validate` reject.
        """
        groups: dict[str, dict[str, Any]] = {field.name: {} for field in dataclasses.fields(self._class)}
        for key, value in values.items():
            spec = self.known(key, "")
            groups[spec.group][spec.field] = spec.checked(value)
        kinds = typing.get_type_hints(self._class)
        try:
            settings = self._class(**{name: kinds[name](**fields) for name, fields in groups.items()})
        except ValueError as error:  # a dataclass checks its fields in __post_init__
            raise UsageError(str(error)) from error
        self.validate(settings)
        return settings

    def flatten(self, settings: Any) -> dict[str, Any]:
        """Return a new dict of all settings by name, without their groups; the inverse of `make`."""
        return {name: spec.of(settings) for name, spec in self.specs.items()}

    def validate(self, settings: Any) -> None:
        """Refuse settings that contradict each other or would do nothing; to be called after `dataclasses.replace`.

        Raises:
            UsageError: with the value and what to type instead.
        """
        for problem in self._contradictions(settings):
            raise UsageError(problem)

    def to_yaml(self, settings: Any, *, comment: str = "") -> str:
        """Return all settings, defaults resolved, as YAML that ``--config`` reads back to equal settings.

        Args:
            comment: lines for the head of the file.
        """
        parts = {}
        for field in dataclasses.fields(self._class):
            values = {}
            for spec in self.specs.values():
                if spec.group == field.name:
                    values[spec.name] = kinds.plain(spec.of(settings))
            parts[field.metadata["title"]] = values
        return yaml_of(parts, comment)

    def load_yaml(self, path: str | Path) -> dict[str, object]:
        """Return the settings named in a YAML file, by name and converted to their types; not yet validated.

        The file may be the settings.yaml of a run, by whomever it was begun. What no flag can give is refused then.

        Raises:
            UsageError: the file cannot be read, or has an unknown key, a key twice, or a value of a wrong type.
        """
        from asyncsgd.records.events import EVENTS

        try:
            loaded = read_yaml(config_file(path).read_text(encoding="utf-8"), str(path)) or {}
        except OSError as error:
            raise UsageError(f"--config {path} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not YAML: {error}") from error
        if not isinstance(loaded, dict):
            raise UsageError(f"{path} must hold lines like 'mode: async', got {type(loaded).__name__}")
        is_of_run = FORMAT in loaded or Path(path).with_name(EVENTS).is_file()
        if is_of_run:
            check_format(loaded, Path(path))
            _refuse_own_parts(loaded, path)
        self._check_task(loaded, path)
        no_settings = ABOUT_THE_RUN if is_of_run else {TASK} - self.specs.keys()
        values: dict[str, object] = {}
        for key, value in loaded.items():
            if key in no_settings:
                continue
            spec = self.known(key, f"{path}: ")
            if spec.name in values:  # once with a dash, once with an underscore
                raise UsageError(f"{path}: the setting {spec.name!r} is there twice; keep one")
            values[spec.name] = spec.converted(value, f"{path}: {spec.name}")
        return values

    def _check_task(self, loaded: Mapping[Any, Any], path: str | Path) -> None:
        """Refuse settings of another task."""
        named = loaded.get(TASK)
        if named is None or TASK in self.specs:
            return
        if named != self._task and str(named).partition(":")[2] != self._task_class:
            raise UsageError(
                f"{path} is of the task {named}, and this command trains {self._task}; type its own command"
            )

    def settings_hash(self, values: Mapping[str, object]) -> str:
        """Return six hexadecimal digits that name a run: equal for equal settings, wherever the run is kept.

        They are of what differs from the defaults. So a setting that is added leaves the names of runs as they were.

        Args:
            values: settings by name, without those that say where the run is kept.
        """
        import hashlib

        chosen = {}
        for name, default in self.flatten(self._class()).items():
            if name not in values:
                continue
            # Converted, because Python code may have put 1 where 1.0 is meant; the two print differently.
            value = self.specs[name].converted(values[name], name)
            if value != default:
                chosen[name] = kinds.plain(value)
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:6]

    def build_parser(self, prog: str, description: str, examples: str) -> argparse.ArgumentParser:
        """Return the parser of all settings plus ``--config``, ``--print-config``, ``--version`` and ``--help``.

        Parsed values are text as typed, and what was not typed is absent from the namespace: `parse` does the rest.
        """
        parser = Parser(
            prog=prog,
            usage="%(prog)s [--FLAG VALUE ...]",
            description=description,
            epilog=examples and "examples:\n" + textwrap.indent(textwrap.dedent(examples).strip("\n"), "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            add_help=False,
        )
        metavars: Mapping[type, str] = {int: "N", float: "X", str: "TEXT", bool: "true"}
        groups = {}
        for field in dataclasses.fields(self._class):
            groups[field.name] = parser.add_argument_group(field.metadata["title"])
        for spec in self.specs.values():
            metadata = spec.metadata
            default = metadata["unset"] if spec.default is None else kinds.plain(spec.default)
            if isinstance(default, list | tuple):
                default = ",".join(map(str, default))
            help = metadata["help"]
            options = dict[str, Any](nargs="?", const=True)  # further arguments of `add_argument`
            if spec.kind is not bool:
                help = f"{help} (default: {default})"
                options = {}
            # No choices= or type= here: files and flags are converted and checked by the same code, after merging.
            named = metadata["named"]
            names = ",".join(spec.choices if named is None else named.by_name)
            metavar = "{" + names + "}" if names else metavars.get(spec.kind, "VALUE")
            if metadata["repeats"]:
                options = {"action": "append"}
                metavar = "TEXT"
            groups[spec.group].add_argument(
                *spec.flags, dest=spec.name, metavar=metavar, help=help.replace("%", "%%"), **options
            )
        config = parser.add_argument_group("config")
        config.add_argument("--config", metavar="FILE.yaml", help="read settings from a file; flags override it")
        config.add_argument("--print-config", action="store_true", help="print all settings as YAML and exit")
        config.add_argument("--version", action="version", version=f"asyncsgd {__version__}", help="print it and exit")
        config.add_argument("-h", "--help", action="help", help="print this and exit")
        return parser

    def parse(self, argv: Sequence[str], *, prog: str, description: str, examples: str, is_led: bool = False) -> Parsed:
        """Merge defaults, ``--config`` file and flags, in rising precedence, into valid settings.

        ``none`` as the value of a flag takes a file's value back, where the setting may be left open. ``--help``,
        ``--version`` and ``--print-config`` print to stdout and exit with code 0; of several ranks, all do.

        Args:
            is_led: True on a host that is led by rank 0 on another host. Such a host does not need the folder of
                ``--resume``.

        Raises:
            UsageError: for everything the user has to type differently.
        """
        parser = self.build_parser(prog, description, examples)
        namespace, unknown = parser.parse_known_args(list(argv))
        if unknown:
            raise UsageError(self._unknown_argument(unknown))
        typed = vars(namespace)
        config = typed.pop("config", None)
        print_config = typed.pop("print_config", False)
        for name, text in typed.items():
            spec = self.specs[name]
            if spec.metadata["run"]:
                text = _path_of_run(text)
            if spec.kind is bool:
                text = {"true": True, "false": False}.get(str(text).lower(), text)
            if spec.metadata["repeats"] and len(text) == 1:
                (text,) = text
            is_none = spec.may_be_none and str(text).lower() == "none"
            if not spec.is_plain and not is_none:
                text = spec.converted(text, spec.flag, typed=True)
            typed[name] = None if is_none else text
        if config is None and "resume" in typed:
            config = Path(str(typed["resume"])) / "settings.yaml"  # flags must agree with it, see `run.choose_folder`
            if not config.is_file():
                if not is_led:
                    raise UsageError(f"--resume {typed['resume']} is not a run folder: it has no settings.yaml")
                if "mode" not in typed:
                    raise UsageError(
                        f"this host has no {config}, so rank 0 tells it the settings, and has to be asked in the way "
                        f"of the mode; type --mode async or --mode sync, as the run had it"
                    )
                config = None
        values = ({} if config is None else self.load_yaml(config)) | typed
        try:
            settings = self.make(values)
        except UsageError as error:
            if config is None:
                raise
            raise UsageError(f"{error} (settings of {config} and the command line together)") from error
        if print_config:
            print(self.to_yaml(settings), end="")
            raise SystemExit(0)
        return Parsed(settings, frozenset(values))

    def _unknown_argument(self, unknown: Sequence[str]) -> str:
        flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
        if not flags:
            return f"unexpected argument {unknown[0]!r}; every setting is a flag, e.g. --mode async"
        known = [flag for spec in self.specs.values() for flag in spec.flags]
        hint = nearest(flags[0], [*known, "--config", "--print-config", "--version", "--help"])
        return f"unknown flag {flags[0]}{hint or '; --help lists every flag'}"
