"""Makes runs: those that measure time one at a time in this process, the others side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsgd.backends.launch import Launch, end_with_parent
from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import UsageError
from asyncsgd.records.best_effort import best_effort
from asyncsgd.records.events import FAILED, FINISHED, INTERRUPTED, UNREADABLE
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.records.trackers import Identity, names_in
from asyncsgd.records.tracking import Tracking
from asyncsgd.run.choose_folder import CHECKPOINTS, open_run_folder, read_summary, set_aside
from asyncsgd.settings.task import task_flags
from asyncsgd.settings.yaml_reader import read_of_run
from asyncsgd.studies.arms import Loop, flags_of
from asyncsgd.studies.config import GivenSettings, words_of_score
from asyncsgd.studies.progress import Progress, RunKind
from asyncsgd.tasks import class_named
from asyncsgd.tasks.labelled_task import HeadTask

if TYPE_CHECKING:  # it imports torch
    from asyncsgd.run.run import Run

PRELOAD = (
    "asyncsgd.run.lifecycle",
    "asyncsgd.run.run",
    "torch._dynamo",
)
"""Modules that the fork server imports for the runs, beside those of workers, of their tasks and of their modes."""
PRELOAD_OF_TRANSFORMERS = (
    "asyncsgd.data.corpora",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.tokenization_bert",
)
"""Modules that it also imports for the library's own tasks."""
NOT_STARTED = "NOT STARTED"
"""The status of a run whose folder is missing or empty."""
STOP_SECONDS = 30.0
"""Seconds that runs have, after they were asked to stop, to save what they have. Then they are killed."""


@dataclasses.dataclass(frozen=True)
class PlannedJob:
    """One run that is to be made."""

    folder: str
    """The folder of the run, below `out`."""
    task: str
    values: GivenSettings
    """The settings of the run, by name."""
    measures: bool = True
    """Whether its seconds are a result, so that nothing else may run beside it."""
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What trackers show of the run, beside its settings: its stage and its arm."""
    saves_model: bool = True
    """Whether the model is saved at the end, so that another run can start from it."""
    out: Path = Path()
    """The folder of all runs."""
    study: str = ""
    command_prefix: str = ""
    """How the library's command is typed, e.g. ``asyncsgd``; empty: a script of experiments/ is typed in its place."""
    loop: Loop = "library"
    """What trains the run."""

    @property
    def path(self) -> Path:
        return self.out / self.folder

    @property
    def log(self) -> Path:
        """The file with what the run prints."""
        return self.out / "logs" / (self.folder.replace("/", "-") + ".txt")

    @property
    def settings(self) -> Any:
        """All settings of the run, as an object of groups; see `asyncsgd.settings.task.task_flags`.

        Raises:
            UsageError: for settings that cannot be, with the run's folder.
        """
        try:
            return task_flags(class_named(self.task)).make(self.values)
        except UsageError as error:
            raise UsageError(f"{self.folder}: {error}") from error

    @property
    def why_not_runnable(self) -> str:
        """Why the run cannot be made here; empty if it can."""
        if self.values.get("pipeline_schedule") == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            return "DeepSpeed is not installed; type python -m pip install -c constraints.txt -e '.[deepspeed]'"
        return ""

    @property
    def kind(self) -> RunKind:
        """The kind of the run; runs of one kind take about as long as each other."""
        return RunKind(self.tags.get("stage", ""), self.tags.get("arm", ""), self.measures)

    @property
    def experiment(self) -> str:
        """The name of what makes the run, for its summary and for trackers. Of masked words it is that of the script
        which has always made such runs."""
        if self.loop == "naive":
            return "naive_loop"
        return "stilt_mlm" if self.task == "masked_lm" else class_named(self.task).name

    @property
    def command(self) -> list[str]:
        """The words of a command that makes the same run, or that goes on with the study where only a study can make
        it."""
        if self.loop == "naive":
            return ["asyncsgd", "study", str(self.out / "config.yaml"), "--out", str(self.out)]
        flags = flags_of(self.values, task_flags(class_named(self.task)).specs)
        if self.command_prefix:
            return [*self.command_prefix.split(), "train", self.task, *flags]
        script = ["experiments/train.py", self.task]
        if self.task == "masked_lm":
            script = ["experiments/stilt_mlm.py"]
        return ["python", *script, *flags]


def status_of(path: Path) -> str:
    """The status in a run's summary. Without a summary it is `NOT_STARTED`, or INTERRUPTED for a run that was
    killed. A finished run with a torn settings.yaml or environment.json is `UNREADABLE`, as it is for a report."""
    status = read_summary(path).get("status")
    if status in FINISHED:
        for name in ("settings.yaml", "environment.json"):
            try:
                if (path / name).exists():
                    read_of_run(path, name)
            except UsageError:
                return UNREADABLE
    if status:
        return str(status)
    return INTERRUPTED if _has_begun(path) else NOT_STARTED


def _has_begun(path: Path) -> bool:
    """Whether the folder of a run has anything in it."""
    return path.is_dir() and any(path.iterdir())


class Runner:
    """Makes runs, one at a time where time is measured, several at a time where it is not.

    Args:
        context: the fork server, which has imported `PRELOAD`; see `asyncsgd.backends.launch.fork_server`. None: no run
            needs another process.
        stop: whether the user has asked the script to stop.
        side_by_side: how many runs may go on at once, each in a process of its own. None: all runs are made in this
            process, one after the other.
        progress: shows how far the study is after every run.
    """

    def __init__(
        self,
        context: ForkServerContext | None,
        stop: StopRequest,
        side_by_side: int | None,
        progress: Progress,
    ) -> None:
        self._context = context
        self._stop = stop
        self._side_by_side = side_by_side
        self._progress = progress
        self.failed: list[PlannedJob] = []
        self._number = 0
        self._total = 0

    def run(self, jobs: Sequence[PlannedJob]) -> None:
        """Make all runs, once: first those that measure time, alone, then the others.

        Raises:
            KeyboardInterrupt: after the first Ctrl-C or SIGTERM, when what was running has saved what it had; after
                the second one at once.
        """
        self._total = len(jobs)
        alone = [job for job in jobs if job.measures]
        others = [job for job in jobs if not job.measures]
        if self._side_by_side is None:
            alone += others
            others = []
        with self._stop.during_a_run():
            for job in alone:
                began = time.monotonic()
                with output_to(job.log):
                    _make_run(job, self._context, self._stop)
                self._report(job, time.monotonic() - began)
                self._stop.check()
            if others:
                assert self._context is not None
                assert self._side_by_side is not None
                self._run_others(others, self._context, self._side_by_side)

    def _run_others(self, waiting: list[PlannedJob], context: ForkServerContext, side_by_side: int) -> None:
        running: dict[int, tuple[BaseProcess, PlannedJob, float]] = {}
        try:
            while (waiting or running) and not self._stop():
                while waiting and len(running) < side_by_side:
                    job = waiting.pop(0)
                    process: BaseProcess = context.Process(target=_make_run_in_child, args=(job,))
                    process.start()
                    running[process.sentinel] = (process, job, time.monotonic())
                for sentinel in wait(list(running), 0.2):
                    assert isinstance(sentinel, int)
                    process, job, began = running.pop(sentinel)
                    process.join()
                    self._report(job, time.monotonic() - began)
            # Here runs are left only if the user has asked to stop.
            deadline = time.monotonic() + STOP_SECONDS
            for process, _, _ in running.values():
                process.terminate()
            for process, _, _ in running.values():
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process, _, _ in running.values():
                process.kill()
        self._stop.check()

    def _report(self, job: PlannedJob, seconds: float) -> None:
        """Print how a run has ended, keep it if it failed, and show how far the study is."""
        self._progress.clear()
        self._number += 1
        status = status_of(job.path)
        summary = read_summary(job.path)
        metrics = summary.get("metrics") or {}
        task = job.settings.task
        score = next(iter(task.scored_by())) if isinstance(task, HeadTask) else ""
        result = ""
        if isinstance(metrics.get(score), float):
            result = f"{words_of_score(score)} {metrics[score]:.4f}"
        elif isinstance(summary.get("final_eval_loss"), float):
            result = f"loss {summary['final_eval_loss']:#.5g}"
        if summary.get("score_error") is not None:
            result = "without score"
            print(f"  without score: {summary['score_error']}; see {job.log}", file=sys.stderr, flush=True)
        width = len(str(self._total))
        number = f"[{self._number:{width}}/{self._total}]"
        print(f"{number} {job.folder:44} {status:11} {result:16} {seconds:6.1f} s", flush=True)
        if status not in FINISHED and not self._stop():
            self.failed.append(job)
            ending = "it left nothing" if status == NOT_STARTED else status
            reason = f"{summary['message']}; " if summary.get("message") else ""
            print(f"  {ending}: {reason}see {job.log}", file=sys.stderr, flush=True)
        self._progress.ended(job.kind, seconds, has_result=status in FINISHED)


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send what this process prints, and its worker processes' messages, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = (os.dup(1), os.dup(2))
    with open(path, "w", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            # A notebook's streams are no file descriptors.
            # `best_effort`: a message that cannot be written, e.g. on a full disk, ends no run.
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file), best_effort():
                yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(io.UnsupportedOperation, ValueError):
                    stream.flush()
            for fd, number in zip(saved, (1, 2), strict=True):
                os.dup2(fd, number)
                os.close(fd)


def _make_run_in_child(job: PlannedJob) -> None:
    """Entry point of a run in a process of its own."""
    end_with_parent()  # so no run of a killed study writes into folders that the next study uses
    # The run leaves the terminal's process group. The study passes Ctrl-C on as SIGTERM, and two signals would mean to
    # leave at once.
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # the fork server blocks it
    with output_to(job.log):
        code = _make_run(job, None, None)
    os._exit(code)


def _make_run(job: PlannedJob, context: ForkServerContext | None, stop: StopRequest | None) -> int:
    """Make one run in this process; return its exit code. What goes wrong is in its log and its folder."""
    from asyncsgd.run.execute import execute
    from asyncsgd.run.lifecycle import lead
    from asyncsgd.run.run import run_of

    train = execute
    if job.loop == "naive":  # `loop` is one of two words, so no config and no folder can name code that is run
        from asyncsgd.studies.naive import train_naively as train
    identity = Identity(job.out.absolute(), job.folder, {"study": job.study, **job.tags})
    try:
        settings = job.settings
        run = dataclasses.replace(run_of(job.experiment, settings), saves_model=job.saves_model)
        folder = _folder_of(job, run)
        tracking = Tracking(names_in(job.values.get("track")), identity)
        launch = Launch(settings.job.nproc, rank=None)  # torchrun has started no ranks
        code = lead(run, launch, folder, context, stop, tracking, train)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    if status_of(job.path) in FINISHED:  # nobody goes on from there
        shutil.rmtree(job.path / CHECKPOINTS, ignore_errors=True)
    return code


def _folder_of(job: PlannedJob, run: Run) -> RunFolder:
    """Open the folder of a run. An earlier part of the run goes on from its last checkpoint where that gives the same
    bits. Otherwise it is set aside, because it may be torn anywhere.
    """
    command = shlex.join(job.command)
    # A run that measures time does not go on: its seconds were interrupted. Nor does one that has failed, since it may
    # fail again from there.
    if not job.measures and (job.path / CHECKPOINTS).is_dir() and status_of(job.path) != FAILED:
        try:
            return open_run_folder(run, command)
        except UsageError as error:
            print(f"{error}. The run is made again from its start", file=sys.stderr, flush=True)
    if _has_begun(job.path):
        set_aside(job.path)
    return open_run_folder(run, command)
