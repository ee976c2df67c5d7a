"""Carry a plan out stage by stage; stop anywhere and go on later."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from types import MappingProxyType

from asyncsgd.backends.launch import fork_server
from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import RunError
from asyncsgd.records.events import DONE, FAILED, FINISHED
from asyncsgd.records.machine import available_cores
from asyncsgd.run.runtimes import KINDS
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
    if not tasks.isdisjoint(TASKS):  # a model of one's own needs no transformers
        model = plan.models_and_data()[0][0]
        modules |= {*PRELOAD_OF_TRANSFORMERS}
    modes = {arm.settings.get("mode") for arm in plan.arms}
    modules |= {name for kind in KINDS if kind.mode in modes for name in kind.preload}
    modules |= {name for task in tasks for name in class_named(task).preload}
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
    """Run everything that is left, stage by stage, and what the plan grows by; return the runs that failed.

    Args:
        context, jobs: see `Runner`.
        again: how runs that failed are made again, for messages.

    Raises:
        RunError: if a stage cannot begin because the one before it is not complete; the message says what to type.
        UsageError: if what is there does not fit the plan.
        KeyboardInterrupt: if the user has asked for it.
    """
    failed: list[PlannedJob] = []
    progress = progress_of(study, jobs, retry, shard)
    for stage in STAGES:
        if stage != "base" and any(study.status(run) != DONE for run in study.plan.of_stage("base")):
            raise RunError(
                f"the base model could not be made; look at {study.out / 'logs' / 'base.txt'}, then {again}, "
                f"or mend the config and name another folder"
            )
        if stage in WAITS_FOR:
            study.choose()
            if missing := study.unfinished(WAITS_FOR[stage]):
                raise RunError(_not_finished(WAITS_FOR[stage], missing, shard, failed, again))
        if stage == "test":
            study.register()
            for name, tried in study.tried.items():
                if tried and all(trial.score is None for trial in tried):
                    print(f"every trial of {name} diverged; its first one is tested all the same", file=sys.stderr)
        # In a chain a run can be made only when the one is there from which it starts, so it takes several rounds.
        for _ in range(study.plan.chain.rounds(stage)):
            study.choose()
            todo = study.to_do(stage, shard if stage != "base" else (1, 1), retry=retry)
            if stage == "base" and todo and shard[0] > 1:
                raise RunError(f"the base model is made by --shard 1/{shard[1]}; run it first, then this command again")
            if todo:
                runner = Runner(context, stop, jobs, progress)
                try:
                    runner.run(todo)
                finally:
                    progress.clear()  # so that the next message has a line of its own
                failed += runner.failed
    known = study.words
    if study.grow():
        for rung, word in study.words.items():
            if rung not in known:
                print(f"{rung}: {word}", flush=True)
        study.choose()
        study.write_plan()
        failed += carry_out(study, context, stop, jobs=jobs, retry=False, shard=shard, again=again)
    return failed


def progress_of(study: StudyFolder, jobs: int | None, retry: bool, shard: tuple[int, int]) -> Progress:
    """How far the runs of a shard are, of those that can be made here.

    Args:
        study: the plan and its folder.
        jobs: how many runs go on side by side; None: one.
        retry: whether what FAILED is made again.
        shard: its number, and how many there are.
    """
    plan = study.plan
    skipped = () if retry else (FAILED,)
    num_finished = 0
    left = []
    for stage in STAGES:
        own = share(plan, stage, shard if stage != "base" else (1, 1))
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


def _not_finished(
    stage: Stage, missing: Sequence[PlannedRun], shard: tuple[int, int], failed: Sequence[PlannedJob], again: str
) -> str:
    do = f"look at its log in logs/, then {again}"
    if shard[1] > 1 and not failed:
        do = "run the other shards, then this command again"
    are = "run is" if len(missing) == 1 else "runs are"
    return f"{len(missing)} {stage} {are} not finished, the first is {missing[0].folder}; {do}"
