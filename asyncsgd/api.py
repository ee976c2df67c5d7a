"""The public functions: train a task, replay a run, look at one again.

    run = asyncsgd.train(Spirals(), rule=Ringmaster(threshold=4), runtime=Processes(4), samples=20_000, folder="runs/a")
    asyncsgd.train(Spirals(), runtime=Virtual(64, speeds=Exponential(1.0)), samples=20_000)   # another clock
    asyncsgd.replay("runs/a", Spirals()).identical

Scripts parse flags and do the same, see `asyncsgd.scripts.task`. Nothing here imports transformers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from asyncsgd.core.optimizers import AdamW, BuildOptimizer, OptimizerRecipe
from asyncsgd.core.schedules import Shape, check_shape
from asyncsgd.errors import UsageError
from asyncsgd.records.events import Evaluation, Record, read_events
from asyncsgd.rules.asynchronous import Asynchronous
from asyncsgd.rules.contract import Rule
from asyncsgd.run import runtimes
from asyncsgd.run.callbacks import Callback, check_callbacks
from asyncsgd.run.from_python import TrainedRun, saved_model, start, threads_as_before
from asyncsgd.run.recorded import summary_to_replay
from asyncsgd.run.replay import PreparedReplay, PreparedSimulation, Replayed, replayed
from asyncsgd.run.run import implied_rule, run_of, steps_of
from asyncsgd.run.written import Given, named_after, run_beside
from asyncsgd.settings.groups import Budget, Common, Job, Machine, Output, Steps, common_contradictions
from asyncsgd.settings.several_hosts import SeveralHosts
from asyncsgd.settings.specs import checked
from asyncsgd.settings.yaml_reader import EXPERIMENT, SIMULATION, read_of_run, read_settings
from asyncsgd.simulation.settings import read_simulation
from asyncsgd.tasks.base import Task

if TYPE_CHECKING:  # they take a second to import, which training should not
    import pandas

    from analysis.load import Study


def train(
    task: Task,
    *,
    rule: Rule | None = None,
    runtime: runtimes.Runtime | None = None,
    samples: int | None = None,
    epochs: float | None = None,
    seconds: float | None = None,
    target_loss: float | None = None,
    evaluations: int = 8,
    evaluate_every: int | None = None,
    evaluate_at: int | None = None,
    patience: int | None = None,
    keep_best: bool = False,
    batch_statistics: Literal["running", "reestimated"] = "running",
    statistics_batches: int | None = None,
    optimizer: BuildOptimizer | None = None,
    learning_rate: float | None = None,
    schedule: Literal["constant", "linear", "cosine"] | Shape | None = None,
    warmup: float | None = None,
    weight_decay: float | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    micro_batches: int = 1,
    gradient_checkpointing: bool = False,
    compile: bool = False,
    prefetch: int = 0,
    auto_batch: bool = False,
    folder: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    checkpoint_seconds: float | None = None,
    keep: int = 2,
    cache: str | Path | None = None,
    quiet: bool = False,
    report: Callable[[Record], None] | None = None,
    callbacks: Sequence[Callback] = (),
    track: str | None = None,
    hosts: SeveralHosts | None = None,
) -> TrainedRun:
    """Train a task; blocks until the budget is spent. Ctrl-C ends the run in good order, a second one at once.

    Args:
        task: what is learned; see `asyncsgd.Task`. If the runtime has several processes, the task's class must be in a
            file.
        rule: what the server does with an arriving gradient. None: `Asynchronous` with `Processes` and `Virtual`, and
            with the others the rule that they imply (`Synchronous` with `InProcess`).
        runtime: `InProcess()` (the default), `AllReduce(n)`, `Pipeline(n, stages)`, `Processes(n)`,
            `Hogwild(n)` or `Virtual(n)`.
        samples, seconds, target_loss: the budget. The first limit that is reached ends the run. Samples are counted
            over all workers. Seconds are those of the runtime's clock. `samples`, `epochs` or `seconds` must be given.
        epochs: passes over the training samples, in place of `samples`; rounded up to whole batches. `TensorData` and
            `DatasetData` know how many samples there are; else the task's `facts` say so.
        evaluations: how many, beside the one at the start; spread evenly over the budget.
        evaluate_every: samples between two evaluations, in place of `evaluations`; the last one is at the end.
        evaluate_at: after how many samples there is one more evaluation, e.g. to compare runs of unlike speed there.
        patience: stop after so many evaluations in a row without a new lowest loss.
        keep_best: whether the model with the lowest evaluation loss is kept beside the last one.
        batch_statistics: what is evaluated of layers that track statistics of their batches, such as BatchNorm: their
            running ones, or ones that are estimated again at the evaluated parameters, before each evaluation.
        statistics_batches: training batches from which they are estimated again; None: 20.
        optimizer: `AdamW()` (the default), `SGD(momentum)`, or any function from parameter groups to a torch optimizer,
            e.g. ``torch.optim.Adafactor``. It is given the model's tensors in two groups, matrices first. Learning rate
            and weight decay are those of this call.
        learning_rate: the peak learning rate. None: 0.1 with `SGD`; else what the task states in its `Defaults`, or
            1e-3.
        schedule: how the learning rate falls after the peak, by name; None: the task's, else ``constant``. Or a
            function that is defined in a file, not in a console: it is given how far the run is past
            its warm-up, from 0 at the end of that to 1 at the end of the run, and returns the rate as a share of the
            peak.
        warmup: over how many samples the rate rises linearly to the peak; below 1 it is a share of the run's samples.
            None: the task's, else no warm-up.
        weight_decay: on matrices only, as the optimizer defines it. None: the task's, else 0.
        clip_norm: the largest norm of what the optimizer is given, which is a gradient or what the rule makes of
            several; a longer one is scaled down to it. 0: no clipping. None: the task's, else 0.
        seed: decides the initial model, the order of the data and dropout.
        device: ``auto`` takes cuda where there is one.
        precision: of forward passes: ``fp32``, or under autocast ``bf16`` or ``fp16``. Parameters are float32.
        micro_batches: parts of a batch that are computed one after the other, so that a batch need not fit in memory
            as a whole. The task's `split` cuts it.
        gradient_checkpointing: compute activations again in the backward pass, for less memory. The model needs a
            method `gradient_checkpointing_enable`, as those of transformers have.
        compile: `torch.compile` the loss. Gradients are faster, after a first one that may take a minute.
        prefetch: batches that a thread makes ahead of each worker. Results are the same to the bit. Not for `Virtual`.
        auto_batch: try before training in how few parts a batch fits in memory, and compute it in those. The summary's
            `micro_batches` is the number.
        folder: a new folder for the run's records and model. None: nothing is written.
        resume: whether a run that is in `folder` already goes on from its last checkpoint. All arguments must be those
            of the run; only `samples`, `epochs` and `micro_batches` may grow. Where the folder holds no run yet, one is
            begun.
        checkpoint_every, checkpoint_seconds: samples and real seconds between two checkpoints. With either, one is
            written at the end too. Both None: one is written only when the run is interrupted.
        keep: how many checkpoints are kept, beside the one with the best evaluation loss.
        cache: where the task keeps what it prepares. None: the user's cache folder.
        quiet: print nothing.
        report: called with every record, in order.
        callbacks: called with a `Look` at every evaluation, the first one before training among them: the record, and a
            copy of the model. Numbers that a callback returns by name are metrics of the evaluation; with
            ``look.stop(reason)`` it ends the run. The training clock stands still meanwhile.
        track: where else to show the run, e.g. ``tensorboard`` or ``tensorboard,mlflow``; see docs/running.md. Needs a
            folder.
        hosts: how hosts meet, if torchrun has started this script on several; not used on one host. None: with the
            token of the variable ``ASYNCSGD_TOKEN``; see docs/machines.md.

    Returns:
        The run, of which `TrainedRun.status` says how it ended: also one that diverged, or that Ctrl-C has ended.

    Raises:
        UsageError: if the arguments or the task must be changed; the message says how.
        RunError: if the run failed, e.g. all workers were lost, the disk or the memory is full, or a file could
            not be read. Other exceptions of the task come through.

    >>> import torch
    >>> from asyncsgd import TensorData, seeded
    >>> @dataclasses.dataclass(frozen=True)
    ... class Line(Task):
    ...     name = "line"
    ...     batch_size: int = 10
    ...     def model(self, seed):
    ...         with seeded(seed):
    ...             return torch.nn.Linear(1, 1)
    ...     def data(self, seed):
    ...         x = torch.linspace(-1.0, 1.0, 40).unsqueeze(1)
    ...         return TensorData((x, 3 * x), (x, 3 * x), self.batch_size, seed)
    ...     def outputs(self, model, batch):
    ...         return model(batch[0])
    ...     def loss(self, outputs, batch):
    ...         return (outputs - batch[1]).square().mean()
    >>> run = train(Line(), samples=2_000, learning_rate=0.05, quiet=True)
    >>> run.evaluations[0].loss > 10 * run.evaluations[-1].loss
    True
    """
    runtime = runtime or runtimes.InProcess()
    for argument, given, kind, example in (
        ("task", task, Task, "MyTask()"),
        ("rule", rule or Asynchronous(), Rule, "asyncsgd.Ringmaster(threshold=4)"),
        ("runtime", runtime, runtimes.Runtime, "asyncsgd.Processes(4)"),
        ("hosts", hosts or SeveralHosts(), SeveralHosts, "asyncsgd.SeveralHosts(mirror=1)"),
    ):
        if not isinstance(given, kind):
            raise UsageError(f"{argument} must be an object such as {example}, got {given!r}")
    if samples is None and epochs is None and seconds is None:
        raise UsageError("a run needs an end; give samples=10_000 or seconds=60")
    if folder is None and (resume or checkpoint_every is not None or checkpoint_seconds is not None):
        raise UsageError("checkpoints are kept in the run's folder, and there is none; give folder=...")
    has_samples = samples is not None or epochs is not None  # else no rate falls, since its end is not known
    defaults = task.defaults
    recipe = OptimizerRecipe(
        optimizer or AdamW(),
        defaults.weight_decay if weight_decay is None else weight_decay,
        defaults.clip_norm if clip_norm is None else clip_norm,
    )
    job = checked(Job, seed=seed)
    job = dataclasses.replace(job, **runtimes.job_of(runtime))  # mode, clock, number of workers, ...
    budget = checked(
        Budget,
        samples=samples,
        epochs=epochs,
        seconds=seconds,
        target_loss=target_loss,
        evaluations=evaluations,
        evaluate_every=evaluate_every,
        evaluate_at=evaluate_at,
        patience=patience,
        keep_best=keep_best,
        batch_statistics=batch_statistics,
        statistics_batches=statistics_batches,
    )
    shape = None
    schedule_name: str = defaults.schedule_of(has_samples)
    if isinstance(schedule, str):
        schedule_name = schedule
    elif schedule is not None:
        shape = schedule
        check_shape(shape)
        schedule_name = "constant"  # `named_after` puts the name of the function in its place
    steps = checked(
        Steps,
        **steps_of(recipe.build),
        learning_rate=defaults.rate(str(recipe)) if learning_rate is None else learning_rate,
        schedule=schedule_name,
        warmup=defaults.warmup_of(has_samples) if warmup is None else warmup,
        weight_decay=recipe.weight_decay,
        clip_norm=recipe.clip_norm,
    )
    if shape is not None:
        steps = named_after(steps, shape)
    machine = checked(
        Machine,
        device=device,
        precision=precision,
        threads=runtime.threads,
        micro_batches=micro_batches,
        gradient_checkpointing=gradient_checkpointing,
        compile=compile,
        prefetch=prefetch,
        auto_batch=auto_batch,
    )
    meeting = hosts or SeveralHosts()
    output = checked(
        Output,
        checkpoint_every=checkpoint_every,
        checkpoint_seconds=checkpoint_seconds,
        keep=keep,
        cache_dir=None if cache is None else str(cache),
        track=track,
        token_file=None if meeting.token_file is None else str(meeting.token_file),
        trust_network=meeting.trust_network,
        interface=meeting.interface,
        worker_deadline=meeting.worker_deadline,
        mirror=meeting.mirror,
    )
    rule = rule_of(rule, runtime)
    if runtime.follows_rule:
        job = dataclasses.replace(job, rule=str(rule))
    settings = Common(job, budget, steps, machine, output)
    for problem in common_contradictions(settings, task.batch_size):
        raise UsageError(problem)
    # "train" is the name of the experiment, which the summary has; scripts have that of their task.
    run = run_of("train", settings, task=task, runtime=runtime, rule=rule, optimizer=recipe.build, shape=shape)
    run.check_optimizer()
    if track is not None and folder is None:
        raise UsageError(f"track={track!r} needs a folder, whose settings it shows; give folder='runs/NAME'")
    check_callbacks(callbacks)
    where = None if folder is None else Path(folder)
    return start(run, where, resume=resume, quiet=quiet, report=report, callbacks=callbacks)


def replay(
    folder: str | Path,
    task: Task | type[Task] | None = None,
    *,
    rule: Rule | None = None,
    optimizer: BuildOptimizer | None = None,
    schedule: Shape | None = None,
    cache: str | Path | None = None,
) -> Replayed:
    """Run a recorded run again in this process, arrival by arrival, and compare every loss and the final parameters.

    In the environment of the run all bits must be equal. In another one (processor, torch's build, threads, GPU) they
    are compared as far as rounding allows it; see `Replayed` and `asyncsgd.backends.rounding`.

    Args:
        folder: of a run that `train` or a script has written.
        task: the task of the run, or its class, whose fields are then the folder's. Needed if it is none of the
            library's own: a folder is data, and what it names is not imported. Where a task that is given has another
            class or other fields than the folder names, this is said, and the task that is given is taken.
        rule, optimizer, schedule: those of the run. Needed if they are not the library's.
        cache: as in `train`.

    Raises:
        UsageError: if the run cannot be replayed; the message gives the reason.
    """
    folder = Path(folder)
    settings = read_settings(folder)
    summary = summary_to_replay(folder)
    if settings.get(EXPERIMENT) == SIMULATION:
        return replayed(PreparedSimulation(read_simulation(settings), folder, summary))[0]
    given = Given(task, rule, optimizer, schedule, None if cache is None else str(cache))
    run = run_beside(folder, given)
    with threads_as_before():
        return replayed(PreparedReplay(run, folder, summary))[0]


def load_run(folder: str | Path, task: Task | type[Task] | None = None) -> TrainedRun:
    """Read a run that `train` or a script has written.

    Args:
        folder: of the run.
        task: as in `replay`. `TrainedRun.model` needs it if it is none of the library's own.

    Raises:
        UsageError: if the folder holds no finished run.
    """
    folder = Path(folder)
    summary = read_of_run(folder, "summary.json")
    records = read_events(folder / "events.jsonl")
    evaluations = tuple(Evaluation.of(record) for record in records if record["kind"] == "evaluate")
    return TrainedRun(summary, evaluations, folder, functools.partial(saved_model, folder, task))


def load(folder: str | Path, arms: Sequence[str] = ()) -> Study:
    """Read a folder as a study: one that `study` made, one with single runs at any depth, or that of one run.

    Args:
        folder: the folder of the study.
        arms: names of the settings in which the arms are meant to differ, such as learning_rate. Only for single runs;
            the plan of a study has them.

    Returns:
        The study, whose `runs`, `curves` and `tests` are DataFrames with the columns of docs/tables.md.

    Raises:
        UsageError: if there is no run in it.
    """
    from analysis.load import load

    return load(folder, arms)


def compare(
    a: Sequence[float],
    b: Sequence[float],
    margin: float | None = None,
    *,
    lower_is_better: bool = True,
    alpha: float = 0.05,
) -> pandas.Series:
    """The exact sign-flip test of paired numbers, and the equivalence test within ± `margin`, as a study is judged.

    Args:
        a, b: one number a pair, in the same order, or two Series with the same labels, which pair them; inf for a run
            that diverged (-inf of a score).
        margin: of equivalence, in their unit; None: it is not tested.
        lower_is_better: as of a loss.
        alpha: the significance level at which the column `word` judges, above 0 and below 0.5.

    Returns:
        A row of `Study.tests`: estimate (the mean of a - b), low and high (its confidence interval), p, word (the
        verdict, such as better or equivalent), reason and the others; see docs/tables.md. p
        depends neither on the order of the pairs nor on which of the two is named first.

    Raises:
        ValueError: if something is no number, or the labels of two Series differ.
    """
    from analysis.load import compare

    return compare(a, b, margin, lower_is_better=lower_is_better, alpha=alpha)


def rule_of(rule: Rule | None, runtime: runtimes.Runtime) -> Rule:
    """The rule of a run, where the user may have given none.

    Raises:
        UsageError: if `rule` is not the one that the runtime implies.
    """
    if runtime.follows_rule:
        return rule or Asynchronous()
    default = implied_rule(runtime)
    if rule is not None and rule != default:
        name = type(runtime).__name__
        raise UsageError(f"{name} is {default.name} by definition, and rule={rule} would do nothing; drop it")
    return default
