"""A study from Python. It writes the config that a person would write, and from there on it is a study by command."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from asyncsgd.api import load
from asyncsgd.backends.launch import refuse_ranks
from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import UsageError
from asyncsgd.run.from_python import check_guard, threads_as_before
from asyncsgd.run.runtimes import Runtime
from asyncsgd.settings.yaml_reader import read_yaml
from asyncsgd.studies.check import check
from asyncsgd.studies.config import read_config
from asyncsgd.studies.config_of_arguments import GivenArm, config_of, runtime_of_arm
from asyncsgd.studies.plan import make_plan
from asyncsgd.studies.stages import carry_out, fork_server_for
from asyncsgd.studies.study_folder import StudyFolder, locked
from asyncsgd.tasks.base import Task
from asyncsgd.tasks.check import check_can_be_sent

if TYPE_CHECKING:  # it takes a second to import
    from analysis.load import Study


def study(
    task: Task,
    arms: Mapping[str, GivenArm],
    seeds: Iterable[int],
    *,
    folder: str | Path,
    runtime: Runtime | None = None,
    samples: int | None = None,
    seconds: float | None = None,
    evaluations: int | None = None,
    base: Mapping[str, Any] | None = None,
    tune: Mapping[str, Iterable[Any]] | None = None,
    tuning_seeds: Iterable[int] | None = None,
    pilots: Iterable[int] | None = None,
    question: str | Mapping[str, Any] = "time_to_target",
    jobs: int = 1,
    resume: bool = False,
) -> Study:
    """Compare ways to train `task`: tune every arm alike, register the question, test on fresh seeds, judge.

    1. Tuning: every trial of every arm is run on the tuning seeds. An arm takes the trial with the lowest mean of the
       final evaluation losses, or of a labelled task with the best mean score.
    2. Pilots: the reference as it was tuned is run on seeds of their own. The target loss lies 95 % of the
       way from the median of their first losses to the median of their lowest ones. The training seconds of every test
       run are the median of the pilots' seconds.
    3. Registration: ``analysis.yaml`` is written before the first test run, and never changed: reference, endpoint,
       level, margins, seeds, target and seconds.
    4. Test: every arm is run on every seed. The runs of a seed have the same initial model, data and drawn times, so
       they are pairs.
    5. Verdict: the exact sign-flip test of the paired differences, with Holm's correction over the arms that are
       compared with the reference. A time to the target is known only to lie between two evaluations, and both ends
       are tested.

    All of it is what ``asyncsgd study CONFIG`` does. The folder has the config, the plan, the registration
    and the runs, so ``asyncsgd report FOLDER`` works on it too.

    Args:
        task: of a class at the top of a module, a script or a notebook.
        arms: what is compared, by name, two or more. A rule, or a dict of arguments of `train`, such as
            ``{"runtime": asyncsgd.Processes(2), "rule": asyncsgd.Ringmaster(threshold=2)}``. Arms whose seconds are
            compared have one number of workers and one clock.
        seeds: of the test runs. With 6 seeds the smallest p of one comparison is .03.
        folder: of the study; new, or with `resume` that of a study that was stopped.
        runtime: of the arms that name none; None: `InProcess`.
        samples, seconds, evaluations: as in `train`, of every run. For the time to a target, samples are those of the
            tuning runs and of the pilots.
        base: further arguments of `train`, for all runs, e.g. ``{"optimizer": asyncsgd.SGD(0.9)}``.
        tune: values to try by name, which are crossed, e.g. ``{"learning_rate": [1e-3, 1e-2]}``. An arm with values of
            its own has a key ``tune`` in its dict; all arms need as many. None: nothing is tuned.
        tuning_seeds: seeds of the tuning runs; None: the first after the largest of `seeds` that is no pilot.
        pilots: seeds of the pilots; None: the three seeds after all these, if the endpoint is time_to_target and
            `question` has no target_loss. Empty: the tuning runs of the reference fix the target.
        question: the endpoint: ``time_to_target``, ``loss_at_equal_samples`` or ``loss_at_equal_seconds``. Or a dict of
            what is registered, as ``analysis`` in a config: ``reference`` (default: the first arm), ``primary``,
            ``margins``, ``margin_reasons``, ``alpha``, ``target_share``, ``target_loss``; see docs/study.md.
        jobs: runs on the virtual clock that go on side by side, each in a process of its own. 1: all runs are made in
            this process. Runs that measure seconds are always made one at a time.
        resume: whether the study in `folder` goes on. Finished runs stay; runs that FAILED are made again. All other
            arguments must be those of the study.

    Returns:
        The judged study, as `asyncsgd.load` reads it. ``verdict`` is the sentence, ``tests``, ``runs`` and ``curves``
        are DataFrames, and ``report()`` writes the page.

    Raises:
        UsageError: for what cannot be planned or written down; the message says what to type.
        RunError: where a run has no result, and the next stage rests on it.
        KeyboardInterrupt: after Ctrl-C, when the current run has saved what it has. `resume` goes on from there.
    """
    refuse_ranks()
    config = config_of(
        task,
        arms,
        seeds,
        runtime=runtime,
        shared={"samples": samples, "seconds": seconds, "evaluations": evaluations, **(base or {})},
        tune=tune,
        tuning_seeds=tuning_seeds,
        pilots=pilots,
        question=question,
    )
    text = yaml.safe_dump(config, sort_keys=False, width=math.inf)
    plan = make_plan(read_yaml(text, "the study"), "the study")
    if not plan.family:
        raise UsageError(
            f"no arm can be compared with {config['analysis']['reference']}: give all arms as many workers and one "
            f"clock, e.g. runtime=asyncsgd.Virtual(4)"
        )
    out = Path(folder)
    _check_folder(out, config, resume)
    runtimes = [runtime_of_arm(arm, runtime) for arm in arms.values()]
    processes = [each for each in runtimes if not each.in_one_process]
    _check_processes(task, jobs, processes)
    study_folder = StudyFolder(plan, text, out, command_prefix="asyncsgd")
    print(f"study  {len(plan.runs)} runs of {len(plan.arms)} arms   folder {out}", flush=True)
    with threads_as_before(), StopRequest() as stop:
        context = fork_server_for(plan) if processes or jobs > 1 else None
        study_folder.read_state()  # refuses the folder of another study before `check` asks for models and data
        check(plan, {arm.name for arm in plan.arms})
        try:
            with locked(out / ".lock-1-of-1"):  # as a command that makes all shards
                study_folder.begin()
                failed = carry_out(
                    study_folder,
                    context,
                    stop,
                    jobs=None if jobs == 1 else jobs,
                    retry=resume,
                    shard=(1, 1),
                    again="give resume=True",
                )
        except KeyboardInterrupt:
            print(f"interrupted; the same call with resume=True goes on in {out}", file=sys.stderr)
            raise
    if failed:
        runs = "1 run" if len(failed) == 1 else f"{len(failed)} runs"
        print(
            f"{runs} FAILED; look into {out / 'logs'}, then give resume=True, which makes them again", file=sys.stderr
        )
    return load(out)


def _check_folder(folder: Path, config: Mapping[str, Any], resume: bool) -> None:
    """Refuse a folder that holds a study, unless it is this one and goes on."""
    kept = folder / "config.yaml"
    if not kept.is_file():
        return
    there = read_config(kept)
    different = sorted(key for key in {**there, **config} if there.get(key) != config.get(key))
    if different:
        raise UsageError(
            f"{folder} holds a study with other {', '.join(different)}, see {kept}; give the arguments of that study, "
            f"or name another folder"
        )
    if not resume:
        raise UsageError(f"{folder} holds this study already; give resume=True to go on with it, or another folder")


def _check_processes(task: Task, jobs: int, processes: list[Runtime]) -> None:
    """Refuse runs in other processes that could not import the task.

    Args:
        processes: the runtimes of arms that need processes of their own.
    """
    if type(jobs) is not int or jobs < 1:
        raise UsageError(f"jobs must be a whole number from 1 on, got {jobs!r}")
    name = type(task).__name__
    if jobs > 1 and type(task).__module__ == "__main__":
        raise UsageError(
            f"jobs={jobs} makes runs in other processes, which cannot import {name} from a script or a notebook; put "
            f"the class into a module, e.g. my_task.py, and type from my_task import {name}; or leave jobs out"
        )
    if processes:
        check_can_be_sent(task, f"the task {name}")
    if processes or jobs > 1:
        check_guard()
