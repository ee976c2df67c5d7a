"""The settings of a training run: frozen dataclasses that are the one source of flags, YAML keys, help and defaults.

Standard library only (PyYAML is imported when a file is read or written), so that ``--help`` answers at once.

A component is given the group it needs (`Steps`, `Budget`, ...), never all settings. Precedence is
default < ``--config`` file < flag. A setting that differs from its default and would do nothing in the run is an
error. What a task adds of its own are the fields of its class; see `asyncsgd.settings.task`.
"""
# ruff: noqa: RUF009 - the calls in the dataclasses' defaults are `setting` and `group`, which return dataclasses.field

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from asyncsgd.errors import UsageError
from asyncsgd.records.trackers import CHOICES as TRACKERS
from asyncsgd.records.trackers import names_in
from asyncsgd.settings.specs import flag_of, group, setting, specs_of

Mode = Literal["single", "sync", "async", "hogwild", "pipeline"]
PipelineSchedule = Literal["1f1b", "gpipe", "2bw", "deepspeed"]
Transport = Literal["auto", "shared_memory", "process_group"]
HogwildState = Literal["worker", "shared"]
OptimizerName = Literal["sgd", "adamw"]
Schedule = Literal["constant", "linear", "cosine"]
Sampling = Literal["group_by_length", "random"]
Quoting = Literal["standard", "none"]
Units = Literal["lines", "paragraphs"]
EvalData = str | tuple[str, ...]
"""What ``--eval-data`` holds: one set, or several, each ``PATH`` or ``NAME=PATH``."""
Clock = Literal["measured", "virtual"]
Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]
BatchStatistics = Literal["running", "reestimated"]

DEFAULT_SAMPLES = 9600
MOST_PROCESSES = 1024
STATISTICS_BATCHES = 20
"""Training batches from which the statistics of BatchNorm are estimated again."""

SGD_LEARNING_RATE = 0.1
"""Of every task; SGD's steps have another length than those of AdamW."""

SAMPLING = "group_by_length: samples of a batch are of about one length, which is fast; random: of any length"
"""Help of a setting that tasks have."""
FIRST = 1
"""The number of the order of samples of a run that says none; see `asyncsgd.data.order`."""
NEWEST = 2
"""That of new runs."""
SAMPLE_ORDER = "2: an epoch is a pass over all samples; 1: it is cut to whole groups of 8 batches, as in earlier runs"
"""Help of a setting that tasks have; see `asyncsgd.data.order`."""
EVAL_DATA = "a set to score on, PATH or NAME=PATH; several times: several sets, of which the first one decides"
SPLIT = "what to score on: test, validation or another set of the data, or several as matched,mismatched"
ENCODING = "of the data's text files, e.g. latin-1"
QUOTING = "standard: a quotation mark around a field of a .csv or .tsv file is no part of it; none: it is a character"
QUOTING_UNSET = "standard for .csv, none for .tsv"
"""Help of settings that tasks on files have."""
PAIRS = "pydocs:pairs"
BUILT_IN = ("pydocs", PAIRS)
"""What ``--data`` calls the built-in documentation: its texts, and pairs of them."""
TRAINED_HERE: tuple[str, ...] = ("tiny", "small", "tiny-distilbert")
"""The models that are made here and read text in both directions, by what ``--model`` calls them."""
BLOCKS = "join all texts and cut blocks of --seq-len tokens, instead of cutting each text by itself"
"""Help of a setting that tasks on running text have."""


@dataclasses.dataclass(frozen=True)
class Defaults:
    """How a task is trained unless somebody says otherwise, by a script as by `asyncsgd.train`. The last three are for
    scripts: whoever calls `train` says how long.

    >>> Defaults(learning_rate=0.01).schedule
    'constant'
    """

    learning_rate: float = 1e-3
    """Of AdamW, and of optimizers that the library does not know. SGD has `SGD_LEARNING_RATE`."""
    schedule: Schedule = "constant"
    """For a run of so many samples; one that has no number of them has a constant rate."""
    warmup: float = 0
    """Samples, or below 1 a share of them."""
    weight_decay: float = 0.0
    """Of matrices, as the optimizer defines it."""
    clip_norm: float = 0.0
    """0: no clipping."""
    samples: int | None = DEFAULT_SAMPLES
    """That arrive, over all workers; the budget."""
    epochs: float | None = None
    """In place of `samples`."""
    evaluations: int = 8
    """Beside the one at the start."""

    def rate(self, optimizer: str) -> float:
        """The learning rate under the optimizer that settings call ``sgd``, ``adamw``, ..."""
        return SGD_LEARNING_RATE if optimizer == "sgd" else self.learning_rate

    def warmup_of(self, has_samples: bool) -> float:
        """The warm-up of a run with or without a number of samples, of which alone it can be a share."""
        return self.warmup if has_samples or self.warmup >= 1 else 0

    def schedule_of(self, has_samples: bool) -> Schedule:
        """The schedule of a run with or without a number of samples."""
        return self.schedule if has_samples else "constant"


OF_TRANSFORMERS: Defaults = Defaults(5e-4, "linear", 640, 0.01, 1.0)
"""Of the library's own tasks."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Which algorithm runs on how many workers. `mode` is None only until it is part of a `Job`.

    >>> Job().mode, Job(nproc=2).mode
    ('single', 'async')
    """

    mode: Mode = setting(
        None,
        "single: one worker; sync: all-reduce; async: parameter server; hogwild: no lock; "
        "pipeline: a model cut into stages",
        unset="single; async for several workers, --rule or --clock virtual",
    )
    nproc: int = setting(
        1,
        "gradient workers, in every mode; in mode pipeline processes, a stage on each",
        at_least=1,
        aliases=("nproc_per_node", "nprocs", "workers"),
    )
    rule: str = setting(
        "asynchronous", "what the server does with an arriving gradient, as NAME[:key=value,...]; mode async only"
    )
    clock: Clock = setting(
        "measured", "measured: real processes; virtual: one process, with times drawn from --times; mode async only"
    )
    speeds: str | None = setting(
        None,
        "how long gradients take, as NAME[:value,key=value,...]; real workers wait until it has passed",
        unset="as long as they take; with --clock virtual constant:1, a second each",
        aliases=("times",),
    )
    network: str | None = setting(
        None,
        "bytes=B,worker=RATE,server=RATE, the rates in bytes a second; --clock virtual only",
        unset="transfers take no time",
    )
    churn: str | None = setting(
        None,
        "who leaves and joins when, as leave:worker=N,seconds=S;join:...; --clock virtual only",
        unset="all workers stay from beginning to end",
    )
    stages: int | None = setting(
        None, "parts that the model is cut into; mode pipeline only", unset="one for each process", at_least=2
    )
    pipeline_schedule: PipelineSchedule = setting(
        "1f1b", "1f1b, gpipe, deepspeed: synchronous; 2bw: asynchronous, gradients one update old; mode pipeline only"
    )
    deepspeed_config: str | None = setting(
        None,
        "configuration of DeepSpeed; --pipeline-schedule deepspeed only",
        unset="as ds_config.json, a config of the package",
    )
    data_parallel: bool = setting(
        False, "compute a batch on all GPUs of one process, as torch.nn.DataParallel does; mode single only"
    )
    accumulate: int = setting(1, "batches per update; mode single only", at_least=1)
    transport: Transport = setting("auto", "how gradients travel between workers and server; mode async only")
    hogwild_state: HogwildState = setting(
        "worker", "optimizer state of each worker, or one shared by all; mode hogwild only"
    )
    seed: int = setting(0, "of the initial model, the order of the data and the masks", at_least=0, below=2**32)

    def __post_init__(self) -> None:
        if self.mode is None:
            is_async = self.nproc != 1 or self.clock == "virtual" or self.rule != "asynchronous"
            object.__setattr__(self, "mode", "async" if is_async else "single")


@dataclasses.dataclass(frozen=True)
class Budget:
    """When training ends and how often the model is evaluated; the first limit that is reached ends the run.

    `samples` is None where `epochs` says how long, or only `seconds` limits the run. Evaluations are spread evenly over
    the samples, or over `seconds` where they are the only limit. With `evaluate_every` they come after every so many
    samples, and at the end. `evaluate_at` adds one evaluation after so many samples.

    `batch_statistics` is None where running statistics are evaluated, or a model has none.

    >>> Budget(batch_statistics="reestimated").statistics_batches, Budget(batch_statistics="running").batch_statistics
    (20, None)
    """

    samples: int | None = setting(
        None,
        "sequences to train on, over all workers; 0: evaluate the model and stop",
        unset=f"{DEFAULT_SAMPLES}, or no limit with --seconds",
        at_least=0,
    )
    epochs: float | None = setting(
        None,
        "passes over the training samples, in place of --samples; rounded up to whole batches",
        unset="as --samples says",
        above=0,
    )
    evaluations: int = setting(8, "evaluations after the first, evenly over the budget", at_least=1, at_most=1_000_000)
    evaluate_every: str | None = setting(
        None, "samples between two evaluations, or e.g. 1epoch", unset="as --evaluations says", or_number=True
    )
    evaluate_at: int | None = setting(
        None, "samples of one more evaluation, e.g. to compare runs of unlike speed there", unset="none", at_least=1
    )
    patience: int | None = setting(
        None, "stop after so many evaluations in a row without a new lowest evaluation loss", unset="never", at_least=1
    )
    keep_best: bool = setting(False, "keep the model with the lowest evaluation loss beside the last one")
    seconds: float | None = setting(None, "seconds of training, evaluations not counted", unset="no limit", above=0)
    target_loss: float | None = setting(None, "stop when the evaluation loss is this low", unset="no target")
    batch_statistics: BatchStatistics | None = setting(
        None,
        "of BatchNorm what is evaluated: running statistics, or reestimated ones at the evaluated parameters",
        unset="running",
    )
    statistics_batches: int | None = setting(
        None,
        "training batches to estimate them from; --batch-statistics reestimated only",
        unset=f"{STATISTICS_BATCHES}",
        at_least=1,
    )

    def __post_init__(self) -> None:
        if self.batch_statistics == "running":
            object.__setattr__(self, "batch_statistics", None)
        if self.batch_statistics is not None and self.statistics_batches is None:
            object.__setattr__(self, "statistics_batches", STATISTICS_BATCHES)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The optimizer, and the form of its learning rate over the run.

    `learning_rate` and `schedule` are declared with the types that they have inside a `Common`, which fills them in.
    They are None only where they were built without them and are not yet part of a `Common`.
    """

    optimizer: OptimizerName = setting("adamw", "update rule at the server")
    learning_rate: float = setting(None, "peak learning rate", unset="5e-4 for adamw, 0.1 for sgd", above=0)
    schedule: Schedule = setting(
        None, "learning rate after the warmup", unset="linear, or constant when --samples sets no limit"
    )
    warmup: float = setting(
        640,
        "samples until the learning rate reaches its peak; below 1 a share of the samples",
        at_least=0,
        or_whole=True,
    )
    weight_decay: float = setting(0.01, "decoupled for adamw, L2 for sgd", at_least=0)
    momentum: float = setting(0.0, "sgd only", at_least=0, below=1)
    beta1: float = setting(0.9, "adamw only", at_least=0, below=1)
    beta2: float = setting(0.999, "adamw only", at_least=0, below=1)
    clip_norm: float = setting(1.0, "gradients longer than this are shortened to it; 0: never", at_least=0)


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the run computes with."""

    device: Device = setting("auto", "auto takes cuda where there is one")
    precision: Precision = setting("fp32", "number format of the forward and backward pass")
    threads: int = setting(1, "CPU threads per worker, the same for every number of workers", at_least=1)
    micro_batches: int = setting(
        1, "parts of a batch, computed one after the other: less memory for the same gradient", at_least=1
    )
    gradient_checkpointing: bool = setting(
        False, "compute activations again in the backward pass: less memory, more time"
    )
    compile: bool = setting(False, "torch.compile the loss: faster gradients after a first one that takes a minute")
    prefetch: int = setting(0, "batches that a thread makes ahead of each worker", at_least=0)
    auto_batch: bool = setting(False, "find out before training in how few parts a batch fits in memory")


@dataclasses.dataclass(frozen=True)
class Output:
    """Where the run is written and prepared data are kept, and how hosts meet; nothing here changes a result."""

    runs_dir: str = setting("runs", "folder in which the run gets a folder of its own")
    run_dir: str | None = setting(
        None, "the run's folder itself", unset="named after the settings, in --runs-dir", aliases=("model_save_dir",)
    )
    overwrite: bool = setting(False, "run again where a run is already; the earlier one is kept as NAME.before-N")
    resume: str | None = setting(
        None,
        "go on with the run in this folder, from its last checkpoint; --samples, --epochs, --micro-batches may grow",
        unset="begin a new run",
        run=True,
    )
    checkpoint_every: str | None = setting(
        None,
        "samples between two checkpoints, or e.g. 1epoch",
        unset="only when Ctrl-C, SIGTERM or SIGHUP stops the run",
        or_number=True,
    )
    checkpoint_seconds: float | None = setting(
        None, "seconds between two checkpoints", unset="only when Ctrl-C, SIGTERM or SIGHUP stops the run", above=0
    )
    keep: int = setting(2, "checkpoints to keep; the best by evaluation loss stays beside them", at_least=1)
    find_batch_size: bool = setting(
        False, "train nothing; find the largest batch that fits in memory, and say what to type"
    )
    profile: int | None = setting(
        None, "trace so many gradients of worker 0 with torch.profiler", unset="no trace", at_least=1
    )
    track: str | None = setting(
        None, "where else to show the run; several with commas", unset="nowhere else", named=TRACKERS
    )
    cache_dir: str | None = setting(None, "folder for prepared data", unset="the user's cache folder")
    token_file: str | None = setting(
        None, "file with the token that all hosts have; several hosts only", unset="the variable ASYNCSGD_TOKEN"
    )
    trust_network: bool = setting(False, "do without a token, on a network of your own; several hosts only")
    interface: str | None = setting(
        None, "network interface to the other hosts; several hosts only", unset="that of the way to each host"
    )
    worker_deadline: float | None = setting(
        None,
        "seconds without a sign of life after which another host is lost, and its workers; several hosts only",
        unset="60",
        above=0,
    )
    mirror: int | None = setting(
        None,
        "host that gets a copy of each checkpoint, by torchrun's --node-rank; several hosts only",
        unset="no host",
        at_least=1,
    )


@dataclasses.dataclass(frozen=True)
class Common:
    """The settings that every training has, whatever its task; defaults that depend on others are filled in.

    `learning_rate` follows the optimizer and the task. The task says how long a run is that nothing else limits.
    `schedule` is the task's if there is a number of samples to stretch it over, and otherwise constant. Bounds are
    checked by `Flags.make`, not here.
    """

    defaults = OF_TRANSFORMERS
    """Of the task. It has no annotation, since all that have one are groups of settings."""

    job: Job = group(Job, "what to run")
    budget: Budget = group(Budget, "budget")
    optimization: Steps = group(Steps, "optimizer")
    machine: Machine = group(Machine, "machine")
    output: Output = group(Output, "output")

    def __post_init__(self) -> None:
        budget = self.budget
        optimization = self.optimization
        defaults = self.defaults
        if budget.samples is None and budget.epochs is None and budget.seconds is None:
            budget = dataclasses.replace(budget, samples=defaults.samples, epochs=defaults.epochs)
        has_samples = budget.samples is not None or budget.epochs is not None
        if optimization.schedule is None:
            optimization = dataclasses.replace(optimization, schedule=defaults.schedule_of(has_samples))
        if optimization.warmup == defaults.warmup:
            optimization = dataclasses.replace(optimization, warmup=defaults.warmup_of(has_samples))
        if optimization.learning_rate is None:
            learning_rate = defaults.rate(optimization.optimizer)
            optimization = dataclasses.replace(optimization, learning_rate=learning_rate)
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "optimization", optimization)


MEANINGFUL_FOR: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "clock": ("mode", ("async",)),
    "rule": ("mode", ("async",)),
    "transport": ("mode", ("async",)),
    "speeds": ("mode", ("async", "sync", "hogwild")),
    "hogwild_state": ("mode", ("hogwild",)),
    "stages": ("mode", ("pipeline",)),
    "pipeline_schedule": ("mode", ("pipeline",)),
    "data_parallel": ("mode", ("single",)),
    "accumulate": ("mode", ("single",)),
    "deepspeed_config": ("pipeline_schedule", ("deepspeed",)),
    "network": ("clock", ("virtual",)),
    "churn": ("clock", ("virtual",)),
    "statistics_batches": ("batch_statistics", ("reestimated",)),
    "momentum": ("optimizer", ("sgd",)),
    "beta1": ("optimizer", ("adamw",)),
    "beta2": ("optimizer", ("adamw",)),
}
"""A setting, and which values of another one it is for."""
IDLE_BESIDE: Mapping[str, tuple[str, ...]] = {
    "clock": ("transport",),
    "run_dir": ("runs_dir",),
    "resume": ("run_dir", "overwrite"),
    "trust_network": ("token_file",),
    "find_batch_size": ("resume", "run_dir", "overwrite", "profile", "track", "checkpoint_every", "checkpoint_seconds"),
}
"""A setting, and those that do nothing where it is given."""
IDLE_WITHOUT_TRAINING = ("seconds", "target_loss", "evaluate_every", "evaluate_at", "patience", "keep_best")
_EVERY = re.compile(r"[1-9][0-9]{0,11}|(?=[0.]*[1-9])[0-9]{0,6}\.?[0-9]{1,6}epoch")
"""A number of samples, or of epochs, more than 0."""


def common_contradictions(settings: Common, batch_size: int) -> Iterator[str]:
    """Yield what is wrong between settings that are each within bounds, in batches of `batch_size` samples."""
    parts = (settings.job, settings.budget, settings.optimization, settings.machine, settings.output)
    values: dict[str, Any] = {}
    for part in parts:
        values |= vars(part)
    given = set()
    for kind in (Job, Budget, Steps, Machine, Output):
        for name, spec in specs_of(kind).items():
            if values[name] != spec.default:
                given.add(name)

    def typed(name: str) -> str:
        value = values[name]
        if value is True:
            return flag_of(name)
        return f"{flag_of(name)} {'none' if value is None else value}"

    def idle(names: Iterable[str], beside: str) -> Iterator[str]:
        for name in filter(given.__contains__, names):
            yield f"{typed(name)} does nothing with {typed(beside)}; drop one of the two"

    job = settings.job
    budget = settings.budget
    steps = settings.optimization
    cuts = settings.machine.micro_batches
    if job.mode == "single" and job.nproc > 1:
        yield f"--mode single has one worker, got --nproc {job.nproc}; type --nproc 1, --mode sync or --mode async"
    if job.clock != "virtual":
        check_processes(job.nproc)
    for name, (other, allowed) in MEANINGFUL_FOR.items():
        if name in given and values[other] not in allowed:
            yield f"{typed(name)} is for {flag_of(other)} {' or '.join(allowed)}, got {typed(other)}; drop one of them"
    for beside, names in IDLE_BESIDE.items():
        if beside in given:
            yield from idle(names, beside)
    if budget.samples == 0:
        yield from idle(IDLE_WITHOUT_TRAINING, "samples")
    if "overwrite" in given and "run_dir" not in given:
        yield "--overwrite does nothing without --run-dir, since every run gets a new folder; name the folder"
    if "hogwild_state" in given and steps.optimizer == "sgd" and steps.momentum == 0:
        yield "--hogwild-state does nothing for --optimizer sgd without --momentum, which keeps no state; drop it"
    if "prefetch" in given and job.clock == "virtual":
        yield (
            f"{typed('prefetch')} guesses a worker's next batch, and on the virtual clock one process computes the "
            f"batches of all workers in the order in which drawn times let them arrive; drop --prefetch"
        )
    if cuts > batch_size:
        yield f"--micro-batches {cuts} cuts a batch into more parts than its {batch_size} samples; type fewer"
    if job.mode == "pipeline" and batch_size % cuts:
        yield f"--micro-batches {cuts} of a pipeline have one size: it must divide --batch-size {batch_size}"
    if budget.epochs is not None and budget.samples is not None:
        yield f"{typed('epochs')} and {typed('samples')} both say how long; drop one (--samples none takes it back)"
    for name in ("evaluate_every", "checkpoint_every"):
        if name in given and not _EVERY.fullmatch(values[name]):
            flag = flag_of(name)
            yield f"{flag} must be a number of samples from 1 up, or of epochs, got {values[name]!r}; type e.g. 1epoch"
    if budget.evaluate_every is not None and budget.evaluations != settings.defaults.evaluations:
        yield f"{typed('evaluations')} and {typed('evaluate_every')} both say when to evaluate; drop one of the two"
    if budget.patience is not None and budget.evaluate_every is None and budget.patience >= budget.evaluations:
        yield f"{typed('patience')} ends no run of {typed('evaluations')}; type more evaluations"
    if budget.samples is None and budget.epochs is None:
        if 0 < steps.warmup < 1:
            yield f"{typed('warmup')} is a share of the samples, and there is no number of them; add --samples"
        if steps.schedule != "constant":
            yield f"{typed('schedule')} needs a number of samples to stretch over; add --samples"
    names_in(settings.output.track)  # refuses


def check_processes(number: int) -> None:
    """Refuse more workers than there may be processes.

    Raises:
        UsageError: naming the most.
    """
    if number > MOST_PROCESSES:
        raise UsageError(
            f"--nproc {number} would be as many processes; {MOST_PROCESSES} is the most, but with --clock virtual"
        )
