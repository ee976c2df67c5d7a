"""A study is carried out stage by stage. It can be stopped anywhere and go on later."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from types import MappingProxyType

from asyncsgd.backends.launch import fork_server
from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import RunError
from asyncsgd.records.events import DONE, FAILED, FINISHED
from asyncsgd.records.machine import available_cores
from asyncsgd.run.runtimes import KINDS
from asyncsgd.studies.files import end_of_grid
from asyncsgd.studies.plan import StudyPlan, share
from asyncsgd.studies.progress import Progress, RunKind
from asyncsgd.studies.runner import PRELOAD, PRELOAD_OF_TRANSFORMERS, PlannedJob, Runner
from asyncsgd.studies.runs import STAGES, PlannedRun, Stage
from asyncsgd.studies.study_folder import StudyFolder
from asyncsgd.tasks import TASKS, class_named

WAITS_FOR: Mapping[Stage, Stage] = MappingProxyType(
    {"tuning": "before", "trial": "tuning", "pilot": "trial", "test": "pilot"}
)
"""Stage of the plan -> the stage of which every run must be finished before it begins."""


def fork_server_for(plan: StudyPlan) -> ForkServerContext:
    """The server that forks the processes of a plan's runs. Start it early: it imports while this process goes on."""
    tasks = {plan.task(run) for run in plan.runs}
    model = None
    modules: set[str] = set()
    if not tasks.isdisjoint(TASKS):  # a task of the user's own needs no transformers
        model, _ = plan.models_and_data()[0]  # of the first arm; the classes of other models are imported when needed
        modules.update(PRELOAD_OF_TRANSFORMERS)
    modes = {arm.settings.get("mode") for arm in plan.arms}
    for kind in KINDS:
        if kind.mode in modes:
            modules.update(kind.preload)
    for task in tasks:
        modules.update(class_named(task).preload)
    return fork_server(model, *PRELOAD, *sorted(modules))


def carry_out(
    study: StudyFolder,
    context: ForkServerContext | None,
    stop: StopRequest,
    *,
    jobs: int | None,
    retry: bool,
    shard: tuple[int, int],
    again: str = "type the same command with --retry",
) -> list[PlannedJob]:
    """Make the runs that are left, stage by stage, and those by which the plan grows then. Return the runs that failed.

    Args:
        context: see `Runner`.
        jobs: how many runs go on side by side; see `side_by_side` of `Runner`.
        retry: whether what FAILED before is made again, once.
        shard: the number of this shard, from 1, and how many there are.
        again: how runs that failed are made again, for messages.

    Raises:
        RunError: if a stage cannot begin because the one before it is not complete; the message says what to type.
        UsageError: if what is there does not fit the plan.
        KeyboardInterrupt: if the user has asked to stop.
    """
    failed: list[PlannedJob] = []
    progress = progress_of(study, jobs, retry, shard)
    for stage in STAGES:
        if stage != "base" and any(study.status(run) != DONE for run in study.plan.of_stage("base")):
            raise RunError(
                f"the base model could not be made; look at {study.out / 'logs' / 'base.txt'}, then {again}, "
                f"or mend the config and name another folder"
            )
        earlier = WAITS_FOR.get(stage)
        if earlier is not None:
            study.choose()
            missing = study.unfinished(earlier)
            if missing:
                raise RunError(_not_finished(earlier, missing, shard, failed, again))
        if stage == "pilot":
            for note in _notes_of_ends(study):
                print(note, flush=True)
        if stage == "test":
            study.register()
            for name, tried in study.tried.items():
                if tried and all(trial.score is None for trial in tried):
                    print(f"every trial of {name} diverged or has no score; the first one is tested", file=sys.stderr)
        # In a chain a run can be made only when the run that it starts from is done, so there are several rounds.
        for _ in range(study.plan.chain.rounds(stage)):
            study.choose()
            failed_here = {job.folder for job in failed}  # with `retry` these too are still to do
            left = study.to_do(stage, _shard_of(stage, shard), retry=retry)
            to_make = [job for job in left if job.folder not in failed_here]
            if stage == "base" and to_make and shard[0] > 1:
                raise RunError(f"the base model is made by --shard 1/{shard[1]}; run it first, then this command again")
            if to_make:
                runner = Runner(context, stop, jobs, progress)
                try:
                    runner.run(to_make)
                finally:
                    progress.clear()  # so that the next message has a line of its own
                failed += runner.failed
    known_words = study.words
    if study.grow():
        for rung, word in study.words.items():
            if rung not in known_words:
                print(f"{rung}: {word}", flush=True)
        study.choose()
        study.write_plan()
        # what failed was made again above
        failed += carry_out(study, context, stop, jobs=jobs, retry=False, shard=shard, again=again)
    return failed


def _notes_of_ends(study: StudyFolder) -> Iterator[str]:
    """Whose best learning rate lies at an end of its grid, while it is not too late: nothing is registered yet."""
    if study.plan.analysis is None or (study.out / "analysis.yaml").exists():
        return
    for name, tried in study.tried.items():
        end = end_of_grid(tried, study.chosen.get(name))
        if end:
            yield (
                f"note   {name}: the best learning_rate, {study.chosen[name]['learning_rate']:g}, is the {end} of its "
                f"grid; stop here (Ctrl-C) and widen it in another folder, before the analysis is registered"
            )


def progress_of(study: StudyFolder, jobs: int | None, retry: bool, shard: tuple[int, int]) -> Progress:
    """How far a shard is, counted in the runs that can be made here.

    Args:
        jobs, retry, shard: see `carry_out`.
    """
    plan = study.plan
    skipped = () if retry else (FAILED,)
    num_finished = 0
    left = []
    for stage in STAGES:
        own = share(plan, stage, _shard_of(stage, shard))
        for run in plan.of_stage(stage):
            status = study.status(run)
            if run.folder not in own or status in skipped:
                continue
            if status in FINISHED:
                num_finished += 1
                continue
            job = study.job(run, pretend=True)
            if job is None or not job.why_not_runnable:
                left.append(RunKind(stage, run.arm, plan.measures(run)))
    return Progress(left, num_finished + len(left), min(jobs or 1, available_cores()))


def _shard_of(stage: Stage, shard: tuple[int, int]) -> tuple[int, int]:
    """The shard of a stage. The base model is one run, whose stage is not divided."""
    return (1, 1) if stage == "base" else shard


def _not_finished(
    stage: Stage, missing: Sequence[PlannedRun], shard: tuple[int, int], failed: Sequence[PlannedJob], again: str
) -> str:
    """What to tell the user where the runs of `stage` that are `missing` keep the next stage from beginning."""
    do = f"look at its log in logs/, then {again}"
    if shard[1] > 1 and not failed:
        do = "run the other shards, then this command again"
    are = "run is" if len(missing) == 1 else "runs are"
    return f"{len(missing)} {stage} {are} not finished, the first is {missing[0].folder}; {do}"
