"""Makes a sweep's runs: those that measure time one at a time, the others side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from asyncsgd.errors import RunError, UsageError
from asyncsgd.records.events import DONE, FAILED, FINISHED
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.records.trackers import Identity, Tracking, names_in
from asyncsgd.runtime.launch import end_with_parent
from asyncsgd.scripts.run_folder import CHECKPOINTS, open_run_folder, set_aside
from asyncsgd.signals import NUMBERS
from asyncsgd.study.arms import FLAGS
from asyncsgd.study.finetuning import SCORES, finetuning_in
from asyncsgd.study.plan import STAGES, PlannedRun, Stage
from asyncsgd.study.sweep import NOT_STARTED, Job, Sweep, share

PRELOAD = (
    "asyncsgd.training",
    "asyncsgd.settings.run",
    "asyncsgd.data.labelled",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.tokenization_bert",
)
"""What runs in processes of their own import beside what workers do."""


STOP_SECONDS = 30.0


class Stopped(Exception):
    """The user has asked the sweep to stop."""


class Runner:
    """Makes runs, one at a time where time is measured, several at a time where it is not.

    Args:
        context: of `asyncsgd.runtime.launch.fork_server`, with `PRELOAD`.
        jobs: how many runs may go on side by side.
    """

    def __init__(self, sweep: Sweep, context: ForkServerContext, jobs: int) -> None:
        self._sweep, self._context, self._jobs = sweep, context, jobs
        self._running: dict[int, tuple[BaseProcess, Job, float]] = {}
        self._stop = False
        self.failed: list[Job] = []
        self._number = self._of = 0

    def run(self, jobs: Sequence[Job]) -> None:
        """Make all runs: first those that measure time, alone, then the others.

        Raises:
            Stopped: after the first Ctrl-C or SIGTERM, when what was running has saved what it had.
        """
        self._number, self._of = 0, len(jobs)
        with self._signals():
            if any(job.measures for job in jobs):
                import asyncsgd.training  # noqa: F401 - takes seconds, in which a Ctrl-C is not yet heard by the run
            for job in jobs:
                if job.measures:
                    self._run_here(job)
            others = [job for job in jobs if not job.measures]
            try:
                while others or self._running:
                    while others and len(self._running) < self._jobs and not self._stop:
                        self._start(others.pop(0))
                    if self._stop:
                        break
                    self._collect()
            finally:
                self._end_all()
        if self._stop:
            raise Stopped

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, frame: Any) -> None:
            if self._stop and number == signal.SIGHUP:
                return  # a shell passes on what the terminal has sent already
            if self._stop:
                for process, _, _ in self._running.values():
                    process.kill()
                raise KeyboardInterrupt
            self._stop = True
            with contextlib.suppress(OSError):  # the terminal may be closed
                print("stopping; runs save what they have (a second Ctrl-C leaves at once)", file=terminal, flush=True)

        before = {number: signal.signal(number, ask) for number in NUMBERS}
        # stderr itself goes to a log while a run is made here
        with os.fdopen(os.dup(2), "w", encoding="utf-8") as terminal:
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _run_here(self, job: Job) -> None:
        if self._stop:
            raise Stopped
        began = time.monotonic()
        with output_to(self._log_of(job)):
            code = _make_run(job, self._sweep.plan.name, self._context)
        self._tell(job, time.monotonic() - began)
        if code == 130:
            self._stop = True
            raise Stopped

    def _start(self, job: Job) -> None:
        process = self._context.Process(target=_make_run_in_child, args=(job, self._sweep.plan.name, self._log_of(job)))
        process.start()
        self._running[process.sentinel] = (process, job, time.monotonic())

    def _collect(self) -> None:
        for sentinel in wait(list(self._running), 0.2):
            assert isinstance(sentinel, int)
            process, job, began = self._running.pop(sentinel)
            process.join()
            self._tell(job, time.monotonic() - began)

    def _end_all(self) -> None:
        for process, _, _ in self._running.values():
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process, _, _ in self._running.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
        self._running.clear()

    def _log_of(self, job: Job) -> Path:
        return self._sweep.out / "logs" / (job.run.folder.replace("/", "-") + ".txt")

    def _tell(self, job: Job, seconds: float) -> None:
        self._number += 1
        status = self._sweep.status(job.run)
        summary = Sweep._read(self._sweep.out / job.run.folder / "summary.json") or {}
        result = ""
        metrics = summary.get("metrics") or {}
        score = next((name for name in SCORES if isinstance(metrics.get(name), float)), None)
        if score is not None:
            result = f"{SCORES[score]} {metrics[score]:.4f}"
        elif isinstance(summary.get("final_eval_loss"), float):
            result = f"loss {summary['final_eval_loss']:.4f}"
        width = len(str(self._of))
        print(
            f"[{self._number:{width}}/{self._of}] {job.run.folder:44} {status:11} {result:16} {seconds:6.1f} s",
            flush=True,
        )
        if status not in FINISHED:
            if status == NOT_STARTED:
                status = "it left nothing"
            if not self._stop:
                self.failed.append(job)
                message = summary.get("message")
                reason = f"{message}; " if message else ""
                print(f"  {status}: {reason}see {self._log_of(job)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send what this process prints, and its worker processes' messages, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(path, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(io.UnsupportedOperation, ValueError):
                    stream.flush()
            for fd, number in zip(saved, (1, 2), strict=True):
                os.dup2(fd, number)
                os.close(fd)


def _make_run_in_child(job: Job, study: str, log: Path) -> None:
    """Entry point of a run in a process of its own."""
    end_with_parent()  # so no run of a killed sweep writes into folders that the next sweep uses
    # The run leaves the terminal's process group. The sweep passes Ctrl-C on as SIGTERM, and two signals would mean to
    # leave at once.
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # which the fork server never hears
    with output_to(log):
        code = _make_run(job, study, None)
    os._exit(code)


def _make_run(job: Job, study: str, context: ForkServerContext | None) -> int:
    """Make one run in this process; return its exit code. What goes wrong is in its log and its folder."""
    path = Path(str(job.values["run_dir"]))
    command = " ".join(map(shlex.quote, job.command))
    shared, tags = path.parents[job.run.folder.count("/")], {"stage": job.run.stage, "arm": job.run.arm}
    identity = Identity(path.absolute(), job.run.folder, shared.absolute(), study, tags)
    tracking = Tracking(names_in(job.values["track"]), identity)
    try:
        from asyncsgd.runtime.launch import Launch
        from asyncsgd.settings.run import run_of
        from asyncsgd.training import lead

        if job.run.stage == "finetune":
            kind = finetuning_in(job.values)
            name, settings = kind.task, kind.settings(job.values)
        else:
            name, settings = "stilt_mlm", FLAGS.make(job.values)
        run = run_of(name, settings)
        if job.run.stage == "finetune":  # its score is looked at, and its model never
            run = dataclasses.replace(run, saves_model=False)
        folder = _folder_of(job, lambda: open_run_folder(name, settings, command))
        code = lead(run, Launch(settings.job.nproc, None, False), folder, context, None, tracking)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    _remove_needless_checkpoints(folder.path)
    return code


def _remove_needless_checkpoints(path: Path) -> None:
    """Nobody goes on from those of a run that is finished."""
    if _status_in(path) in FINISHED:
        shutil.rmtree(path / CHECKPOINTS, ignore_errors=True)


def _folder_of(job: Job, open_it: Callable[[], RunFolder]) -> RunFolder:
    """Open the folder of a run. An earlier part of the run goes on from its last checkpoint where that gives the same
    bits. Otherwise it is set aside, because it may be torn anywhere.

    Args:
        open_it: opens the folder, at its last checkpoint if it has any.
    """
    path = Path(str(job.values["run_dir"]))
    # Where time is measured the clock was cut, and a run that failed may fail from there again.
    if not job.measures and (path / CHECKPOINTS).is_dir() and _status_in(path) != FAILED:
        try:
            return open_it()
        except UsageError as error:
            print(f"{error}. The run is made again from its start", file=sys.stderr, flush=True)
    if path.is_dir() and any(path.iterdir()):
        set_aside(path)
    return open_it()


def _status_in(path: Path) -> str | None:
    return (Sweep._read(path / "summary.json") or {}).get("status")


def carry_out(sweep: Sweep, context: ForkServerContext, *, jobs: int, retry: bool, shard: tuple[int, int]) -> list[Job]:
    """Run everything that is left, stage by stage; return the runs that failed.

    Raises:
        RunError: if a stage cannot begin because the one before it is not complete; the message says what to type.
        UsageError: if what is there does not fit the plan.
        Stopped: if the user has asked for it.
    """
    failed: list[Job] = []
    for stage in STAGES:
        if stage != "base" and any(sweep.status(run) != DONE for run in sweep.plan.of_stage("base")):
            raise RunError(
                f"the base model could not be made; look at {sweep.out / 'logs' / 'base.txt'}, then type the same "
                f"command with --retry, or mend the config and type another --out"
            )
        if stage == "pilot":
            _complete("tuning", sweep.choose(), may_be_others=shard[1] > 1 and not failed)
        if stage == "test":
            pilots = [run for run in sweep.plan.of_stage("pilot") if sweep.status(run) not in FINISHED]
            _complete("pilot", pilots, may_be_others=shard[1] > 1 and not failed)
            sweep.register()
            for name in sweep.all_diverged():
                print(f"every trial of {name} diverged; its first one is tested all the same", file=sys.stderr)
        in_shard = share(sweep.plan, stage, shard if stage != "base" else (1, 1))
        todo = [job for job in sweep.to_do(stage, retry=retry) if job.run.folder in in_shard]
        if stage == "base" and todo and shard[0] > 1:
            raise RunError(f"the base model is made by --shard 1/{shard[1]}; run it first, then this command again")
        if todo:
            runner = Runner(sweep, context, jobs)
            try:
                runner.run(todo)
            finally:
                failed += runner.failed
    return failed


def _complete(stage: Stage, missing: Sequence[PlannedRun], *, may_be_others: bool) -> None:
    """The stages after this one depend on all of its runs.

    Raises:
        RunError: if any is missing.
    """
    if not missing:
        return
    what = "run is" if len(missing) == 1 else "runs are"
    raise RunError(
        f"{len(missing)} {stage} {what} not finished, the first is {missing[0].folder}; "
        + (
            "run the other shards, then this command again"
            if may_be_others
            else "look at its log in logs/, then type the same command with --retry"
        )
    )
