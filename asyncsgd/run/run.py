"""What a run is. Flags, YAML and `asyncsgd.train` make a `Run`; `asyncsgd.run.lifecycle` carries it out.

Imports torch; the groups of settings that it holds are in `asyncsgd.settings.groups`, which does not."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncsgd.core.checkpoints import Policy
from asyncsgd.core.flat import FlatModel, Layout
from asyncsgd.core.limits import Limits
from asyncsgd.core.optimizers import SGD, AdamW, BuildOptimizer, OptimizerRecipe
from asyncsgd.core.peers import check_virtual
from asyncsgd.core.schedules import SHAPES, Shape, WarmupSchedule
from asyncsgd.errors import UsageError
from asyncsgd.records.machine import available_cores
from asyncsgd.rules import Asynchronous, FixedDelay, Synchronous, parse_rule
from asyncsgd.rules.contract import PeerRule, Rule
from asyncsgd.run.found import Received
from asyncsgd.run.runtimes import Runtime, Virtual, processes_on_this_host, runtime_of
from asyncsgd.settings import groups
from asyncsgd.tasks.base import Task
from asyncsgd.worker.evaluation import reestimate
from asyncsgd.worker.profile import Profile, ProfiledWorker
from asyncsgd.worker.worker import Worker

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training, whoever asked for it.

    Raises:
        UsageError: for parts that do not go together; the message says what to type.
    """

    name: str
    """The name of the experiment in the records and in the name of the folder."""
    task: Task
    """The task. It is prepared in the run that `prepared` returns, and not in others."""
    job: groups.Job
    """The settings as they were typed, or would be typed; `runtime` and `rule` are their meaning."""
    runtime: Runtime
    rule: Rule
    recipe: OptimizerRecipe
    """The optimizer asked for: the server's, or that of local steps under rules that have them."""
    budget: groups.Budget
    steps: groups.Steps
    """Learning rate, warm-up and schedule are read here; `recipe` has the rest."""
    machine: groups.Machine
    output: groups.Output = dataclasses.field(default_factory=groups.Output)
    shape: Shape | None = None
    """The shape of the learning rate's schedule, if it is a function of the user's own; None: the one that `steps`
    names. See `asyncsgd.core.schedules`."""
    saves_model: bool = True
    changing_buffers: tuple[str, ...] | None = None
    """The names of the buffers that forward passes change, as a dry run has seen; None: there was no dry run."""
    received: Received | None = None
    """What this host has received from another one that prepared the task; None: this host prepares it."""

    def __post_init__(self) -> None:
        recipe = dataclasses.replace(self.recipe, peak=self.steps.learning_rate)
        object.__setattr__(self, "recipe", recipe)
        self.runtime.check(self.seed, self.device, self.machine, self.recipe.clip_norm)
        _ = self.server_recipe, self.cache  # both refuse

    @functools.cached_property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return resolve_device(self.machine.device)

    @property
    def seed(self) -> int:
        return self.job.seed

    @property
    def precision(self) -> torch.dtype:
        return PRECISIONS[self.machine.precision]

    @property
    def micro_batches(self) -> int:
        return self.machine.micro_batches

    def with_parts(self, micro_batches: int) -> Run:
        return dataclasses.replace(self, machine=dataclasses.replace(self.machine, micro_batches=micro_batches))

    @functools.cached_property
    def cache(self) -> Path:
        return cache_folder(self.output.cache_dir)

    def prepared(self) -> Run:
        if self.received is None:
            task = self.task.prepare(self.seed, self.cache)
        else:
            task = self.received.prepared(self.task)
        return dataclasses.replace(self, task=task)

    def flat(
        self,
        parameters: Tensor | None = None,
        device: str | torch.device = "cpu",
        statistics: Tensor | None = None,
    ) -> FlatModel:
        """The model of a prepared task on flat vectors, new, at its initial parameters or at these, `(P,)`, and
        where it has running statistics at these, `(S,)`.
        """
        flat = FlatModel(self.task.model(self.seed).to(device), changing_buffers=self.changing_buffers or ())
        if parameters is not None:
            with torch.no_grad():
                flat.parameters.copy_(parameters)
        if flat.statistics is not None and statistics is not None:
            flat.statistics.values.copy_(statistics)
            flat.statistics.begin()
        return flat

    def show_statistics(self, flat: FlatModel) -> None:
        """Put the running statistics into a model of the prepared task that an evaluation of it sees."""
        statistics = flat.statistics
        if statistics is None:
            return
        if self.budget.statistics_batches and statistics.reestimated is None:
            reestimate(flat, self.task, self.task.data(self.seed), self.seed, self.budget.statistics_batches)
        statistics.put(statistics.evaluated)

    @property
    def server_recipe(self) -> OptimizerRecipe:
        """The server's optimizer: plain SGD where workers step locally.

        Raises:
            UsageError: if the rule cannot do with it.
        """
        rule = self.rule
        runtime = self.runtime
        if isinstance(rule, PeerRule):
            if not isinstance(runtime, Virtual):
                raise UsageError(
                    f"rule {rule.name} has no server, and real processes have one; type --clock virtual, or give "
                    f"runtime=asyncsgd.Virtual(...)"
                )
            check_virtual(rule, network=runtime.network is not None, churn=bool(runtime.churn))
            return self.recipe
        plain = OptimizerRecipe(SGD())
        if rule.local_steps:
            return plain
        if rule.needs_plain_sgd and self.recipe != plain:
            raise UsageError(
                f"rule {rule.name!r} has a momentum or a force of its own and needs plain SGD at the server; type "
                f"--optimizer sgd --momentum 0 --weight-decay 0 --clip-norm 0"
            )
        return self.recipe

    @property
    def all_gpus(self) -> bool:
        """Whether one process spreads every batch over all GPUs."""
        return self.runtime.all_gpus

    @property
    def num_devices(self) -> int:
        """How many GPUs, or cores where it is a CPU, the run's processes compute on; other hosts count as this one."""
        processes = 1 if self.runtime.in_one_process else self.runtime.num_workers
        here = processes_on_this_host(processes)
        if self.device == "cpu":
            devices_here = min(here * self.runtime.threads, available_cores())
        elif self.all_gpus:
            devices_here = torch.cuda.device_count()
        else:
            devices_here = min(here, torch.cuda.device_count())
        return devices_here * processes // here

    def check_optimizer(self, layout: Layout | None = None) -> None:
        """Refuse an optimizer that cannot be served, or that cannot step a model of this layout.

        Raises:
            UsageError: naming the optimizer.
        """
        steps_on_host = self.runtime.has_server and not self.rule.local_steps
        self.recipe.check(layout, "cpu" if steps_on_host else self.device)
        if self.runtime.share_state and not self.recipe.is_elementwise:
            raise UsageError(
                f"share_state=True is for asyncsgd.SGD and asyncsgd.AdamW, whose state begins as zeros, got optimizer "
                f"{self.recipe.name}; drop share_state"
            )

    @functools.cached_property
    def limits(self) -> Limits:
        """When the run ends and evaluates. The task must be prepared, since only then it knows how long an epoch is.

        Raises:
            UsageError: for epochs of a task that does not say how many samples it has; for an evaluation after the end.
        """
        budget = self.budget
        samples = self.budget.samples
        if budget.epochs is not None:
            wanted = self._samples_of_epochs(budget.epochs, f"--epochs {budget.epochs:g}")
            samples = math.ceil(wanted / self.task.batch_size) * self.task.batch_size
        if budget.evaluate_at is not None and samples is not None and budget.evaluate_at >= samples:
            raise UsageError(f"--evaluate-at {budget.evaluate_at} must lie before the end, at {samples} samples")
        every = self._samples_between("--evaluate-every", budget.evaluate_every)
        return Limits(
            samples=samples,
            seconds=budget.seconds,
            target_loss=budget.target_loss,
            evaluate_every=every,
            evaluate_at=budget.evaluate_at,
            patience=budget.patience,
            keep_best=budget.keep_best,
        )

    @property
    def schedule(self) -> WarmupSchedule:
        """The learning rate as a function of the samples that arrived; of a prepared task."""
        warmup = self.steps.warmup
        samples = self.limits.samples
        if 0 < warmup < 1:  # a share of the samples, which are known then
            assert samples is not None
            warmup = round(warmup * samples)
        shape = SHAPES[self.steps.schedule] if self.shape is None else self.shape
        return WarmupSchedule(self.steps.learning_rate, int(warmup), samples, shape)

    @property
    def policy(self) -> Policy:
        """When checkpoints are taken. The task must be prepared; see `limits`.

        Raises:
            UsageError: for epochs of a task that does not say how many samples it has.
        """
        every = self._samples_between("--checkpoint-every", self.output.checkpoint_every)
        return Policy(every, self.output.checkpoint_seconds, self.output.keep)

    def _samples_between(self, flag: str, text: str | None) -> int | None:
        """The samples that `text` means, a number of them or of epochs such as ``1epoch``.

        Raises:
            UsageError: for epochs of a task that does not say how many samples it has.
        """
        if text is None or not text.endswith("epoch"):
            return None if text is None else int(text)
        return max(1, self._samples_of_epochs(float(text.removesuffix("epoch")), f"{flag} {text}"))

    def _samples_of_epochs(self, epochs: float, asked: str) -> int:
        """The samples of so many passes over the training samples, rounded up; `asked` is what the user typed.

        Raises:
            UsageError: for a task that does not say how many samples it has.
        """
        length = self.task.facts().get("num_train_samples")
        if length is None:
            length = getattr(self.task.data(self.seed), "num_train_samples", None)
        if length is None:
            raise UsageError(
                f"{asked}: the task {self.task.name} does not say how long an epoch is; type a number of samples, or "
                f"give its facts() or what data() returns num_train_samples"
            )
        return math.ceil(epochs * length)

    def as_sent_to(self, worker: int) -> Run:
        """This run, prepared, as the process of `worker` is sent it: on the device of that worker, and without the
        rule, which may be of a class that other processes cannot import."""
        machine = dataclasses.replace(self.machine, device=device_of_worker(self.device, worker))  # type: ignore[arg-type]
        return dataclasses.replace(self, rule=Asynchronous(), machine=machine)

    def worker(self, flat: FlatModel, profile: Profile | None = None, *, tells_compile_seconds: bool = False) -> Worker:
        """Make the worker that computes gradients and evaluations of the prepared task, with a model that is bound to
        `flat`.

        Args:
            profile: what to trace of its gradients; None: nothing.
            tells_compile_seconds: whether the user is told what compiling took.
        """
        runtime = self.runtime
        flat.may_freeze = runtime.num_workers == 1 and (runtime.follows_rule or runtime.in_one_process)
        worker = (Worker if profile is None else ProfiledWorker)(
            flat,
            self.task,
            self.task.data(self.seed),
            seed=self.seed,
            precision=self.precision,
            micro_batches=self.micro_batches,
            all_gpus=self.all_gpus,
            savings=self.machine,
            watches=self.changing_buffers is not None,
            statistics_batches=self.budget.statistics_batches or 0,
        )
        if isinstance(worker, ProfiledWorker) and profile is not None:
            worker.profile = profile
        if tells_compile_seconds and worker.compile_seconds:
            print(f"compile the first gradient took {worker.compile_seconds:.0f} s, once", flush=True)
        return worker

    def summary(self) -> dict[str, Any]:
        """The summary's fields that are known before anything has run."""
        runtime = self.runtime
        return {
            "experiment": self.name,
            "task": self.task.name,
            "mode": runtime.mode,
            "rule": str(self.rule),
            "num_workers": runtime.num_workers,
            "threads": runtime.threads,
            "seed": self.seed,
            "batch_size": self.task.batch_size,
            "accumulate": runtime.accumulate,
            "transport": runtime.transport,
            "hogwild_state": runtime.hogwild_state,
            "clock": runtime.clock,
            "speeds": self.job.speeds or ("constant:1" if runtime.clock == "virtual" else None),
            "oversubscription": runtime.oversubscription,
        }


def run_of(
    name: str,
    settings: Any,
    *,
    task: Task | None = None,
    runtime: Runtime | None = None,
    rule: Rule | None = None,
    optimizer: BuildOptimizer | None = None,
    shape: Shape | None = None,
) -> Run:
    """Make the run that settings describe.

    Args:
        name: the name of the experiment.
        settings: an `asyncsgd.settings.groups.Common`.
        task: None: a group of the settings, as those of `asyncsgd.settings.task` have it.
        runtime, rule, optimizer, shape: objects that mean what the settings say, or more. None: as the settings say.

    Raises:
        UsageError: if the settings alone show a mistake; the message says what to change.
    """
    job = settings.job
    steps = settings.optimization
    if runtime is None:
        runtime = runtime_of(job, settings.machine.threads)
    if not runtime.follows_rule:
        rule = implied_rule(runtime)
    elif rule is None:
        rule = parse_rule(job.rule)
    if optimizer is None:
        optimizer = SGD(steps.momentum) if steps.optimizer == "sgd" else AdamW((steps.beta1, steps.beta2))
    return Run(
        name,
        settings.task if task is None else task,
        job,
        runtime,
        rule,
        OptimizerRecipe(optimizer, steps.weight_decay, steps.clip_norm),
        groups.Budget(**vars(settings.budget)),  # those of a task are of a class that cannot be pickled
        groups.Steps(**vars(steps)),
        settings.machine,
        settings.output,
        shape,
    )


def steps_of(optimizer: BuildOptimizer) -> dict[str, Any]:
    """The settings of `asyncsgd.settings.groups.Steps` that ask for one of the library's own optimizers; none for
    others.

    >>> steps_of(SGD(0.9))
    {'optimizer': 'sgd', 'momentum': 0.9}
    """
    if type(optimizer) is SGD:
        return {"optimizer": "sgd", "momentum": optimizer.momentum}
    if type(optimizer) is AdamW:
        beta1, beta2 = optimizer.betas
        return {"optimizer": "adamw", "beta1": beta1, "beta2": beta2}
    return {}


def implied_rule(runtime: Runtime) -> Rule:
    """The rule that a runtime is by definition, where the user may not choose one: synchronous modes are that rule,
    Hogwild applies what comes.
    """
    if runtime.has_two_versions:
        return FixedDelay(1)
    return Asynchronous() if runtime.has_server else Synchronous()


def device_of_worker(device: str, worker: int) -> str:
    """``cuda`` becomes the GPU of `worker`, round robin; ``cpu`` stays."""
    return f"cuda:{worker % torch.cuda.device_count()}" if device == "cuda" else device


def resolve_device(device: str) -> str:
    """``auto`` becomes cuda or cpu.

    Raises:
        UsageError: if cuda is asked for and not there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; type --device cpu, or leave the flag out")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def cache_folder(cache_dir: str | None) -> Path:
    """`cache_dir`, or asyncsgd's folder in the user's cache; made if it is not there.

    Raises:
        UsageError: if it cannot be written.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncsgd"
    folder = Path(cache_dir) if cache_dir is not None else default
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the cache folder {folder} cannot be made ({error.strerror}); type --cache-dir FOLDER"
        ) from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the cache folder {folder} cannot be written; type --cache-dir FOLDER")
    return folder
