"""A study's plan and the folder of its runs: what is done, chosen, fixed and registered, and what is left.

The run folders alone say which runs are done, so no other file has to be kept up to date with them. A killed study
leaves nothing locked, because the kernel frees locks when the process ends.

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

import msgspec

from asyncsgd.errors import RunError, UsageError
from asyncsgd.records.events import DONE, FAILED, FINISHED
from asyncsgd.records.locks import lock
from asyncsgd.records.run_folder import write_json, write_text
from asyncsgd.run.choose_folder import read_summary
from asyncsgd.settings import kinds
from asyncsgd.settings.yaml_reader import read_settings, read_yaml
from asyncsgd.studies.arms import Loop, checked_settings
from asyncsgd.studies.chain import TuningTarget
from asyncsgd.studies.config import Analysis, GivenSettings, Settings, read_config
from asyncsgd.studies.files import PlanFile, PlannedArm, PlannedStage, RegisteredQuestion, Registration, Tried
from asyncsgd.studies.pilots import Pilots, Targets
from asyncsgd.studies.plan import StudyPlan, sha256_of, share
from asyncsgd.studies.runner import NOT_STARTED, PlannedJob, status_of
from asyncsgd.studies.runs import BASE, PlannedRun, Stage
from asyncsgd.tasks.labelled_task import LabelledTask

CHECKPOINTING: GivenSettings = MappingProxyType({"checkpoint_seconds": 60.0, "keep": 1})
"""Settings of runs that go on where they were stopped, unless the config has others."""


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
        self.chosen: dict[str, Settings] = {}
        """Tuning target -> its chosen trial, once that is known."""
        self.tried: dict[str, list[Tried]] = {}
        """Tuning target, or arm that is not tuned -> what became of its trials."""
        self.budget_seconds: dict[str, float] = {}
        """Reference arm -> seconds of the test runs of its group, once they are known."""
        self.evaluate_at: dict[str, int] = {}
        """Reference arm -> samples after which the test runs of its group evaluate once more, once they are known."""
        self.given_up: frozenset[str] = frozenset()
        """Folders of the runs of rungs that ran out of memory, which a ladder does without."""
        self.words: Mapping[str, str] = {}
        """Task and rung of a ladder -> what the rung has shown, in a word."""
        self._pilots = Pilots(plan.config, out, self.chosen)  # the same dict, which `choose` fills
        self._targets: dict[str, float] = {}
        self._analysis_sha256: str | None = None
        self.grow()

    def grow(self) -> bool:
        """Plan the runs of a ladder that follow from those that have ended, and return whether there are new ones."""
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
        elif self.out.exists():
            # The commands that ``--print-commands`` prints make folders of the plan, and no config.yaml.
            planned = {run.folder.partition("/")[0] for run in self.plan.runs}
            is_free = self.out.is_dir() and all(path.name in planned for path in self.out.iterdir() if path.is_dir())
            if not is_free:
                raise UsageError(f"{self.out} holds other things and no study; type another --out")
        # Kept, so that `write_plan` does not drop what was registered before `register` runs again.
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            file = msgspec.json.decode((self.out / "plan.json").read_bytes(), type=PlanFile)
            self._targets = file.targets
            self._analysis_sha256 = file.analysis_sha256
            planned_before = {arm.name for arm in file.arms}
            if self.plan.ladder is None and planned_before != {arm.name for arm in self.plan.arms}:
                raise UsageError(
                    f"{self.out} was planned by an earlier version, with other names of arms: "
                    f"{', '.join(sorted(planned_before))}; type another --out"
                )
        self.choose()
        if not kept.is_file():
            self._refuse_runs_of_another_config()

    def _refuse_runs_of_another_config(self) -> None:
        """Refuse a folder without config.yaml whose runs, of commands that were printed, have other settings."""
        for run in self.plan.runs:
            values = self.plan.run_settings(run, self.chosen, self.budget_seconds, self.evaluate_at)
            folder = self.out / run.folder
            if values is None or not (folder / "settings.yaml").is_file():
                continue
            recorded = read_settings(folder)
            for key, value in checked_settings(run.folder, values, self.plan.task(run)).items():
                is_compared = key in values and key in recorded  # a record has no places, such as cache_dir
                if is_compared and json.dumps(recorded[key]) != json.dumps(kinds.plain(value)):
                    raise UsageError(f"{folder} was made by another config: it has another {key}; type another --out")

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
        """The runs of a stage that have no result yet: they are neither DONE nor DIVERGED."""
        return [run for run in self.plan.of_stage(stage) if self.status(run) not in FINISHED]

    def to_do(
        self, stage: Stage, shard: tuple[int, int], *, retry: bool = False, pretend: bool = False
    ) -> list[PlannedJob]:
        """The runs of a stage and shard that are still to be made and can be made here, in the plan's order.

        Args:
            retry: whether what FAILED is made again, also runs for which there was too little memory.
            pretend: use a stand-in for what only earlier stages tell (the first trial, the base model).
        """
        skipped = FINISHED if retry else (*FINISHED, FAILED)
        folders = share(self.plan, stage, shard)
        if not retry:
            folders -= self.given_up
        jobs = []
        for run in self.plan.of_stage(stage):
            if run.folder not in folders or self.status(run) in skipped:
                continue
            job = self.job(run, pretend=pretend)
            if job is not None and not job.why_not_runnable:
                jobs.append(job)
        return jobs

    def job(self, run: PlannedRun, *, pretend: bool = False) -> PlannedJob | None:
        """The run with its settings; None while they are not known, or if the run that it starts from has no model.

        Args:
            pretend: see `to_do`.
        """
        plan = self.plan
        model = self._model_of(run, pretend)
        if model is None:
            return None
        chosen: Mapping[str, GivenSettings] = self.chosen
        if pretend:
            first_trials = {target.name: target.trials[0] for target in plan.tuning_targets}
            chosen = {**first_trials, **chosen}
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
        if not measures:
            values = {**CHECKPOINTING, **values}
        values["track"] = self._track
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

    def _model_of(self, run: PlannedRun, pretend: bool) -> Settings | None:
        """The setting `model` of a run that starts from a model of the study, or from where the study starts. It is
        empty for a run whose own settings name its model.

        A parent is named by its folder, so that it is recorded as the parent. The base model is named by the ``model``
        in its folder and recorded as a saved model, as if it had been made elsewhere.

        None: the run that it starts from has left no model.
        """
        plan = self.plan
        parent = plan.parent_of(run, self.chosen)
        if parent is not None:
            if read_summary(self.out / parent).get("status") == DONE:
                return {"model": str(self.out / parent)}
            if not pretend:
                return None
        if plan.base_model is None:
            is_of_arm = plan.stage_without_arms_of(run) is None
            if is_of_arm and parent is None:  # the settings of the arms name the model
                return {}
            return {"model": plan.first_model}  # where the study starts; a stand-in if there is a parent
        if run.stage == "base":
            return {}
        model = self.out / BASE / "model"
        if pretend and not model.is_dir():
            return {"model": plan.base_model.get("model", "tiny")}
        return {"model": str(model)}

    def choose(self) -> None:
        """Read what tuning has found and choose for every arm and stage whose trials are all finished.

        The chosen trial has the lowest mean of the final evaluation losses over the tuning seeds, or in a labelled task
        the best mean of its score. A diverged one, and a model that leaves the score undefined, counts as the worst. Of
        equal ones the first wins. The budgets that follow are found too.
        """
        self.tried = {arm.name: [] for arm in self.plan.arms}
        for target in self.plan.tuning_targets:
            score_name, sign = _scored_by(target)
            tried, statuses = self._try(target, score_name)
            self.tried[target.name] = tried
            if statuses <= set(FINISHED):
                scores = [math.inf if each.score is None else sign * each.score for each in tried]
                best = scores.index(min(scores))
                self.chosen[target.name] = dict(target.trials[best])
        self._find_budgets()

    def _try(self, target: TuningTarget, score_name: str | None) -> tuple[list[Tried], set[str]]:
        """What has become of the trials of a tuning target, and the statuses of all their runs.

        Args:
            score_name: the score by which trials are chosen; None: the loss.
        """
        seeds = list(self.plan.config.tuning.seeds)
        tried = []
        statuses: set[str] = set()
        for trial in target.trials:
            number = target.trials.index(trial)  # equal trials share the runs of the first of them
            losses: list[Any] = []
            scores: list[Any] = []
            for seed in seeds:
                folder = self.out / target.folder_of(number, seed)
                status = status_of(folder)
                statuses.add(status)
                if status in FINISHED:
                    _refuse_another_trial(folder, trial)
                summary = read_summary(folder) if status == DONE else {}
                loss = summary.get("final_eval_loss")
                metrics = summary.get("metrics") or {}
                losses.append(loss)
                scores.append(loss if score_name is None else metrics.get(score_name))
            score = None if None in scores else statistics.fmean(scores)
            tried.append(Tried(dict(trial), seeds, losses, score))
        return tried, statuses

    def register(self) -> None:
        """Write analysis.yaml, once, before the first test run; and check that it still says the same afterwards.

        Raises:
            UsageError: if it was changed, or the plan's analysis was.
            RunError: if no pilot run of a reference arm gives a target or a budget.
        """
        plan = self.plan
        analysis = plan.analysis
        if analysis is None:
            return
        references = [arm for arm in plan.arms if arm.algorithm == analysis.reference]
        targets = self._pilots.targets_of(analysis, references)
        self._targets = targets.losses
        self._find_budgets()
        if unknown := sorted(set(plan.timed_by.values()) - set(self.budget_seconds)):
            raise RunError(f"every run of {unknown[0]} that would fix the seconds diverged; lower its learning rates")
        digest = self._write_once(self._registration(analysis, targets))
        self._analysis_sha256 = digest
        self.write_plan()
        print(f"analysis.yaml  sha256 {digest[:16]}", flush=True)

    def _registration(self, analysis: Analysis, targets: Targets) -> Settings:
        """What analysis.yaml is to hold."""
        plan = self.plan
        registration = Registration(
            study=plan.name,
            reference=analysis.reference,
            control=analysis.control,
            differences=analysis.differences,
            primary=RegisteredQuestion(**msgspec.structs.asdict(analysis.primary)),
            alpha=analysis.alpha,
            margins=analysis.margins,
            margin_reasons=analysis.margin_reasons,
            family=list(plan.family),
            num_seeds=len(plan.config.seeds),
            seeds=list(plan.config.seeds),
            targets=targets.losses,
            budget_seconds=self.budget_seconds,
            # The keys of the file were named before the attributes here.
            look_samples=self.evaluate_at,
            target_from=targets.origin,
            pilots=dict(targets.improvements),
            config_sha256=plan.config_sha256,
        )
        content: Settings = msgspec.to_builtins(registration)
        if not analysis.differences:
            # Registrations from before there were differences have no such key, and contents are compared.
            del content["differences"]
        return content

    def _write_once(self, content: Settings) -> str:
        """Write analysis.yaml unless it is there, refuse one that says something else, and return its hash."""
        import yaml

        path = self.out / "analysis.yaml"
        with locked(self.out / ".lock-files", fcntl.LOCK_EX):  # other shards register too
            if not path.exists():
                if any(self.status(run) != NOT_STARTED for run in self.plan.of_stage("test")):
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
        return digest

    def _find_budgets(self) -> None:
        """Set `budget_seconds` and `evaluate_at` of every reference arm whose pilots have all ended."""
        for name in sorted(set(self.plan.timed_by.values())):
            budget = self._pilots.budget_of(self.plan.arm(name))
            if budget is not None:
                self.budget_seconds[name], self.evaluate_at[name] = budget

    def assume_budgets(self, seconds_of: Callable[[PlannedJob], float]) -> None:
        """Put an estimate in the place of the budgets that are not known yet."""
        for name in sorted(set(self.plan.timed_by.values()) - set(self.budget_seconds)):
            # A run that is in no plan and never made: its settings are those of a pilot.
            job = self.job(PlannedRun("", "pilot", name, 0), pretend=True)
            assert job is not None
            self.budget_seconds[name] = seconds_of(job)

    def _settings(self) -> dict[str, Settings]:
        """All settings of every run of which they are known by now, as `PlanFile.settings` has them."""
        settings = {}
        for run in self.plan.runs:
            values = self.plan.run_settings(run, self.chosen, self.budget_seconds, self.evaluate_at)
            if values is not None:
                settings[run.folder] = checked_settings(run.folder, values, self.plan.task(run))
                if self._model_of(run, pretend=True):
                    del settings[run.folder]["model"]  # which would be the default, and not what the run starts from
        return settings

    def write_plan(self) -> None:
        """Write plan.json as things are now."""
        plan = self.plan
        arms = []
        for arm in plan.arms:
            arms.append(
                PlannedArm(
                    arm.name,
                    arm.algorithm,
                    dict(arm.settings),
                    *arm.workers_and_clock,
                    speeds=arm.settings.get("speeds"),
                    chosen=self.chosen.get(arm.name),
                    trials=self.tried[arm.name],
                )
            )
        stages = []
        for target in plan.tuning_targets:
            if target.folder.startswith("tuning/"):  # the trials of an arm
                continue
            chosen = self.chosen.get(target.name)
            stages.append(
                PlannedStage(target.name, dict(target.settings), chosen=chosen, trials=self.tried[target.name])
            )
        file = PlanFile(
            study=plan.name,
            config_sha256=plan.config_sha256,
            base_model=plan.base_model is not None,
            arms=arms,
            targets=self._targets,
            budget_seconds=self.budget_seconds,
            stages=stages,
            runs=[dataclasses.replace(run, parent=plan.parent_of(run, self.chosen)) for run in plan.runs],
            settings=self._settings(),
            analysis_sha256=self._analysis_sha256,
        )
        with locked(self.out / ".lock-files", fcntl.LOCK_EX):
            write_json(self.out / "plan.json", msgspec.to_builtins(file))


def _scored_by(target: TuningTarget) -> tuple[str | None, int]:
    """The score by which trials are chosen, None for the loss, and 1 if less of it is better, -1 if more is."""
    task = PlannedJob(target.name, target.task, target.settings).settings.task
    if not isinstance(task, LabelledTask):
        return None, 1
    name, better = next(iter(task.scored_by().items()))
    return name, -1 if better == "higher" else 1


def _refuse_another_trial(folder: Path, trial: GivenSettings) -> None:
    """Refuse a run that was made with other settings than those of the trial that its folder stands for.

    Trials are numbered by the order of the keys of a grid, which the hash of a config does not tell.
    """
    settings = read_settings(folder)
    for key, value in trial.items():
        recorded = json.dumps(settings.get(key))
        planned = json.dumps(kinds.plain(value))  # a tuple is a list in the file
        if recorded != planned:
            raise UsageError(
                f"{folder} was made with {key}: {recorded}, and the trial of this number has {key}: {planned}; give "
                f"the keys of the grid their old order back, or type another --out"
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
