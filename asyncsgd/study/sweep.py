"""Run a plan: tune, find and fix target and budget, test, fine-tune; stop anywhere and go on later.

The run folders alone say what is done, so no other file has to be kept up to date. A killed sweep leaves nothing
locked, because the kernel frees its only lock when the process ends.

A run that measures time has the machine to itself. Such runs are made one after another, in this process, with workers
from one fork server. Runs on the virtual clock and fine-tuning run beside one another (`jobs`), each in a process
forked from that same server. So no run pays for imports again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncsgd.errors import RunError, UsageError
from asyncsgd.records.events import DONE, FAILED, FINISHED, read_events
from asyncsgd.records.locks import lock
from asyncsgd.records.run_folder import write_json, write_text
from asyncsgd.settings.yaml_reader import read_yaml
from asyncsgd.study.arms import FLAGS, Arm, resolve
from asyncsgd.study.commands import flags_of, flags_of_values
from asyncsgd.study.config import read_config
from asyncsgd.study.finetuning import finetuning_in, own
from asyncsgd.study.plan import BASE, TIMED, Plan, PlannedRun, Stage, sha256_of

NOT_STARTED = "NOT STARTED"

CHECKPOINTING: Mapping[str, Any] = MappingProxyType({"checkpoint_seconds": 60.0, "keep": 1})
"""Settings of runs that go on where they were stopped, unless the config has others."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One run that is to be made, with the settings it gets, by name."""

    run: PlannedRun
    values: Mapping[str, Any]

    @property
    def measures(self) -> bool:
        """Whether its seconds are a result, so that nothing else may run beside it."""
        return self.run.stage in TIMED and self.values.get("clock") != "virtual"

    @property
    def command(self) -> list[str]:
        """The command that makes this run alone."""
        if self.run.stage == "finetune":
            kind = finetuning_in(self.values)
            return ["python", "experiments/train.py", kind.task, *flags_of_values(own(self.values))]
        return ["python", "experiments/stilt_mlm.py", *flags_of(FLAGS.make(self.values))]


class Sweep:
    """A plan and the folder it is carried out in.

    Args:
        plan: of `asyncsgd.study.plan.make_plan`.
        config_text: the file that the plan was made from, kept beside it.
        out: the sweep's folder.
        track: where else its runs are shown, as ``--track`` has it.

    `look` and `open` raise UsageError if `out` holds a sweep of another config, or cannot be written.
    """

    def __init__(self, plan: Plan, config_text: str, out: Path, track: str | None = None) -> None:
        self.plan, self.out = plan, out
        self._track = track
        self.chosen: dict[str, Mapping[str, Any]] = {}
        self._losses: dict[tuple[str, int], list[float | None]] = {}
        self._scores: dict[tuple[str, int], float | None] = {}
        self._targets: dict[str, float] = {}
        self.budgets: dict[str, float] = {}
        """Seconds of the test runs that a reference arm times, by its name; without those that are not known yet."""
        self._analysis_sha256: str | None = None
        self._config_text = config_text

    def look(self) -> None:
        """Read how far the sweep is, and write nothing."""
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"{self.out} is a file; type --out FOLDER")
        before = self._config_before()
        if before is not None and before != self.plan.config_sha256:
            raise UsageError(
                f"{self.out} holds a sweep of another config; type another --out, or go back to the config in "
                f"{self.out / 'sweep.yaml'}"
            )
        if before is None and self.out.is_dir() and any(path.is_dir() for path in self.out.iterdir()):
            raise UsageError(f"{self.out} holds other things and no sweep; type another --out")
        # the registered values stay in the plan while earlier stages are looked at again
        kept = self._read(self.out / "plan.json") or {}
        self._targets = kept.get("targets") or {}
        self._analysis_sha256 = kept.get("analysis_sha256")
        self.choose()

    def _config_before(self) -> str | None:
        """The hash of the config that the folder was made from; None where there is no sweep in it yet."""
        kept = self.out / "sweep.yaml"
        return sha256_of(read_config(kept)) if kept.is_file() else None

    def open(self) -> None:
        """Read how far the sweep is and write its plan into its folder."""
        self.look()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            write_text(self.out / "sweep.yaml", self._config_text)
            self._write_plan()
        except OSError as error:
            raise UsageError(f"{self.out} cannot be written ({error.strerror}); type --out FOLDER") from error

    def status(self, run: PlannedRun) -> str:
        """The status in a run's summary, or `NOT_STARTED`, or INTERRUPTED where it was killed."""
        path = self.out / run.folder
        summary = self._read(path / "summary.json")
        if summary is not None:
            return str(summary.get("status"))
        return "INTERRUPTED" if path.is_dir() and any(path.iterdir()) else NOT_STARTED

    def to_do(self, stage: Stage, *, retry: bool = False, pretend: bool = False) -> list[Job]:
        """The runs of a stage that are still to be made, in the order of the plan.

        Fine-tuning runs whose pretraining run has not left a model are not among them.

        Args:
            retry: FAILED runs are to be made again.
            pretend: use a stand-in for what only earlier stages can tell (the first trial, the base model), to estimate
                how long runs take.

        Raises:
            UsageError: if a finished run has other settings than the plan gives it.
        """
        jobs = []
        for run in self.plan.of_stage(stage):
            status = self.status(run)
            values = self.values(run, pretend=pretend)
            if values is None:
                continue
            if status in FINISHED:
                self._check_same(run, values)
            elif status != FAILED or retry:
                jobs.append(Job(run, values))
        return jobs

    def values(self, run: PlannedRun, *, pretend: bool = False) -> dict[str, Any] | None:
        """The settings of a run by name; None while they are not known, or can never be had; see `to_do`."""
        output = {"run_dir": str(self.out / run.folder), "track": self._track}
        if run.stage != "finetune":
            chosen = dict(self.chosen)
            if run.stage in ("pilot", "test") and run.arm not in chosen and (trials := self.plan.arm(run.arm).trials):
                if not pretend:
                    return None
                chosen[run.arm] = trials[0]
            reference = self.plan.timed_by.get(run.arm)
            if run.stage == "test" and reference is not None and reference not in self.budgets:
                return None
            values = self.plan.values(run, chosen, self.budgets) | self._model_of(run, pretend) | output
            return values if Job(run, values).measures else {**CHECKPOINTING, **values}
        assert self.plan.finetune is not None
        assert run.finetune_seed is not None
        finetune = {key: value for key, value in self.plan.finetune.items() if key not in ("repetitions", "baseline")}
        origin = str(self._model_of(run, pretend).get("model", self.plan.base.get("model", "tiny")))
        if run.parent is not None:
            parent = self._read(self.out / run.parent / "summary.json")
            if parent is not None and parent.get("status") == DONE:
                origin = str(self.out / run.parent)
            elif not pretend:
                return None
        return {**CHECKPOINTING, **finetune, "model": origin, "seed": run.finetune_seed, **output}

    def _model_of(self, run: PlannedRun, pretend: bool) -> dict[str, Any]:
        """The base model made by this sweep, as a setting; nothing where the config names one."""
        if self.plan.base_model is None or run.stage == "base":
            return {}
        model = self.out / BASE / "model"
        if pretend and not model.is_dir():
            return {"model": self.plan.base_model.get("model", "tiny")}
        return {"model": str(model)}

    def _check_same(self, run: PlannedRun, values: Mapping[str, Any]) -> None:
        if run.stage == "finetune":
            return
        path = self.out / run.folder / "settings.yaml"
        if self.plan.base_model is not None and run.stage != "base":
            began, base = (
                (self._read(self.out / folder / "summary.json") or {}).get(key)
                for folder, key in ((run.folder, "init_sha256"), (BASE, "parameters_sha256"))
            )
            if None not in (began, base) and began != base:
                raise UsageError(
                    f"{path.parent} started from another base model than the one in {self.out / BASE}, which was made "
                    f"again since; type another --out"
                )
        old = FLAGS.flatten(FLAGS.make(FLAGS.load_yaml(path)))
        different = FLAGS.differing_keys(old, FLAGS.flatten(FLAGS.make(values)))
        if self.plan.base_model is not None:  # made here: its path has changed where the sweep's folder was moved
            different = [change for change in different if change[0] != "model"]
        if different:
            listed = ", ".join(f"{key} {before} -> {now}" for key, before, now in different)
            raise UsageError(f"{path.parent} is done with other settings ({listed}); type another --out")

    def choose(self) -> list[PlannedRun]:
        """Read what tuning has found and choose for every arm whose trials are all finished.

        The chosen trial has the lowest mean of the final evaluation losses over the tuning seeds; a diverged one
        counts as infinite. Of equal ones the first wins.

        Returns:
            The tuning runs that are still missing.
        """
        missing = []
        finals: dict[str, float | None] = {}
        for run in self.plan.of_stage("tuning"):
            if self.status(run) in FINISHED:
                finals[run.folder] = self._final_loss(run)
            else:
                missing.append(run)
        unfinished = {run.arm for run in missing}
        for arm in self.plan.arms:
            for number, trial in enumerate(arm.trials):
                first = arm.trials.index(trial)
                folders = [f"tuning/{arm.name}/t{first}-s{seed}" for seed in self.plan.tuning_seeds]
                losses = [finals.get(folder) for folder in folders]
                self._losses[arm.name, number] = losses
                finite = [loss for loss in losses if loss is not None]
                self._scores[arm.name, number] = statistics.fmean(finite) if len(finite) == len(losses) else None
            if arm.trials and arm.name not in unfinished:
                scores = [self._scores[arm.name, number] for number in range(len(arm.trials))]
                best = min(range(len(scores)), key=lambda number: _or_infinite(scores[number]))
                self.chosen[arm.name] = arm.trials[best]
        self._find_budgets()
        return missing

    def all_diverged(self) -> list[str]:
        """The arms of which no trial of tuning has a score."""
        return [
            arm.name
            for arm in self.plan.arms
            if arm.trials and all(self._scores[arm.name, number] is None for number in range(len(arm.trials)))
        ]

    def _final_loss(self, run: PlannedRun) -> float | None:
        summary = self._read(self.out / run.folder / "summary.json") or {}
        loss = summary.get("final_eval_loss")
        return loss if summary.get("status") == DONE and isinstance(loss, float) else None

    def register(self) -> None:
        """Write analysis.yaml, once, before the first test run; and check that it still says the same afterwards.

        Raises:
            UsageError: if it was changed, or the plan's analysis was.
            RunError: if no pilot run of a reference arm gives a target or a budget.
        """
        import yaml

        analysis = self.plan.analysis
        if analysis is None:
            return
        targets, origin, pilots = self._find_targets()
        self._targets = targets
        self._find_budgets()
        if unknown := sorted(set(self.plan.timed_by.values()) - set(self.budgets)):
            raise RunError(
                f"every pilot run of {unknown[0]} diverged, so the seconds of the test runs are not known; lower its "
                f"learning rates"
            )
        content: dict[str, Any] = {
            "schema": 1,
            "study": self.plan.name,
            "reference": analysis.reference,
            **({} if analysis.control is None else {"control": analysis.control}),
            "primary": {
                "endpoint": analysis.endpoint,
                "num_workers": analysis.num_workers,
                "clock": analysis.clock,
            },
            "alpha": analysis.alpha,
            "margins": dict(analysis.margins),
            **({"margin_reasons": dict(analysis.margin_reasons)} if analysis.margin_reasons else {}),
            "family": list(analysis.family),
            "num_seeds": len(self.plan.seeds),
            "seeds": list(self.plan.seeds),
            "targets": targets,
            "budget_seconds": self.budgets,
            "target_from": origin,
            "pilots": pilots,
            "config_sha256": self.plan.config_sha256,
        }
        text = yaml.safe_dump(content, sort_keys=False)
        path = self.out / "analysis.yaml"
        with alone(self.out):  # other shards register too
            if path.exists():
                kept = read_yaml(path.read_text(encoding="utf-8"), str(path))
                # An older version registered less; what it did must still be so.
                if not isinstance(kept, dict) or any(content.get(key) != value for key, value in kept.items()):
                    raise UsageError(
                        f"{path} was written before the test runs and no longer agrees with the config; a "
                        f"registration is not changed afterwards: put the old file back, or type another --out"
                    )
            elif any(self.status(run) != NOT_STARTED for run in self.plan.of_stage("test")):
                raise UsageError(
                    f"{path} is missing, though there are test runs; a registration must be older than they are: put "
                    f"the old file back, or type another --out"
                )
            else:
                write_text(path, text)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if self._analysis_sha256 not in (None, digest):
            raise UsageError(
                f"{path} has been changed since it was written; put the old file back, or type another --out"
            )
        self._analysis_sha256 = digest
        self._write_plan()
        print(f"analysis.yaml  sha256 {digest[:16]}", flush=True)

    def _pilots_of(self, arm: Arm) -> list[str]:
        """The folders of the runs that tell the target and the seconds of a reference arm: its pilots, or without any
        the tuning runs of its chosen trial.
        """
        if self.plan.pilot_seeds:
            return [f"pilot/{arm.name}/s{seed}" for seed in self.plan.pilot_seeds]
        if arm.name not in self.chosen:
            return []
        number = arm.trials.index(self.chosen[arm.name])
        return [f"tuning/{arm.name}/t{number}-s{seed}" for seed in self.plan.tuning_seeds]

    def _find_budgets(self) -> None:
        """The median training seconds of the pilots of every reference arm of which all have ended."""
        for name in sorted(set(self.plan.timed_by.values())):
            summaries = [
                self._read(self.out / folder / "summary.json") or {} for folder in self._pilots_of(self.plan.arm(name))
            ]
            if all(summary.get("status") in FINISHED for summary in summaries):
                seconds = [summary["train_seconds"] for summary in summaries if summary["status"] == DONE]
                if seconds:
                    self.budgets[name] = statistics.median(seconds)

    def assume_budgets(self, seconds_of: Callable[[Any], float]) -> None:
        """Put an estimate in the place of the budgets that are not known yet."""
        for name in sorted(set(self.plan.timed_by.values()) - set(self.budgets)):
            run = PlannedRun("", "pilot", name, 0)
            self.budgets[name] = seconds_of(FLAGS.make(self.values(run, pretend=True) or {}))

    def _find_targets(self) -> tuple[dict[str, float], str | None, dict[str, dict[str, float]]]:
        """The target loss of every reference arm, how it was found, and between which losses: `runs` pilots fell from
        `first_loss` to `best_loss`, both medians.
        """
        analysis = self.plan.analysis
        assert analysis is not None
        arms = [arm for arm in self.plan.arms if arm.algorithm == analysis.reference]
        if analysis.target_loss is not None:
            return {arm.name: analysis.target_loss for arm in arms}, "given in the config", {}
        pilots = self.plan.pilot_seeds or self.plan.tuning_seeds
        if not pilots:
            return {}, None, {}
        targets, improvements, diverged = {}, {}, 0
        for arm in arms:
            curves = []
            for folder in self._pilots_of(arm):
                path = self.out / folder / "events.jsonl"
                losses = [record["loss"] for record in read_events(path) if record.get("kind") == "evaluate"]
                if losses and all(loss is not None for loss in losses):
                    curves.append(losses)
                else:
                    diverged += 1
            if not curves:
                raise RunError(
                    f"every pilot run of {arm.name} diverged, so there is no target; lower its learning rates"
                )
            first = statistics.median(curve[0] for curve in curves)
            best = statistics.median(min(curve) for curve in curves)
            improvements[arm.name] = {"runs": len(curves), "first_loss": round(first, 6), "best_loss": round(best, 6)}
            targets[arm.name] = round(first - analysis.target_share * (first - best), 6)
        whose = "seeds of their own" if self.plan.pilot_seeds else "tuning seeds"
        origin = (
            f"{100 * analysis.target_share:g} % of the median improvement of {len(pilots)} pilot "
            f"run{'s' * (len(pilots) != 1)} of the reference ({'its chosen trial, ' * bool(arms[0].trials)}{whose})"
        )
        return targets, origin + (f"; {diverged} that diverged left out" if diverged else ""), improvements

    def _write_plan(self) -> None:
        content = self.plan.as_json(self.chosen, self._losses, self._scores, self._targets, self.budgets)
        content["analysis_sha256"] = self._analysis_sha256
        with alone(self.out):
            write_json(self.out / "plan.json", content)

    @staticmethod
    def _read(path: Path) -> dict[str, Any] | None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return dict(content)


def _or_infinite(score: float | None) -> float:
    return math.inf if score is None else score


@contextlib.contextmanager
def locked(out: Path, shard: str) -> Iterator[None]:
    """Keep a second sweep of the same shard out of the folder; the kernel frees the lock when this process ends.

    Args:
        shard: the first of two shards is ``1-of-2``, and all of it ``1-of-1``.

    Raises:
        UsageError: if another one is at work there, or the folder cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / f".lock-{shard}", "a", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); type --out FOLDER") from error
    with file:
        if not lock(file):
            raise UsageError(
                f"another sweep is at work in {out}; wait for it, or stop it, or give each its part: --shard 1/2 and "
                f"--shard 2/2"
            )
        yield


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Shards of one sweep write its files one after another; to be held for milliseconds."""
    with open(out / ".lock-files", "a", encoding="utf-8") as file:
        lock(file, fcntl.LOCK_EX)
        yield


def check(plan: Plan) -> None:
    """Read every rule and every speed that the plan names, which `asyncsgd.study.plan` knows only as text.

    Raises:
        UsageError: for the first one that a run would refuse.
    """
    from asyncsgd.runtimes import kind_of
    from asyncsgd.settings.run import run_of

    for arm in plan.arms:
        for trial in arm.trials or ({},):
            settings = FLAGS.make(resolve({**plan.base, **arm.settings, **trial}))
            try:
                run_of(arm.name, settings)
            except UsageError as error:
                raise UsageError(f"arm {arm.name}: {error}") from error
    if plan.finetune is not None:
        finetune = {key: value for key, value in plan.finetune.items() if key not in ("repetitions", "baseline")}
        job = finetuning_in(finetune).settings(finetune).job
        if not kind_of(job.mode, job.clock).in_one_process:
            raise UsageError(
                f"finetune: mode: {job.mode} needs processes of its own, and a sweep fine-tunes several models side by "
                f"side; write mode: single, or clock: virtual"
            )


def check_inputs(plan: Plan) -> None:
    """Look for every model, text and folder of candidates that a pretraining run of the plan would read.

    Raises:
        UsageError: for the first one that is not there, or cannot be used.
    """
    for arm in plan.arms:
        try:
            FLAGS.make(resolve({**plan.base, **arm.settings})).task.check_names()
        except UsageError as error:
            raise UsageError(f"arm {arm.name}: {error}") from error


def share(plan: Plan, stage: Stage, shard: tuple[int, int]) -> set[str]:
    """The folders of a stage that belong to shard i of n, counted from 1 as in ``--shard i/n``.

    Whole blocks where time is measured, so that what is compared was measured on one machine; single runs elsewhere.
    A function of the plan alone: shards need not know what the others have done.
    """
    index, number = shard
    runs = plan.of_stage(stage)
    seeds = list(dict.fromkeys(run.seed for run in runs))
    in_shard = set()
    for position, run in enumerate(runs):
        measured = stage in TIMED and not plan.arm(run.arm).virtual and plan.base.get("clock") != "virtual"
        if (seeds.index(run.seed) if measured else position) % number == index - 1:
            in_shard.add(run.folder)
    return in_shard
