"""A study's plan and the folder of its runs: what is done, chosen, fixed and registered, and what is left.

The run folders alone say what is done, so no other file has to be kept up to date with them. A killed study leaves
nothing locked, because the kernel frees locks when the process ends.

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
from asyncsgd.studies.arms import Arm, Loop, checked_settings, resolve
from asyncsgd.studies.chain import TuningTarget
from asyncsgd.studies.config import Analysis, Finetune, read_config
from asyncsgd.studies.files import PlanFile, PlannedArm, PlannedStage, RegisteredQuestion, Registration, Tried
from asyncsgd.studies.plan import StudyPlan, sha256_of, share
from asyncsgd.studies.runner import NOT_STARTED, PlannedJob, status_of
from asyncsgd.studies.runs import BASE, PlannedRun, Stage
from asyncsgd.tasks import is_built_in
from asyncsgd.tasks.labelled_task import LabelledTask

CHECKPOINTING: Mapping[str, Any] = MappingProxyType({"checkpoint_seconds": 60.0, "keep": 1})
"""Settings of runs that go on where they were stopped, unless the config has others."""
SAFE_SHARE = 0.9
"""Test runs are taken to make at least this share of the samples that the slowest pilot would make in their seconds."""


class StudyFolder:
    """A plan and the folder in which it is carried out.

    Args:
        config_text: what the folder's config.yaml holds.
        out: the folder. `read_state` and `begin` raise UsageError if it holds a study of another config, or cannot be
            written.
        track: the value of ``--track``.
        command_prefix: see `PlannedJob`.
    """

    def __init__(
        self, plan: StudyPlan, config_text: str, out: Path, track: str | None = None, command_prefix: str = ""
    ) -> None:
        self.plan = plan
        self.out = out
        self._config_text = config_text
        self._track = track
        self._command_prefix = command_prefix
        self.chosen: dict[str, Mapping[str, Any]] = {}
        """Tuning target -> its chosen trial, once that is known."""
        self.tried: dict[str, list[Tried]] = {}
        """Arm or other tuning target -> what became of its trials."""
        self.budget_seconds: dict[str, float] = {}
        """Reference arm -> seconds of the test runs of its group, once they are known."""
        self.evaluate_at: dict[str, int] = {}
        """Reference arm -> samples after which the test runs of its group evaluate once more, once they are known."""
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

    def read_state(self) -> None:
        """Read how far the study is, from its folder, and write nothing."""
        kept = self.out / "config.yaml"
        if kept.is_file():
            if sha256_of(read_config(kept)) != self.plan.config_sha256:
                raise UsageError(
                    f"{self.out} holds a study of another config; type another --out, or go back to the config in "
                    f"{kept}"
                )
        elif self.out.exists() and (not self.out.is_dir() or any(path.is_dir() for path in self.out.iterdir())):
            raise UsageError(f"{self.out} holds other things and no study; type another --out")
        # Kept, so that `write_plan` does not drop what was registered before `register` runs again.
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            file = msgspec.json.decode((self.out / "plan.json").read_bytes(), type=PlanFile)
            self._targets = file.targets
            self._analysis_sha256 = file.analysis_sha256
        self.choose()

    def begin(self) -> None:
        """Read how far the study is and write its plan into its folder."""
        self.read_state()
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
        return [job for job in jobs if job is not None and not job.why_not_runnable]

    def job(self, run: PlannedRun, *, pretend: bool = False) -> PlannedJob | None:
        """The run with its settings; None while they are not known, or if the run that it starts from has no model.

        Args:
            pretend: see `to_do`.
        """
        plan = self.plan
        model = self._model_of(run, pretend)
        stand_in = {target.name: target.trials[0] for target in plan.tuning_targets if pretend}
        chosen = {**stand_in, **self.chosen}
        if model is None:
            return None
        values = plan.run_settings(run, chosen, self.budget_seconds, self.evaluate_at, model)
        if values is None:
            return None
        loop: Loop = "library"
        if plan.ladder is not None:
            arm = plan.arm(run.arm)
            loop = arm.loop
            texts = self.out / "texts" / arm.task / run.stage
            if texts.is_dir():  # else nothing is run yet
                values["data"] = str(texts)
        measures = plan.measures(run)
        values = {**({} if measures else CHECKPOINTING), **values, "track": self._track}
        values["run_dir"] = str(self.out / run.folder)
        return PlannedJob(
            run.folder,
            plan.task(run),
            values,
            measures,
            tags={"stage": run.stage, "arm": run.arm},
            saves_model=run.stage not in ("finetune", "climb", "proof"),
            out=self.out,
            study=plan.name,
            command_prefix=self._command_prefix,
            loop=loop,
        )

    def _model_of(self, run: PlannedRun, pretend: bool) -> dict[str, Any] | None:
        """The setting `model` of a run that starts from a model of the study; nothing for a run that starts from none,
        whose model the config names.

        None: the run that it starts from has no model.
        """
        parent = self.plan.parent_of(run, self.chosen)
        if parent is not None:
            if read_summary(self.out / parent).get("status") == DONE:
                return {"model": str(self.out / parent)}
            if not pretend:
                return None
        if self.plan.base_model is None:
            has_own = parent is None and self.plan.stage_without_arms_of(run) is None
            return {} if has_own else {"model": self.plan.first_model}
        if run.stage == "base":
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
        for tuned in self.plan.tuning_targets:
            score_name, sign = self._tuned_by(tuned)
            tried = self.tried[tuned.name] = []
            statuses: set[str] = set()
            for trial in tuned.trials:
                number = tuned.trials.index(trial)  # equal trials share the runs of the first of them
                folders = [self.out / tuned.folder_of(number, seed) for seed in seeds]
                statuses |= set(map(status_of, folders))
                ended = [one if one.get("status") == DONE else {} for one in map(read_summary, folders)]
                losses = [one.get("final_eval_loss") for one in ended]
                values: list[Any] = losses
                if score_name is not None:
                    values = [(one.get("metrics") or {}).get(score_name) for one in ended]
                score = None if None in values else statistics.fmean(values)
                tried.append(Tried(dict(trial), seeds, losses, score))
            if statuses <= set(FINISHED):
                scores = [math.inf if each.score is None else sign * each.score for each in tried]
                best = scores.index(min(scores))
                self.chosen[tuned.name] = tuned.trials[best]
        self._find_budgets()

    def _tuned_by(self, tuned: TuningTarget) -> tuple[str | None, int]:
        """The score by which trials are chosen, None for the loss, and 1 if less of it is better, -1 if more is."""
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
        analysis = plan.analysis
        path = self.out / "analysis.yaml"
        if analysis is None:
            return
        self._targets, origin, pilots = self._find_targets(analysis)
        self._find_budgets()
        if unknown := sorted(set(plan.timed_by.values()) - set(self.budget_seconds)):
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
            budget_seconds=self.budget_seconds,
            look_samples=self.evaluate_at,
            target_from=origin,
            pilots=pilots,
            config_sha256=plan.config_sha256,
        )
        content = msgspec.to_builtins(registration)
        if not analysis.differences:
            # Registrations from before there were differences have no such key, and contents are compared below.
            del content["differences"]
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
        """Set `budget_seconds` and `evaluate_at` of every reference arm whose pilots have all ended.

        The seconds are the median of those of its pilots. The samples are `SAFE_SHARE` of what the slowest pilot would
        make in as many.
        """
        for name in sorted(set(self.plan.timed_by.values())):
            summaries = [read_summary(path) for path in self._pilots_of(self.plan.arm(name))]
            done = [summary for summary in summaries if summary.get("status") == DONE]
            if done and all(summary.get("status") in FINISHED for summary in summaries):
                self.budget_seconds[name] = statistics.median(summary["train_seconds"] for summary in done)
                slowest = min(summary["num_samples"] / summary["train_seconds"] for summary in done)
                self.evaluate_at[name] = max(1, int(SAFE_SHARE * slowest * self.budget_seconds[name]))

    def assume_budgets(self, seconds_of: Callable[[PlannedJob], float]) -> None:
        """Put an estimate in the place of the budgets that are not known yet."""
        for name in sorted(set(self.plan.timed_by.values()) - set(self.budget_seconds)):
            job = self.job(PlannedRun("", "pilot", name, 0), pretend=True)
            assert job is not None
            self.budget_seconds[name] = seconds_of(job)

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
        trial = "its chosen trial, " if arms[0].trials else ""
        seeds = "seeds of their own" if config.pilots else "tuning seeds"
        runs = "1 pilot run" if number == 1 else f"{number} pilot runs"
        origin = (
            f"{100 * analysis.target_share:g} % of the median improvement of {runs} of the reference ({trial}{seeds})"
        )
        if diverged:
            origin += f"; {diverged} that diverged left out"
        return targets, origin, improvements

    def _settings(self) -> dict[str, dict[str, Any]]:
        """All settings of every run of which they are known by now."""
        settings = {}
        for run in self.plan.runs:
            values = self.plan.run_settings(run, self.chosen, self.budget_seconds, self.evaluate_at)
            if values is not None:
                settings[run.folder] = checked_settings(run.folder, values, self.plan.task(run))
        return settings

    def write_plan(self) -> None:
        """Write plan.json as things are now."""
        file = PlanFile(
            study=self.plan.name,
            config_sha256=self.plan.config_sha256,
            base_model=self.plan.base_model is not None,
            arms=[
                PlannedArm(
                    arm.name,
                    arm.algorithm,
                    dict(arm.settings),
                    *arm.workers_and_clock,
                    speeds=arm.settings.get("speeds"),
                    chosen=self._chosen_of(arm.name),
                    trials=self.tried[arm.name],
                )
                for arm in self.plan.arms
            ],
            targets=self._targets,
            budget_seconds=self.budget_seconds,
            stages=[
                PlannedStage(
                    tuned.name, dict(tuned.settings), chosen=self._chosen_of(tuned.name), trials=self.tried[tuned.name]
                )
                for tuned in self.plan.tuning_targets
                if not tuned.folder.startswith("tuning/")
            ],
            runs=[dataclasses.replace(run, parent=self.plan.parent_of(run, self.chosen)) for run in self.plan.runs],
            settings=self._settings(),
            analysis_sha256=self._analysis_sha256,
        )
        with locked(self.out / ".lock-files", fcntl.LOCK_EX):
            write_json(self.out / "plan.json", msgspec.to_builtins(file))

    def _chosen_of(self, name: str) -> dict[str, Any] | None:
        """The chosen trial of a tuning target as plan.json has it."""
        return dict(self.chosen[name]) if name in self.chosen else None


def _reasons_not_runnable(task: Any) -> Iterator[str]:
    """Why runs of a task cannot be made here: its data, its model. The Hub is asked for a model that is no folder."""
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
        # f1 is not offered: it needs the setting `positive` too
        known = ", ".join(name for name in task.scored.better if name not in (*undefined, "f1"))
        raise UsageError(
            f"the runs of this study would be compared by {finetune.score}, which is not defined: "
            f"{undefined[finetune.score]} in {task.data_name}; name other data, or write score: with one of {known}"
        )


@contextlib.contextmanager
def locked(file: Path, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> Iterator[None]:
    """Keep out every other process that locks this file. With LOCK_EX alone it waits for them.

    The first of two shards locks ``.lock-1-of-2``, and who writes what all shards write locks ``.lock-files``. The
    kernel frees the lock when this process ends.
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
                # `run_of` would import a package that is not there
                task = job.settings.task if job.why_not_runnable else run_of(arm.name, job.settings).task
            except UsageError as error:
                raise UsageError(f"arm {arm.name}: {error}") from error
        if arm.name in left:
            tasks[repr(task)] = task  # of the last trial: no trial changes what is looked for
    for name, stage in plan.stages_without_arms.items():
        settings = PlannedJob(name, stage.task, stage.settings).settings
        tasks[repr(settings.task)] = settings.task
        if not kind_of(settings.job.mode, settings.job.clock).in_one_process:
            raise UsageError(
                f"{name}: mode: {settings.job.mode} needs processes of its own, and a study trains several "
                f"models side by side where there are no arms; write mode: single, or clock: virtual"
            )
    if plan.finetune is not None and plan.analysis is not None:
        _check_score(plan.finetune, plan.analysis)
    if reasons := dict.fromkeys(reason for task in tasks.values() for reason in _reasons_not_runnable(task)):
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise UsageError(
            f"{plan.name} cannot be run here, and no run was started:{listed}\n"
            f"the first lines of the config say where its models and data come from"
        )
