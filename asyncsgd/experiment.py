"""An experiment: a task, how it is trained and for how long, and the summary of its run.

Scripts and the Python API make one of these; `asyncsgd.training` runs it and knows no settings. What settings mean is
said here too."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncsgd import modes
from asyncsgd.checkpoints import Policy
from asyncsgd.errors import UsageError
from asyncsgd.flat import FlatModel, Layout
from asyncsgd.methods import check_virtual
from asyncsgd.models import save_whole
from asyncsgd.optimizers import SGD, AdamW, BuildOptimizer, OptimizerRecipe
from asyncsgd.recorded_run import read_of_run
from asyncsgd.records.machine import available_cores
from asyncsgd.records.model_card import model_card
from asyncsgd.rules import Asynchronous, FixedDelay, Synchronous, parse_rule
from asyncsgd.rules.base import PeerRule, Rule
from asyncsgd.runtime.base import Budget
from asyncsgd.runtime.worker_process import Assignment
from asyncsgd.schedules import Schedule, WarmupSchedule, constant, cosine, linear
from asyncsgd.settings import training as settings
from asyncsgd.settings.flags import flag_of
from asyncsgd.tasks.base import Task, fingerprint
from asyncsgd.worker import NO_SAVINGS, Savings

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = {"constant": constant, "linear": linear, "cosine": cosine}


@dataclasses.dataclass(frozen=True)
class Setup:
    """How any task is trained: known before anything is read."""

    runtime: modes.Runtime
    rule: Rule
    recipe: OptimizerRecipe
    """The optimizer asked for: the server's, or that of local steps under rules that have them."""
    seed: int = 0
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    precision: torch.dtype = torch.float32
    micro_batches: int = 1
    savings: Savings = NO_SAVINGS

    def __post_init__(self) -> None:
        self.runtime.check_speeds(self.seed)
        if isinstance(self.runtime, modes.Hogwild) and self.device != "cpu":
            raise UsageError(
                "--mode hogwild needs --device cpu: updates of several processes to one GPU buffer have no defined "
                "order"
            )
        if isinstance(self.runtime, modes.Pipeline):
            for field in dataclasses.fields(self.savings):
                if getattr(self.savings, field.name):
                    raise UsageError(
                        f"{flag_of(field.name)} is for models that are not cut into stages; drop it, or type "
                        f"--mode sync"
                    )
            self.runtime.check(
                micro_batches=self.micro_batches,
                clip_norm=self.recipe.clip_norm,
                half_precision=self.precision == torch.float16,
                num_gpus=torch.cuda.device_count() if self.device == "cuda" else None,
            )

    @property
    def server_recipe(self) -> OptimizerRecipe:
        """The server's optimizer: plain SGD where workers step locally.

        Raises:
            UsageError: if the rule cannot do with it.
        """
        if isinstance(self.rule, PeerRule):
            if not isinstance(self.runtime, modes.Virtual):
                raise UsageError(
                    f"rule {self.rule.name} has no server, and real processes have one; type --clock virtual, or give "
                    f"runtime=asyncsgd.Virtual(...)"
                )
            check_virtual(self.rule, network=self.runtime.network is not None, churn=bool(self.runtime.churn))
            return self.recipe
        if self.rule.local_steps:
            return OptimizerRecipe(SGD())
        if self.rule.needs_plain_sgd and self.recipe != OptimizerRecipe(SGD()):
            raise UsageError(
                f"rule {self.rule.name!r} has a momentum or a force of its own and needs plain SGD at the server; type "
                f"--optimizer sgd --momentum 0 --weight-decay 0 --clip-norm 0"
            )
        return self.recipe

    @property
    def all_gpus(self) -> bool:
        """Whether one process spreads every batch over all GPUs."""
        return isinstance(self.runtime, modes.InProcess) and self.runtime.all_gpus

    @property
    def num_devices(self) -> int:
        """How many GPUs of this machine, or cores where it is a CPU, the run's processes compute on."""
        processes = 1 if self.runtime.in_one_process else self.runtime.num_workers
        if self.device == "cpu":
            return min(processes * self.runtime.threads, available_cores())
        gpus = torch.cuda.device_count()
        return gpus if self.all_gpus else min(processes, gpus)

    def check_optimizer(self, layout: Layout | None = None) -> None:
        """Refuse an optimizer that cannot be served, or that cannot step a model of this layout.

        Raises:
            UsageError: naming the optimizer.
        """
        steps_on_host = self.runtime.has_server and not self.rule.local_steps
        self.recipe.check(layout, "cpu" if steps_on_host else self.device)
        if isinstance(self.runtime, modes.Hogwild) and self.runtime.share_state and not self.recipe.is_elementwise:
            raise UsageError(
                f"share_state=True is for asyncsgd.SGD and asyncsgd.AdamW, whose state begins as zeros, got optimizer "
                f"{self.recipe.name}; drop share_state"
            )

    def assignment(self, task: Task, worker: int | None = None) -> Assignment:
        """What a process needs to compute gradients of `task`, which is prepared; on the device of `worker`."""
        return Assignment(
            task=task,
            seed=self.seed,
            threads=self.runtime.threads,
            device=self.device if worker is None else device_of_worker(self.device, worker),
            precision=self.precision,
            micro_batches=self.micro_batches,
            savings=self.savings,
            inner=self.recipe,
            num_workers=self.runtime.num_workers,
            speeds=self.runtime.speeds,
            all_gpus=self.all_gpus,
        )


@dataclasses.dataclass(frozen=True)
class Course:
    """How long a task is trained, at which learning rates, and how often it is evaluated."""

    budget: Budget
    evaluations: int
    schedule: Schedule


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One training, whoever asked for it."""

    name: str
    """Of the script."""
    task: Task
    """Not prepared."""
    setup: Setup
    course: Callable[[Task], Course]
    """Given the prepared task: how long an epoch is, it alone knows."""
    cache: Path
    """Folder of prepared data."""
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the summary says of this kind of experiment, as JSON, known before anything has run."""
    describe: Callable[[Task, FlatModel], Sequence[str]] = lambda task, flat: ()
    """Given the prepared task and its model: lines about them, for the user."""
    saves_model: bool = True
    checkpoints: Callable[[Task], Policy] = lambda task: Policy()
    """Given the prepared task: when checkpoints are taken."""
    profile: int | None = None
    """How many gradients of worker 0 are traced."""

    def summary(self) -> dict[str, Any]:
        """The summary's fields that are known before anything has run."""
        runtime = self.setup.runtime
        return {
            "experiment": self.name,
            "task": self.task.name,
            "mode": runtime.mode,
            "rule": str(self.setup.rule),
            "num_workers": runtime.num_workers,
            "threads": runtime.threads,
            "seed": self.setup.seed,
            "batch_size": self.task.batch_size,
            "accumulate": runtime.accumulate if isinstance(runtime, modes.InProcess) else 1,
            "transport": runtime.transport,
            "hogwild_state": ("shared" if runtime.share_state else "worker")
            if isinstance(runtime, modes.Hogwild)
            else None,
            "clock": runtime.clock,
            "speeds": None if runtime.speeds is None else str(runtime.speeds),
            "oversubscription": runtime.oversubscription,
            **self.identity,
        }


def experiment_of(name: str, settings: Any) -> Experiment:
    """The experiment of settings that hold a task among their groups; see `asyncsgd.settings.task`.

    Raises:
        UsageError: if the settings alone show a mistake; the message says what to change.
    """
    job = settings.job
    return Experiment(
        name=name,
        task=settings.task,
        setup=setup_of(job, settings.machine, settings.optimization),
        course=lambda task: course_of(settings.budget, settings.optimization, task),
        cache=cache_folder(settings.output.cache_dir),
        identity={"speeds": job.speeds or ("constant:1" if job.clock == "virtual" else None)},
        describe=describe,
        checkpoints=lambda task: policy_of(settings.output, task),
        profile=settings.output.profile,
    )


def facts_of(task: Task, seed: int) -> dict[str, Any]:
    """The facts of a prepared task, with a fingerprint of its data and a name for them."""
    facts = {"data": task.name, **task.facts()}
    if "data_fingerprint" not in facts:
        facts["data_fingerprint"] = fingerprint(task.data(seed))
    return facts


def model_at(version: int, num_samples: int, eval_loss: float, metrics: Mapping[str, float]) -> dict[str, Any]:
    """What the card of the version with the lowest evaluation loss says in place of its run's summary."""
    return {
        "num_samples": num_samples,
        "num_updates": version,
        "final_eval_loss": eval_loss,
        "metrics": metrics,
        "chosen_for": "the lowest evaluation loss of its run",
    }


def save_model(
    experiment: Experiment, task: Task, model: nn.Module, folder: Path, summary: Mapping[str, Any], run: Path | None
) -> None:
    """Write a model of a run and its card, README.md; `folder` is there when both are complete.

    Args:
        task: prepared.
        summary: what is known of the run, as summary.json has it; see `model_card`.
        run: the folder of the run, whose files the card is made from too. None, or a file missing: it says less.
    """
    setup, recipe = experiment.setup, experiment.setup.recipe
    optimizer = repr(recipe.build) if dataclasses.is_dataclass(recipe.build) else str(recipe)
    steps = {
        "optimizer": f"{optimizer}, weight decay {recipe.weight_decay:g}, clip norm {recipe.clip_norm:g}",
        "schedule": str(experiment.course(task).schedule),
        "precision": next(name for name, dtype in PRECISIONS.items() if dtype is setup.precision),
    }
    environment, command, base_model = {}, None, summary.get("base_model")
    with contextlib.suppress(OSError, UsageError):
        if run is not None:
            environment = read_of_run(run, "environment.json")
            first = (run / "settings.yaml").read_text(encoding="utf-8").partition("\n")[0]
            command = first.removeprefix("# ") if first.startswith("# python ") else None
    card = model_card(
        summary,
        steps=steps,
        environment=environment,
        command=command,
        loading=_loading(task, setup.seed),
        auto_class=task.auto_class,
        hub_model=base_model if isinstance(base_model, str) and not Path(base_model).expanduser().exists() else None,
    )

    def save(new: Path) -> None:
        task.save(model, new)
        if not (new / "README.md").exists():
            (new / "README.md").write_text(card, encoding="utf-8", errors="replace")

    save_whole(save, folder)


def _loading(task: Task, seed: int) -> str:
    """Code that loads the model of `task` in the folder where it is saved."""
    if task.auto_class is not None:
        return (
            f"from transformers import {task.auto_class}, AutoTokenizer\n\n"
            f'model = {task.auto_class}.from_pretrained(".")\ntokenizer = AutoTokenizer.from_pretrained(".")'
        )
    kind, module = type(task), type(task).__module__
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "the_script").stem
    fields = dataclasses.fields(task)  # type: ignore[arg-type]
    values = [
        f"{field.name}={value!r}"
        for field in fields
        if not field.metadata.get("found") and repr(value := getattr(task, field.name)) != repr(field.default)
    ]
    prepared = f'.prepare({seed}, Path("cache"))' if any(field.metadata.get("found") for field in fields) else ""
    return (
        ("from pathlib import Path\n\n" if prepared else "")
        + f"from safetensors.torch import load_model\n\nfrom {module} import {kind.__qualname__}\n\n"
        f"model = {kind.__qualname__}({', '.join(values)}){prepared}.model({seed})\n"
        'load_model(model, "model.safetensors")'
    )


def describe(task: Task, flat: FlatModel) -> list[str]:
    """Lines about any task."""
    facts, size = task.facts(), f"{flat.layout.num_parameters:,} parameters"
    model = getattr(task, "model_name", None)
    if model is not None:
        size = f"model {model}, {size}"
    counts = [
        f"{facts[key]} {what} samples"
        for key, what in (("num_train_samples", "training"), ("num_eval_samples", "evaluation"))
        if facts.get(key) is not None
    ]
    data = f"   data  {facts['data']}" if facts.get("data") else ""
    named = f" ({', '.join(counts)})" if counts else ""
    return [
        f"task   {task.name} ({size}){data}{named}",
        *(f"note   {note}" for note in facts.get("notes") or ()),
    ]


def setup_of(job: settings.Job, machine: settings.Machine, optimization: settings.Steps) -> Setup:
    """Read the rule, the speeds, the network and the churn, which settings hold as text, and find the device.

    Raises:
        UsageError: for the first of them that cannot be.
    """
    rule = rule_of(job)
    setup = Setup(
        modes.runtime_of(job, machine.threads),
        rule,
        recipe_of(optimization),
        job.seed,
        resolve_device(machine.device),
        PRECISIONS[machine.precision],
        machine.micro_batches,
        savings_of(machine),
    )
    _ = setup.server_recipe  # refuses
    return setup


def savings_of(machine: settings.Machine) -> Savings:
    """The settings of the same names."""
    return Savings(**{field.name: getattr(machine, field.name) for field in dataclasses.fields(Savings)})


def course_of(budget: settings.Budget, optimization: settings.Steps, task: Task) -> Course:
    """The budget and the learning rate as a function of the samples that arrived.

    Args:
        task: prepared.

    Raises:
        UsageError: for epochs of a task that does not say how many samples it has.
    """
    samples = samples_in(budget.samples, budget.epochs, task)
    every = samples_between("--evaluate-every", budget.evaluate_every, task)
    schedule = schedule_of(optimization.learning_rate, optimization.warmup, samples, optimization.schedule)
    limits = (budget.seconds, budget.target_loss, every, budget.patience, budget.keep_best)
    return Course(Budget(samples, *limits), budget.evaluations, schedule)


def schedule_of(peak: float, warmup: float, samples: int | None, shape: str) -> WarmupSchedule:
    """The learning rate over a run of `samples`.

    Args:
        warmup: samples, or below 1 a share of `samples`, which are known then.
    """
    if 0 < warmup < 1:
        assert samples is not None
        warmup = round(warmup * samples)
    return WarmupSchedule(peak, int(warmup), samples, SHAPES[shape])


def policy_of(output: settings.Output, task: Task) -> Policy:
    """When checkpoints are taken of a run of `task`, which is prepared.

    Raises:
        UsageError: for epochs of a task that does not say how many samples it has.
    """
    every = samples_between("--checkpoint-every", output.checkpoint_every, task)
    return Policy(every, output.checkpoint_seconds, output.keep)


def samples_between(flag: str, text: str | None, task: Task) -> int | None:
    """The samples that `text` means, a number of them or of epochs such as ``1epoch``; `task` is prepared.

    Raises:
        UsageError: for epochs of a task that does not say how many samples it has.
    """
    if text is None or not text.endswith("epoch"):
        return None if text is None else int(text)
    return max(1, samples_of_epochs(float(text.removesuffix("epoch")), task, f"{flag} {text}"))


def samples_in(samples: int | None, epochs: float | None, task: Task) -> int | None:
    """`samples`, or those of `epochs` rounded up to whole batches; `task` is prepared.

    Raises:
        UsageError: for epochs of a task that does not say how many samples it has.
    """
    if epochs is None:
        return samples
    wanted = samples_of_epochs(epochs, task, f"--epochs {epochs:g}")
    return math.ceil(wanted / task.batch_size) * task.batch_size


def samples_of_epochs(epochs: float, task: Task, asked: str) -> int:
    """The samples of `epochs` passes over the training samples of `task`, rounded up; `asked` is what the user typed.

    Raises:
        UsageError: for a task that does not say how many samples it has.
    """
    length = task.facts().get("num_train_samples")
    if length is None:
        raise UsageError(
            f"{asked}: the task {task.name} does not say how long an epoch is; type a number of samples, or give its "
            f"facts() num_train_samples"
        )
    return math.ceil(epochs * length)


def rule_of(job: settings.Job) -> Rule:
    """The rule that the server follows; synchronous modes are that rule by definition, Hogwild applies what comes."""
    if modes.kind_of(job.mode, job.clock).follows_rule:
        return parse_rule(job.rule)
    return implied_rule(modes.runtime_of(job, threads=1))


def implied_rule(runtime: modes.Runtime) -> Rule:
    """The rule that a runtime is by definition, where the user may not choose one."""
    if isinstance(runtime, modes.Pipeline) and runtime.schedule == "2bw":
        return FixedDelay(1)
    return Asynchronous() if runtime.has_server else Synchronous()


def recipe_of(optimization: settings.Steps) -> OptimizerRecipe:
    """The optimizer that the settings name."""
    builders: dict[str, BuildOptimizer] = {
        "sgd": SGD(optimization.momentum),
        "adamw": AdamW((optimization.beta1, optimization.beta2)),
    }
    build = builders[optimization.optimizer]
    return OptimizerRecipe(build, optimization.weight_decay, optimization.clip_norm)


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
