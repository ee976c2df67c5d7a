"""A plan and the folder of its runs: what is done, chosen, fixed and registered, and what is left.

The run folders alone say what is done, so no other file has to be kept up to date. A killed study leaves nothing
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
import math
import os
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from asyncsgd.errors import RunError, UsageError, nearest
from asyncsgd.records.events import DONE, FAILED, FINISHED, read_events
from asyncsgd.records.locks import lock
from asyncsgd.records.run_folder import write_json, write_text
from asyncsgd.run.choose_folder import read_summary
from asyncsgd.settings.groups import BUILT_IN
from asyncsgd.settings.yaml_reader import read_yaml
from asyncsgd.studies.arms import Arm, Loop, resolve, valid
from asyncsgd.studies.chain import Tuned
from asyncsgd.studies.config import Analysis, Finetune, read_config
from asyncsgd.studies.files import PlanFile, PlannedArm, PlannedStage, RegisteredQuestion, Registration, Tried
from asyncsgd.studies.plan import StudyPlan, sha256_of, share
from asyncsgd.studies.runner import NOT_STARTED, PlannedJob, status_of
from asyncsgd.studies.runs import BASE, TIMED, PlannedRun, Stage
from asyncsgd.tasks import is_built_in
from asyncsgd.tasks.labelled_task import LabelledTask

CHECKPOINTING: Mapping[str, Any] = MappingProxyType({"checkpoint_seconds": 60.0, "keep": 1})
"""Settings of runs that go on where they were stopped, unless the config has others."""
SURE = 0.9
"""Share of what the slowest pilot makes in the seconds of the test runs that these are sure to make too."""


class StudyFolder:
    """A plan and the folder `out` that it is carried out in; `config_text` is kept beside it, `track` is ``--track``,
    `door` is that of `PlannedJob`.

    `look` and `open` raise UsageError if `out` holds a study of another config, or cannot be written.
    """

    def __init__(self, plan: StudyPlan, config_text: str, out: Path, track: str | None = None, door: str = "") -> None:
        self.plan = plan
        self.out = out
        self._config_text = config_text
        self._track = track
        self._door = door
        self.chosen: dict[str, Mapping[str, Any]] = {}
        self.tried: dict[str, list[Tried]] = {}
        """What became of the trials of every arm."""
        self.budgets: dict[str, float] = {}
        """Seconds of the test runs that a reference arm times, by its name; without those that are not known yet."""
        self.looks: dict[str, int] = {}
        """Samples after which these runs evaluate once more, likewise."""
        self.given_up: frozenset[str] = frozenset()
        """Folders of runs that a ladder does without."""
        self.words: Mapping[str, str] = {}
        """What the rungs of a ladder have shown."""
        self._targets: dict[str, float] = {}
        self._analysis_sha256: str | None = None
        self.grow()

    def grow(self) -> bool:
        """Plan the runs of a ladder that follow from those that have ended; whether there are new ones."""
        if self.plan.ladder is None:
            return False
        from asyncsgd.studies.ladder_texts import grown_in

        number = len(self.plan.runs)
        arms, runs, self.given_up, self.words = grown_in(self.plan.ladder, self.out)
        self.plan = dataclasses.replace(self.plan, arms=arms, runs=runs)
        return len(runs) > number

    def look(self) -> None:
        """Read how far the study is, and write nothing."""
        kept = self.out / "config.yaml"
        if kept.is_file():
            if sha256_of(read_config(kept)) != self.plan.config_sha256:
                raise UsageError(
                    f"{self.out} holds a study of another config; type another --out, or go back to the config in "
                    f"{kept}"
                )
        elif self.out.exists() and (not self.out.is_dir() or any(path.is_dir() for path in self.out.iterdir())):
            raise UsageError(f"{self.out} holds other things and no study; type another --out")
        # the registered values stay in the plan while earlier stages are looked at again
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            file = msgspec.json.decode((self.out / "plan.json").read_bytes(), type=PlanFile)
            self._targets = file.targets
            self._analysis_sha256 = file.analysis_sha256
        self.choose()

    def open(self) -> None:
        """Read how far the study is and write its plan into its folder."""
        self.look()
        write_text(self.out / "config.yaml", self._config_text)
        self.write_plan()
        if self.plan.ladder is not None:
            from asyncsgd.studies.ladder_texts import write_texts

            write_texts(self.plan.ladder, self.out)

    def status(self, run: PlannedRun) -> str:
        return status_of(self.out / run.folder)

    def unfinished(self, stage: Stage) -> list[PlannedRun]:
        """The runs of a stage that have no result yet."""
        return [run for run in self.plan.of_stage(stage) if self.status(run) not in FINISHED]

    def to_do(
        self, stage: Stage, shard: tuple[int, int], *, retry: bool = False, pretend: bool = False
    ) -> list[PlannedJob]:
        """The runs of a stage and shard that can be made here and are not yet, in the plan's order.

        Args:
            retry: whether what FAILED is made again.
            pretend: use a stand-in for what only earlier stages tell (the first trial, the base model).
        """
        skipped = FINISHED if retry else (*FINISHED, FAILED)
        mine = share(self.plan, stage, shard)
        if not retry:
            mine -= self.given_up
        left = [run for run in self.plan.of_stage(stage) if run.folder in mine and self.status(run) not in skipped]
        jobs = [self.job(run, pretend=pretend) for run in left]
        return [job for job in jobs if job is not None and not job.lacks]

    def job(self, run: PlannedRun, *, pretend: bool = False) -> PlannedJob | None:
        """The run with its settings; None while they are not known, or can never be had; see `to_do`."""
        plan = self.plan
        model = self._model_of(run, pretend)
        origin = str(model.get("model", plan.first_model))
        stand_in = {tuned.name: tuned.trials[0] for tuned in plan.tuned if pretend}
        chosen = {**stand_in, **self.chosen}
        parent = plan.parent_of(run, self.chosen)
        if parent is not None and read_summary(self.out / parent).get("status") == DONE:
            origin = str(self.out / parent)
        elif parent is not None and not pretend:
            return None
        without_arms = plan.given(run)
        if without_arms is None:
            if (values := plan.values(run, chosen, self.budgets, self.looks)) is None:
                return None
            values |= model
            if run.parent is not None:
                values["model"] = origin
        else:
            _, settings = without_arms
            if (tuning := plan.tuning_of(run, chosen)) is None:
                return None
            values = {**settings, **tuning, "model": origin, "seed": run.finetune_seed}
        loop: Loop = "library"
        if plan.ladder is not None:
            arm = plan.arm(run.arm)
            loop = arm.loop
            texts = self.out / "texts" / arm.task / run.stage
            if texts.is_dir():  # else nothing is run yet
                values["data"] = str(texts)
        measures = run.stage in TIMED and values.get("clock") != "virtual"
        values = {**({} if measures else CHECKPOINTING), **values, "track": self._track}
        values["run_dir"] = str(self.out / run.folder)
        tags = {"stage": run.stage, "arm": run.arm}
        kept = run.stage not in ("finetune", "climb", "proof")
        return PlannedJob(
            run.folder, plan.task(run), values, measures, tags, kept, self.out, plan.name, self._door, loop
        )

    def _model_of(self, run: PlannedRun, pretend: bool) -> dict[str, Any]:
        """The base model made by this study, as a setting; nothing where the config names one."""
        if self.plan.base_model is None or run.stage == "base":
            return {}
        model = self.out / BASE / "model"
        if pretend and not model.is_dir():
            return {"model": self.plan.base_model.get("model", "tiny")}
        return {"model": str(model)}

    def choose(self) -> None:
        """Read what tuning has found and choose for every arm and stage whose trials are all finished.

        The chosen trial has the lowest mean of the final evaluation losses over the tuning seeds, or in a labelled task
        the best mean of its score. A diverged one, and a model that leaves the score undefined, counts as the worst. Of
        equal ones the first wins.
        """
        seeds = list(self.plan.config.tuning.seeds)
        self.tried = {arm.name: [] for arm in self.plan.arms}
        for tuned in self.plan.tuned:
            score_name, sign = self._tuned_by(tuned)
            tried = self.tried[tuned.name] = []
            statuses: set[str] = set()
            for trial in tuned.trials:
                folders = [self.out / tuned.folder_of(tuned.trials.index(trial), seed) for seed in seeds]
                statuses |= set(map(status_of, folders))
                ended = [one if one.get("status") == DONE else {} for one in map(read_summary, folders)]
                losses = [one.get("final_eval_loss") for one in ended]
                values = losses
                if score_name is not None:
                    values = [(one.get("metrics") or {}).get(score_name) for one in ended]
                finite = [value for value in values if value is not None]
                score = statistics.fmean(finite) if len(finite) == len(values) else None
                tried.append(Tried(dict(trial), seeds, losses, score))
            if statuses <= set(FINISHED):
                scores = [math.inf if each.score is None else sign * each.score for each in tried]
                best = scores.index(min(scores))
                self.chosen[tuned.name] = tuned.trials[best]
        self._find_budgets()

    def _tuned_by(self, tuned: Tuned) -> tuple[str | None, int]:
        """The score by which trials are chosen, None for the loss, and the sign that makes less of it the better."""
        task = PlannedJob(tuned.name, tuned.task, tuned.settings).settings.task
        if not isinstance(task, LabelledTask):
            return None, 1
        name, better = next(iter(task.scored_by().items()))
        return name, -1 if better == "higher" else 1

    def register(self) -> None:
        """Write analysis.yaml, once, before the first test run; and check that it still says the same afterwards.

        Raises:
            UsageError: if it was changed, or the plan's analysis was.
            RunError: if no pilot run of a reference arm gives a target or a budget.
        """
        import yaml

        plan = self.plan
        analysis = self.plan.analysis
        path = self.out / "analysis.yaml"
        if analysis is None:
            return
        self._targets, origin, pilots = self._find_targets(analysis)
        self._find_budgets()
        if unknown := sorted(set(plan.timed_by.values()) - set(self.budgets)):
            raise RunError(
                f"every pilot run of {unknown[0]} diverged, so there are no seconds; lower its learning rates"
            )
        registration = Registration(
            **{key: getattr(analysis, key) for key in ("reference", "control", "alpha", "margins", "margin_reasons")},
            differences=analysis.differences,
            study=plan.name,
            primary=RegisteredQuestion(**msgspec.structs.asdict(analysis.primary)),
            family=list(plan.family),
            num_seeds=len(plan.config.seeds),
            seeds=list(plan.config.seeds),
            targets=self._targets,
            budget_seconds=self.budgets,
            look_samples=self.looks,
            target_from=origin,
            pilots=pilots,
            config_sha256=plan.config_sha256,
        )
        content = msgspec.to_builtins(registration)
        if not analysis.differences:
            del content["differences"]  # as files have it that were registered before there were any
        with locked(self.out / ".lock-files", fcntl.LOCK_EX):  # other shards register too
            if not path.exists():
                if any(self.status(run) != NOT_STARTED for run in plan.of_stage("test")):
                    raise UsageError(
                        f"{path} is missing, though there are test runs; a registration must be older than they are: "
                        f"put the old file back, or type another --out"
                    )
                write_text(path, yaml.safe_dump(content, sort_keys=False))
            kept = read_yaml(path.read_text("utf-8"), str(path))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if kept != content or self._analysis_sha256 not in (None, digest):
                raise UsageError(
                    f"{path} was written before the test runs and is not what it was, or no longer agrees with the "
                    f"config; put the old file back, or type another --out"
                )
        self._analysis_sha256 = digest
        self.write_plan()
        print(f"analysis.yaml  sha256 {digest[:16]}", flush=True)

    def _pilots_of(self, arm: Arm) -> list[Path]:
        """The folders of the runs that tell the target and the seconds of a reference arm: its pilots, or without any
        the tuning runs of its chosen trial.
        """
        config = self.plan.config
        if config.pilots:
            return [self.out / f"pilot/{arm.name}/s{seed}" for seed in config.pilots]
        if arm.name not in self.chosen:
            return []
        number = arm.trials.index(self.chosen[arm.name])
        return [self.out / f"tuning/{arm.name}/t{number}-s{seed}" for seed in config.tuning.seeds]

    def _find_budgets(self) -> None:
        """Where all pilots of a reference arm have ended: the median of their seconds, and the samples that the slowest
        one is sure to make in so many.
        """
        for name in sorted(set(self.plan.timed_by.values())):
            summaries = [read_summary(path) for path in self._pilots_of(self.plan.arm(name))]
            done = [summary for summary in summaries if summary.get("status") == DONE]
            if done and all(summary.get("status") in FINISHED for summary in summaries):
                self.budgets[name] = statistics.median(summary["train_seconds"] for summary in done)
                slowest = min(summary["num_samples"] / summary["train_seconds"] for summary in done)
                self.looks[name] = max(1, int(SURE * slowest * self.budgets[name]))

    def assume_budgets(self, seconds_of: Callable[[PlannedJob], float]) -> None:
        """Put an estimate in the place of the budgets that are not known yet."""
        for name in sorted(set(self.plan.timed_by.values()) - set(self.budgets)):
            job = self.job(PlannedRun("", "pilot", name, 0), pretend=True)
            assert job is not None
            self.budgets[name] = seconds_of(job)

    def _find_targets(self, analysis: Analysis) -> tuple[dict[str, float], str | None, dict[str, dict[str, float]]]:
        """The target loss of every reference arm, how it was found, and how far its pilots fell; see `Registration`."""
        config = self.plan.config
        arms = [arm for arm in self.plan.arms if arm.algorithm == analysis.reference]
        if analysis.target_loss is not None:
            return {arm.name: analysis.target_loss for arm in arms}, "given in the config", {}
        if not (number := len(config.pilots or config.tuning.seeds)):
            return {}, None, {}
        targets = {}
        improvements = {}
        diverged = 0
        for arm in arms:
            records = [read_events(path / "events.jsonl") for path in self._pilots_of(arm)]
            curves = [[record["loss"] for record in run if record.get("kind") == "evaluate"] for run in records]
            finite = [losses for losses in curves if losses and None not in losses]
            if not finite:
                raise RunError(f"every pilot run of {arm.name} diverged, so there is no target; lower learning rates")
            diverged += len(curves) - len(finite)
            first = statistics.median(one[0] for one in finite)
            best = statistics.median(map(min, finite))
            improvements[arm.name] = {"runs": len(finite), "first_loss": round(first, 6), "best_loss": round(best, 6)}
            targets[arm.name] = round(first - analysis.target_share * (first - best), 6)
        whose = "its chosen trial, " * bool(arms[0].trials)
        whose += "seeds of their own" if config.pilots else "tuning seeds"
        origin = (
            f"{100 * analysis.target_share:g} % of the median improvement of {number} pilot run{'s' * (number != 1)} "
            f"of the reference ({whose}){f'; {diverged} that diverged left out' * bool(diverged)}"
        )
        return targets, origin, improvements

    def _settings(self) -> dict[str, dict[str, Any]]:
        """All settings of every run of which they are known by now."""
        asked: dict[str, dict[str, Any]] = {}
        for run in self.plan.runs:
            without_arms = self.plan.given(run)
            if without_arms is None:
                values = self.plan.values(run, self.chosen, self.budgets, self.looks)
            else:
                tuning = self.plan.tuning_of(run, self.chosen)
                values = None if tuning is None else {**without_arms[1], **tuning, "seed": run.finetune_seed}
            if values is not None:
                asked[run.folder] = valid(run.folder, values, self.plan.task(run))
        return asked

    def write_plan(self) -> None:
        """Write plan.json as things are now."""
        file = PlanFile(
            study=self.plan.name,
            config_sha256=self.plan.config_sha256,
            base_model=self.plan.base_model is not None,
            arms=[
                PlannedArm(
                    *(arm.name, arm.algorithm, dict(arm.settings), *arm.place, arm.settings.get("speeds")),
                    None if arm.name not in self.chosen else dict(self.chosen[arm.name]),
                    self.tried[arm.name],
                )
                for arm in self.plan.arms
            ],
            targets=self._targets,
            budget_seconds=self.budgets,
            stages=[
                PlannedStage(
                    tuned.name,
                    dict(tuned.settings),
                    None if tuned.name not in self.chosen else dict(self.chosen[tuned.name]),
                    self.tried[tuned.name],
                )
                for tuned in self.plan.tuned
                if not tuned.folder.startswith("tuning/")
            ],
            runs=[dataclasses.replace(run, parent=self.plan.parent_of(run, self.chosen)) for run in self.plan.runs],
            settings=self._settings(),
            analysis_sha256=self._analysis_sha256,
        )
        with locked(self.out / ".lock-files", fcntl.LOCK_EX):
            write_json(self.out / "plan.json", msgspec.to_builtins(file))


def _missing(task: Any) -> Iterator[str]:
    """What is wrong with the data and the model of a run; the Hub is asked for a model that is no folder."""
    from asyncsgd.data.tokenizer import pretrained_tokenizer

    try:
        task.check_names()
    except UsageError as error:
        yield str(error)
    if not is_built_in(task):
        return
    try:
        if task.model_name not in task.shapes:
            pretrained_tokenizer(task.origin().model)
    except UsageError as error:
        hint = f"--model {task.model_name}: here is no such folder, and the Hub does not give a model of that name"
        yield str(error) if os.path.isdir(task.model_name) else hint + nearest(task.model_name, task.shapes)


def _check_score(finetune: Finetune, analysis: Analysis) -> None:
    """Refuse to compare by a score that the labels to score on leave undefined; the data are read for that."""
    from asyncsgd.run.run import run_of

    job = PlannedJob("finetune", finetune.task, finetune.settings)
    task = job.settings.task
    if analysis.primary.endpoint != finetune.score or task.data_name in BUILT_IN or not isinstance(task, LabelledTask):
        return
    undefined = task.undefined_scores(task.read(run_of(job.experiment, job.settings).cache))
    if finetune.score in undefined:
        known = ", ".join(name for name in task.scored.better if name not in (*undefined, "f1"))
        raise UsageError(
            f"the runs of this study would be compared by {finetune.score}, which is not defined: "
            f"{undefined[finetune.score]} in {task.data_name}; name other data, or write score: with one of {known}"
        )


@contextlib.contextmanager
def locked(file: Path, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> Iterator[None]:
    """Keep out every other process that locks this file: ``.lock-1-of-2`` of the first of two shards, ``.lock-files``
    of what all write; the kernel frees the lock when this process ends. With LOCK_EX alone it waits.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = open(file, "a", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"{file.parent} cannot be written ({error.strerror}); type --out FOLDER") from error
    with opened:
        if not lock(opened, how):
            raise UsageError(
                f"another process is at work in {file.parent}; wait for it, or stop it, or give each its part: "
                f"--shard 1/2 and --shard 2/2"
            )
        yield


def check(plan: StudyPlan, left: Collection[str] = ()) -> None:
    """Read every rule and every speed that the plan names as text, and look for the models, texts and folders of
    candidates of the arms in `left`.

    Raises:
        UsageError: for a rule or speeds of an arm, or with all that is missing.
    """
    from asyncsgd.run.run import run_of
    from asyncsgd.run.runtimes import kind_of

    tasks = {}
    for arm in plan.arms:
        for trial in arm.trials or ({},):
            job = PlannedJob(arm.name, arm.task, resolve({**plan.base, **arm.settings, **trial}))
            try:
                task = job.settings.task if job.lacks else run_of(arm.name, job.settings).task
            except UsageError as error:
                raise UsageError(f"arm {arm.name}: {error}") from error
        if arm.name in left:
            tasks[repr(task)] = task
    others = {stage.name: (stage.task, stage.settings) for stage in (*plan.chain.before, *plan.chain.after)}
    if plan.finetune is not None:
        others["finetune"] = plan.finetune.task, plan.finetune.settings
    for name, (name_of_task, settings) in others.items():
        job = PlannedJob(name, name_of_task, settings)
        tasks[repr(job.settings.task)] = job.settings.task
        if not kind_of(job.settings.job.mode, job.settings.job.clock).in_one_process:
            raise UsageError(
                f"{name}: mode: {job.settings.job.mode} needs processes of its own, and a study trains several "
                f"models side by side where there are no arms; write mode: single, or clock: virtual"
            )
    if plan.finetune is not None and plan.analysis is not None:
        _check_score(plan.finetune, plan.analysis)
    if reasons := dict.fromkeys(reason for task in tasks.values() for reason in _missing(task)):
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise UsageError(
            f"{plan.name} cannot be run here, and no run was started:{listed}\n"
            f"the first lines of the config say where its models and data come from"
        )
