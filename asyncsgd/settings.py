"""The settings of a training run: frozen dataclasses that are the one source of flags, YAML keys, help and defaults.

Standard library only (PyYAML is imported when a file is read or written), so that ``--help`` answers at once.

A component is given the group it needs (`Optimization`, `Data`, ...), never the whole `Settings`. Precedence is
default < ``--config`` file < flag. A setting that would do nothing in the run it is given for is an error.
"""
# ruff: noqa: RUF009 - the calls in the dataclasses' defaults are `_setting` and `_group`, which return dataclasses.field

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from asyncsgd import __version__
from asyncsgd.errors import UsageError, nearest

Mode = Literal["single", "sync", "async", "hogwild"]
Transport = Literal["auto", "shared_memory", "process_group"]
HogwildState = Literal["worker", "shared"]
OptimizerName = Literal["sgd", "adamw"]
Schedule = Literal["constant", "linear", "cosine"]
Mask = Literal["token", "word"]
Clock = Literal["measured", "virtual"]
Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]

DEFAULT_SAMPLES = 9600
DEFAULT_LEARNING_RATE: Mapping[str, float] = {"adamw": 5e-4, "sgd": 0.1}


def _setting(
    default: object,
    help: str,
    *,
    unset: str = "",
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    example: object = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare a field of a group: its default, its help line, its bounds, and a value that error messages can propose.

    A default of None means that the setting may be left open; `unset` says in ``--help`` what happens then.
    """
    metadata = {
        "help": help,
        "unset": unset,
        "at_least": at_least,
        "above": above,
        "below": below,
        "example": default if example is None else example,
        "aliases": aliases,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Job:
    """Which algorithm runs on how many workers.

    >>> Job().mode
    'async'
    """

    mode: Mode = _setting("async", "single: one worker; sync: all-reduce; async: parameter server; hogwild: no lock")
    nproc: int = _setting(
        1, "gradient workers, in every mode", at_least=1, example=4, aliases=("nproc_per_node", "nprocs", "workers")
    )
    rule: str = _setting(
        "asynchronous", "what the server does with an arriving gradient, as NAME[:key=value,...]; mode async only"
    )
    clock: Clock = _setting(
        "measured", "measured: real processes; virtual: one process, times drawn from --speeds; mode async only"
    )
    speeds: str | None = _setting(
        None,
        "how long gradients take, as NAME[:value,key=value,...]; real workers wait until it has passed",
        unset="as long as they take; constant:1 with --clock virtual",
        example="exponential:1.0",
    )
    network: str | None = _setting(
        None,
        "bytes=B,worker=BYTES_PER_SECOND,server=BYTES_PER_SECOND; --clock virtual only",
        unset="transfers take no time",
        example="bytes=6e6,worker=1e8,server=1e9",
    )
    accumulate: int = _setting(1, "batches per update; mode single only", at_least=1)
    transport: Transport = _setting("auto", "how gradients travel between workers and server; mode async only")
    hogwild_state: HogwildState = _setting(
        "worker", "optimizer state of each worker, or one shared by all; mode hogwild only"
    )
    seed: int = _setting(0, "of the initial model, the order of the data and the masks", at_least=0, below=2**32)


@dataclasses.dataclass(frozen=True)
class Budget:
    """When training ends and how often the model is evaluated; the first limit that is reached ends the run.

    `samples` is None when only `seconds` limits the run. Evaluations are spread evenly over `samples`, or over
    `seconds` when `samples` is None.
    """

    samples: int | None = _setting(
        None,
        "sequences to train on, over all workers; 0: evaluate the model and stop",
        unset=f"{DEFAULT_SAMPLES}, or no limit with --seconds",
        at_least=0,
        example=DEFAULT_SAMPLES,
    )
    seconds: float | None = _setting(
        None, "seconds of training, evaluations not counted", unset="no limit", above=0, example=60
    )
    target_loss: float | None = _setting(
        None, "stop when the evaluation loss is this low", unset="no target", above=0, example=5.0
    )
    evaluations: int = _setting(8, "evaluations after the first, evenly over the budget", at_least=1)
    eval_samples: int = _setting(500, "sequences in one evaluation; 0: all", at_least=0)


@dataclasses.dataclass(frozen=True)
class Optimization:
    """The optimizer and its learning rate over the run.

    `learning_rate` and `schedule` are declared with the types they have inside a `Settings`, which fills them in; they
    are None only in an `Optimization` that was built without them and has not been put into one.
    """

    optimizer: OptimizerName = _setting("adamw", "update rule at the server")
    learning_rate: float = _setting(
        None, "peak learning rate", unset="5e-4 for adamw, 0.1 for sgd", above=0, example=5e-4
    )
    schedule: Schedule = _setting(
        None, "learning rate after the warmup", unset="linear, or constant when --samples sets no limit"
    )
    warmup: int = _setting(640, "samples until the learning rate reaches its peak", at_least=0)
    weight_decay: float = _setting(0.01, "decoupled for adamw, L2 for sgd", at_least=0)
    momentum: float = _setting(0.0, "sgd only", at_least=0, below=1)
    beta1: float = _setting(0.9, "adamw only", at_least=0, below=1)
    beta2: float = _setting(0.999, "adamw only", at_least=0, below=1)
    clip_norm: float = _setting(1.0, "gradients longer than this are shortened to it; 0: never", at_least=0)


@dataclasses.dataclass(frozen=True)
class Data:
    """The text, how it is cut into sequences, and what is masked."""

    data: str = _setting("pydocs", "pydocs (built in, no network), a file, a folder or a name on the Hub")
    eval_data: str | None = _setting(None, "text to evaluate on", unset="held out from --data")
    text_column: str = _setting("text", "column of the data that holds the text")
    seq_len: int = _setting(128, "tokens per sequence", at_least=8)
    batch_size: int = _setting(16, "sequences in one gradient, per worker", at_least=1)
    mask: Mask = _setting("token", "mask single tokens or whole words")
    mask_prob: float = _setting(0.15, "share of the tokens to predict", above=0, below=1)
    vocab_size: int = _setting(8192, "of the tokenizer trained for the models tiny and small", at_least=1)
    # A path of one machine: its default is found at run time and is never written into settings.yaml.
    cache_dir: str | None = _setting(None, "folder for prepared data", unset="the user's cache folder")


@dataclasses.dataclass(frozen=True)
class Model:
    """Which model is trained."""

    model: str = _setting("tiny", "tiny or small (new, no network), a folder or a name on the Hub")
    dropout: float = _setting(0.0, "of all dropout layers", at_least=0, below=1)


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the run computes with."""

    device: Device = _setting("auto", "auto takes cuda where there is one")
    precision: Precision = _setting("fp32", "number format of the forward and backward pass")
    threads: int = _setting(1, "CPU threads per worker, the same for every number of workers", at_least=1)


@dataclasses.dataclass(frozen=True)
class Output:
    """Where the run is written; nothing here changes a result."""

    runs_dir: str = _setting("runs", "folder in which the run gets a folder of its own")
    run_dir: str | None = _setting(None, "the run's folder itself", unset="named after the settings, in --runs-dir")
    overwrite: bool = _setting(False, "replace an earlier run in the same folder")


def _group(kind: type, title: str) -> Any:
    return dataclasses.field(default_factory=kind, metadata={"title": title})


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of one run, by subject; defaults that depend on other settings are filled in on construction.

    `learning_rate` follows the optimizer; `samples` is 9600 unless `seconds` limits the run; `schedule` is linear where
    there is a number of samples to stretch it over, otherwise constant. Bounds are checked by `validate`, not here.

    >>> Settings().optimization.learning_rate
    0.0005
    >>> timed = Settings(budget=Budget(seconds=60.0))
    >>> timed.budget.samples, timed.optimization.schedule
    (None, 'constant')
    """

    job: Job = _group(Job, "what to run")
    budget: Budget = _group(Budget, "budget")
    optimization: Optimization = _group(Optimization, "optimizer")
    data: Data = _group(Data, "data")
    model: Model = _group(Model, "model")
    machine: Machine = _group(Machine, "machine")
    output: Output = _group(Output, "output")

    def __post_init__(self) -> None:
        budget, optimization = self.budget, self.optimization
        if budget.samples is None and budget.seconds is None:
            budget = dataclasses.replace(budget, samples=DEFAULT_SAMPLES)
        if optimization.schedule is None:
            schedule: Schedule = "constant" if budget.samples is None else "linear"
            optimization = dataclasses.replace(optimization, schedule=schedule)
        if optimization.learning_rate is None and optimization.optimizer in DEFAULT_LEARNING_RATE:
            learning_rate = DEFAULT_LEARNING_RATE[optimization.optimizer]
            optimization = dataclasses.replace(optimization, learning_rate=learning_rate)
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "optimization", optimization)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What is known of one setting: the reading of a field that flags, YAML and checks share."""

    name: str
    group: str
    kind: type
    choices: tuple[str, ...]
    default: object
    metadata: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return _flag(self.name)

    @property
    def flags(self) -> list[str]:
        return [_flag(name) for name in (self.name, *self.metadata["aliases"])]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@functools.cache
def _specs() -> Mapping[str, _Spec]:
    """Every setting by name, in the order of the declarations above."""
    specs: dict[str, _Spec] = {}
    for group, group_class in typing.get_type_hints(Settings).items():
        hints = typing.get_type_hints(group_class)
        for field in dataclasses.fields(group_class):
            kind, choices = hints[field.name], ()
            if isinstance(kind, types.UnionType):
                (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
            if typing.get_origin(kind) is Literal:
                kind, choices = str, typing.get_args(kind)
            specs[field.name] = _Spec(field.name, group, kind, choices, field.default, field.metadata)
    return specs


@functools.cache
def _places() -> frozenset[str]:
    """The settings that say where a run is kept, not what it is."""
    return frozenset(spec.name for spec in _specs().values() if spec.group == "output") | {"cache_dir"}


_WANTED: Mapping[type, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _convert(value: object, spec: _Spec, shown: str) -> object:
    """Return `value`, from a file, a flag or Python, as the type of the setting; `shown` is its name in the error."""
    if value is None and spec.default is None:
        return None
    if spec.kind in (bool, str):
        if isinstance(value, spec.kind) and value != "":
            return value
    elif isinstance(value, (int, float, str)) and not isinstance(value, bool):
        # PyYAML reads 1e-4 (without a dot) as a string, and 1e4 samples are a whole number.
        try:
            if spec.kind is int and not isinstance(value, float):
                try:
                    return int(value)
                except ValueError:
                    pass
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number) and (spec.kind is float or number.is_integer()):
            return spec.kind(number)
    hint = "; put it in quotes" if spec.kind is str and value is not None and not isinstance(value, str) else ""
    raise UsageError(f"{shown} must be {_WANTED[spec.kind]}, got {value!r}{hint}")


def _known(key: object, where: str) -> _Spec:
    name = str(key).replace("-", "_")
    specs = _specs()
    if name not in specs:
        owner = {other: spec.name for spec in specs.values() for other in (spec.name, *spec.metadata["aliases"])}
        hint = f"; did you mean {owner[name]!r}?" if name in owner else nearest(name, specs)
        raise UsageError(f"{where}unknown key {str(key)!r}{hint}")
    return specs[name]


def make_settings(values: Mapping[str, object]) -> Settings:
    """Build valid settings from names and values without their groups; what is not named has its default.

    Args:
        values: field names (dashes allowed) and values; numbers may be text.

    Raises:
        UsageError: for an unknown name, a value of a wrong type, and all that `validate` rejects.

    >>> make_settings({"mode": "sync", "nproc": 4, "learning-rate": "1e-4"}).optimization.learning_rate
    0.0001
    """
    grouped: dict[str, dict[str, Any]] = {field.name: {} for field in dataclasses.fields(Settings)}
    for key, value in values.items():
        spec = _known(key, "")
        grouped[spec.group][spec.name] = _convert(value, spec, spec.flag)
    groups: dict[str, Any] = {
        name: group_class(**grouped[name]) for name, group_class in typing.get_type_hints(Settings).items()
    }
    settings = Settings(**groups)
    validate(settings)
    return settings


def flatten(settings: Settings) -> dict[str, object]:
    """Return a new dict of all settings by field name, without their groups; the inverse of `make_settings`.

    >>> flatten(Settings())["seq_len"]
    128
    """
    return {spec.name: getattr(getattr(settings, spec.group), spec.name) for spec in _specs().values()}


def validate(settings: Settings) -> None:
    """Reject values out of bounds, settings that contradict each other and settings that would do nothing.

    `parse_settings` and `make_settings` have called this; call it again after `dataclasses.replace`.

    Raises:
        UsageError: with the value and what to type instead.

    >>> validate(Settings(job=Job(nproc=0)))
    Traceback (most recent call last):
        ...
    asyncsgd.errors.UsageError: --nproc must be 1 or more, got 0; type e.g. --nproc 4
    """
    values = flatten(settings)
    for spec in _specs().values():
        _check_value(spec, values[spec.name])
    for problem in _contradictions(settings):
        raise UsageError(problem)


def _check_value(spec: _Spec, value: Any) -> None:
    if spec.choices and value not in spec.choices:
        hint = nearest(str(value), spec.choices)
        raise UsageError(f"{spec.flag} must be one of {', '.join(spec.choices)}, got {value!r}{hint}")
    at_least, above, below = (spec.metadata[bound] for bound in ("at_least", "above", "below"))
    if value is None or (at_least is None and above is None and below is None):
        return
    # Written as "not inside" so that nan is rejected too.
    inside = (at_least is None or value >= at_least) and (above is None or value > above)
    if not (inside and (below is None or value < below)):
        wanted = f"{at_least} or more" if at_least is not None else f"more than {above}"
        wanted += f" and less than {below}" if below is not None else ""
        example = spec.metadata["example"]
        raise UsageError(f"{spec.flag} must be {wanted}, got {value}; type e.g. {spec.flag} {example}")


def _contradictions(settings: Settings) -> Iterator[str]:
    """Yield what is wrong between settings that are each within bounds, the first cause first."""
    job, budget, optimization = settings.job, settings.budget, settings.optimization
    mode, optimizer = job.mode, optimization.optimizer
    defaults = {name: spec.default for name, spec in _specs().items()}

    if mode == "single" and job.nproc > 1:
        yield f"--mode single has one worker, got --nproc {job.nproc}; type --nproc 1, --mode sync or --mode async"
    if job.accumulate > 1 and mode != "single":
        yield (
            f"--accumulate is for --mode single, got --mode {mode}; drop --accumulate, or type --mode single "
            f"--accumulate {job.accumulate}"
        )
    for name, owner in (("rule", "async"), ("transport", "async"), ("hogwild_state", "hogwild")):
        if mode != owner and getattr(job, name) != defaults[name]:
            yield f"{_flag(name)} is for --mode {owner}, got --mode {mode}; drop {_flag(name)}, or type --mode {owner}"
    if job.clock == "virtual" and mode != "async":
        yield f"--clock virtual is for --mode async, got --mode {mode}; type --mode async (--rule synchronous for sync)"
    if job.clock == "virtual" and job.transport != defaults["transport"]:
        yield "--transport does nothing with --clock virtual, which has no processes; drop it"
    if job.network is not None and job.clock != "virtual":
        yield "--network is for --clock virtual; real workers have the network they have; drop it"
    if job.speeds is not None and mode == "single":
        yield "--speeds is for several workers, got --mode single; drop it, or type --mode async"
    if optimizer == "sgd" and optimization.momentum == 0 and job.hogwild_state != defaults["hogwild_state"]:
        yield "--hogwild-state does nothing for --optimizer sgd without --momentum, which keeps no state; drop it"
    for name, owner in (("momentum", "sgd"), ("beta1", "adamw"), ("beta2", "adamw")):
        if optimizer != owner and getattr(optimization, name) != defaults[name]:
            yield (
                f"{_flag(name)} is for --optimizer {owner}, got --optimizer {optimizer}; drop {_flag(name)}, "
                f"or type --optimizer {owner}"
            )
    if budget.samples is None and optimization.schedule != "constant":
        yield (
            f"--schedule {optimization.schedule} needs a number of samples to stretch over; add --samples "
            f"{DEFAULT_SAMPLES}, or type --schedule constant"
        )
    if budget.samples == 0:
        for name in ("seconds", "target_loss"):
            if getattr(budget, name) is not None:
                yield f"{_flag(name)} does nothing with --samples 0, which trains nothing; drop one of the two"
    if settings.data.vocab_size != defaults["vocab_size"] and settings.model.model not in ("tiny", "small"):
        yield f"--vocab-size is for --model tiny and small; {settings.model.model!r} has its own tokenizer; drop it"
    built_in = settings.data.data == "pydocs" and settings.data.eval_data in (None, "pydocs")
    if built_in and settings.data.text_column != defaults["text_column"]:
        yield "--text-column does nothing for --data pydocs, which has no columns; drop it, or name other data"
    if settings.output.overwrite and settings.output.run_dir is None:
        yield "--overwrite does nothing without --run-dir, since every run gets a new folder; name the folder"
    if settings.output.run_dir is not None and settings.output.runs_dir != defaults["runs_dir"]:
        yield "--runs-dir does nothing when --run-dir names the run's folder; drop one of the two"


def to_yaml(settings: Settings, *, comment: str = "", places: bool = True) -> str:
    """Return all settings, defaults resolved, as YAML that ``--config`` reads back to equal settings.

    Args:
        settings: valid settings.
        comment: informative lines (version, command line) for the head of the file; readers ignore them.
        places: False leaves out ``cache_dir`` and the output group. A run folder is written so: given back with
            ``--config``, it must neither aim at the folder of the first run nor carry its ``--overwrite``.

    >>> to_yaml(Settings(), comment="a first run").splitlines()[:4]
    ['# a first run', '', '# what to run', 'mode: async']
    """
    import yaml

    # A control character would make the whole file unreadable, even in a comment.
    printable = ("".join(c if c.isprintable() else "?" for c in line) for line in comment.splitlines())
    blocks = ["".join(f"# {line}\n" for line in printable)] if comment else []
    for field in dataclasses.fields(Settings):
        values = dataclasses.asdict(getattr(settings, field.name))
        if not places:
            values = {name: value for name, value in values.items() if name not in _places()}
        if values:
            # allow_unicode would leave U+0085 unquoted, which reads back as a line break; escapes are exact.
            text = yaml.safe_dump(values, sort_keys=False, width=math.inf)
            blocks.append(f"# {field.metadata['title']}\n{text}")
    return "\n".join(blocks)


def load_yaml(path: str | Path) -> dict[str, object]:
    """Return the settings named in a YAML file, by field name and converted to their types; not yet validated together.

    Raises:
        UsageError: the file cannot be read, or has an unknown key, a key twice, or a value of a wrong type.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        # PyYAML keeps the last of two equal keys without a word, so the keys are counted on the node.
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        loaded = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{path} is not a YAML file: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(node, yaml.MappingNode) or not isinstance(loaded, dict):
        raise UsageError(f"{path} must hold lines like 'mode: async', got {type(loaded).__name__}")
    seen: set[str] = set()
    for key_node, _ in node.value:
        name = str(key_node.value).replace("-", "_")
        if name in seen:
            raise UsageError(f"{path}: key {name!r} is there twice; keep one")
        seen.add(name)
    values: dict[str, object] = {}
    for key, value in loaded.items():
        spec = _known(key, f"{path}: ")
        values[spec.name] = _convert(value, spec, f"{path}: {spec.name}")
    return values


def differing_keys(old: Mapping[str, object], new: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """Return ``(key, old value, new value)`` where two flat settings differ in what is run, not in where it is kept.

    A key that one of them lacks counts as None there.

    >>> differing_keys({"seed": 0, "runs_dir": "a"}, {"seed": 1, "runs_dir": "b"})
    [('seed', 0, 1)]
    """
    keys = [key for key in {**old, **new} if key not in _places()]
    return [(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def settings_hash(settings: Settings) -> str:
    """Return six hexadecimal digits that name a run: equal for equal settings, wherever the run is kept.

    >>> settings_hash(Settings()) == settings_hash(Settings(output=Output(runs_dir="elsewhere")))
    True
    """
    values = {
        # Converted, because Python code may have put 1 where 1.0 is meant; the two print differently.
        spec.name: _convert(value, spec, spec.flag)
        for spec, value in zip(_specs().values(), flatten(settings).values(), strict=True)
        if spec.name not in _places()
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]


class _Parser(argparse.ArgumentParser):
    """argparse with usage errors raised instead of printed, so that only one of several ranks needs to print them."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists every flag")


def build_parser(prog: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Return the parser of all settings plus ``--config``, ``--print-config``, ``--version`` and ``--help``.

    Parsed values are text as typed, and what was not typed is absent from the namespace: `parse_settings` does the
    rest. Usage errors raise `UsageError`.

    Args:
        prog: name of the program in the help.
        description: one or two sentences above the flags.
        examples: command lines for copy and paste, the end of the help.
    """
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [--FLAG VALUE ...]",
        description=description,
        epilog="examples:\n" + "".join(f"  {line.strip()}\n" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    metavars: Mapping[type, str] = {int: "N", float: "X", str: "TEXT"}
    groups = {field.name: parser.add_argument_group(field.metadata["title"]) for field in dataclasses.fields(Settings)}
    for spec in _specs().values():
        default = spec.metadata["unset"] if spec.default is None else spec.default
        if spec.kind is bool:
            groups[spec.group].add_argument(
                *spec.flags, dest=spec.name, action="store_true", help=spec.metadata["help"].replace("%", "%%")
            )
        else:
            # No choices= or type= here: files and flags are converted and checked by the same code, after merging.
            groups[spec.group].add_argument(
                *spec.flags,
                dest=spec.name,
                metavar="{" + ",".join(spec.choices) + "}" if spec.choices else metavars[spec.kind],
                help=f"{spec.metadata['help']} (default: {default})".replace("%", "%%"),
            )
    config = parser.add_argument_group("config")
    config.add_argument("--config", metavar="FILE.yaml", help="read settings from a file; flags override it")
    config.add_argument("--print-config", action="store_true", help="print all settings as YAML and exit")
    config.add_argument("--version", action="version", version=f"asyncsgd {__version__}", help="print it and exit")
    config.add_argument("-h", "--help", action="help", help="print this and exit")
    return parser


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A command line, understood: valid `settings`, and the names `given` by a flag or by the file."""

    settings: Settings
    given: frozenset[str]


def parse_settings(argv: Sequence[str], *, prog: str, description: str, examples: str) -> Parsed:
    """Merge defaults, ``--config`` file and flags, in rising precedence, into valid settings.

    ``none`` as the value of a flag takes a file's value back, where the setting may be left open. ``--help``,
    ``--version`` and ``--print-config`` print to stdout and exit with code 0; of several ranks, all do.

    Args:
        argv: the arguments without the program's name.
        prog: see `build_parser`, as for `description` and `examples`.

    Raises:
        UsageError: for everything the user has to type differently; the script prints it and exits with its code, 2.

    >>> parsed = parse_settings(["--seed", "3"], prog="train", description="", examples="")
    >>> parsed.settings.job.seed, sorted(parsed.given)
    (3, ['seed'])
    """
    parser = build_parser(prog, description, examples)
    namespace, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise UsageError(_unknown_argument(unknown))
    typed = vars(namespace)
    config, print_config = typed.pop("config", None), typed.pop("print_config", False)
    values = {} if config is None else load_yaml(config)
    for name, text in typed.items():
        spec = _specs()[name]
        left_open = spec.default is None and str(text).lower() == "none"
        values[name] = None if left_open else _convert(text, spec, spec.flag)
    try:
        settings = make_settings(values)
    except UsageError as error:
        if config is None:
            raise
        raise UsageError(f"{error} (settings of {config} and the command line together)") from error
    if print_config:
        print(to_yaml(settings), end="")
        raise SystemExit(0)
    return Parsed(settings, frozenset(values))


def _unknown_argument(unknown: Sequence[str]) -> str:
    flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
    if not flags:
        return f"unexpected argument {unknown[0]!r}; every setting is a flag, e.g. --mode async"
    known = [flag for spec in _specs().values() for flag in spec.flags]
    hint = nearest(flags[0], [*known, "--config", "--print-config", "--version", "--help"])
    return f"unknown flag {flags[0]}{hint or '; --help lists every flag'}"
