"""Train: prepare a run, train it and finish it. Reads top to bottom.

`carry_out` does all three, in the process that keeps the record and speaks to the user. Its parts are
`asyncsgd.run.prepare`, `asyncsgd.run.execute` and `asyncsgd.run.finish`. `lead` calls it for scripts,
`asyncsgd.run.from_python.start` for Python.

How a run ends, with the times that each part may take. `asyncsgd.core.signals` (S) has most of them:

1. After a first signal, such as Ctrl-C, the loop ends its step and takes a checkpoint. The workers of a server then get
   `Stop`, and have 1 s to end. Ranks have 10 s, or 1 s while they still start, and so have workers in a run that ends
   by itself (`ChildProcesses.stop_seconds`). Before that the server waits up to 30 s for Hogwild's workers to end by
   themselves (`STOP_SECONDS` of `asyncsgd.backends.processes`).
2. 5 s after the first signal (`_NOTE_SECONDS` of S) the folder says that the run is interrupted, in case it is killed.
3. 30 s after the first signal (25 s under torchrun), or later where steps are long (`seconds_to_end` of S), the run
   sends itself a second signal, if the user has sent none before. All other processes are killed, and
   KeyboardInterrupt ends the work of the main thread.
4. 5 s after the second signal (`_LEAVE_SECONDS` of S) another thread writes the summary and ends the process, if the
   main thread still stands in C. It has 20 s for that (`_EXIT_GRACE_SECONDS`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from asyncsgd.backends.host import SignsOfLife, ThisHost
from asyncsgd.backends.hosts import Hosts
from asyncsgd.backends.launch import Launch, World, end_with_launcher, wait_for_new_start
from asyncsgd.backends.token import TRUSTED, token_of
from asyncsgd.core.limits import Result
from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import OUT_OF_MEMORY, RunError, UsageError, is_out_of_memory, reason
from asyncsgd.records.best_effort import say
from asyncsgd.records.events import DONE, FAILED, INTERRUPTED, Record
from asyncsgd.records.locks import one_writer
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.records.tracking import Tracking
from asyncsgd.run.callbacks import Callback
from asyncsgd.run.choose_folder import has_checkpoint
from asyncsgd.run.execute import Live, execute
from asyncsgd.run.finish import (
    INTERRUPTED_AT_ONCE,
    finish,
    note_interrupted,
    write_last,
)
from asyncsgd.run.prepare import Asked, prepare, silent
from asyncsgd.run.run import Run
from asyncsgd.settings.specs import flag_of

EXIT_CODES = {DONE: 0, INTERRUPTED: 130}
"""Every other status exits with 1, and so does a run that is DONE without its score."""
_EXIT_GRACE_SECONDS = 20.0
"""How long a process that must end may still write a checkpoint and the summary, while its main thread stands still."""
Train = Callable[[Live, World | None], Result]
"""What trains a run that is prepared, as `asyncsgd.run.execute.execute` does."""
BEFORE_TRAINING = Result(INTERRUPTED, "interrupted by the user before training")


def lead(
    run: Run,
    launch: Launch,
    folder: RunFolder,
    context: ForkServerContext | None,
    stop: StopRequest | None = None,
    tracking: Tracking | None = None,
    train: Train = execute,
) -> int:
    """`carry_out` for a script: print what goes wrong to stderr, and return the exit code.

    Raises:
        UsageError: as `carry_out` does; the script exits with 2.
    """
    ended = carry_out(run, launch, folder, context, stop, tracking=tracking, train=train)
    if ended.unexpected is not None:
        traceback.print_exception(ended.unexpected)
    if ended.result.message and ended.result.status != DONE:
        print(f"{ended.result.status}: {ended.result.message}", file=sys.stderr, flush=True)
    code = EXIT_CODES.get(ended.result.status, 1)
    if code == 0 and ended.summary["score_error"] is not None:
        print(f"without score: {ended.summary['score_error']}", file=sys.stderr, flush=True)
        return 1
    return code


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended."""

    result: Result
    summary: Mapping[str, Any]
    live: Live | None
    """The run; None if it ended before it had a model."""
    unexpected: Exception | None
    """An exception that is neither a `UsageError` nor a `RunError`."""


def carry_out(
    run: Run,
    launch: Launch,
    folder: RunFolder | None,
    context: ForkServerContext | None,
    stop: StopRequest | None = None,
    *,
    quiet: bool = False,
    receivers: Sequence[Callable[[Record], None]] = (),
    callbacks: Sequence[Callback] = (),
    tracking: Tracking | None = None,
    train: Train = execute,
) -> Ended:
    """Prepare, train, evaluate, save. The run folder says how it ended; that of a refused resume stays as it was.

    Args:
        run: not prepared; as many workers as `launch` says.
        launch: how this process was started: by itself, or as a rank of torchrun.
        folder: new, or opened again by a run that goes on; owned by this call. None: nothing is written.
        context: a fork server that starts workers, None where there are none.
        stop: the listener for signals, if there is one already.
        quiet: whether the user is told nothing.
        receivers: called with each record, in order.
        callbacks: called at each evaluation, in order.
        tracking: not started; None: the run is shown in no tracker.
        train: the training itself, between its preparation and its end.

    Raises:
        UsageError: if the user has to change something. A new run's folder then holds a FAILED summary; that of a run
            that was to be resumed is as it was, unless its state turns out to be unreadable when training begins.
    """
    asked = Asked(run, launch, folder, context, quiet, receivers, callbacks, tracking or Tracking())
    with contextlib.ExitStack() as closing:
        if folder is not None:
            closing.callback(folder.close)
        attempt = _Attempt(asked, train, closing.enter_context(stop or StopRequest()), closing)
        result, unexpected = attempt.prepare_and_train()
        live = attempt.live
        try:
            if live is not None:
                result, summary = finish(live, _with_memory_advice(live, result))
            else:
                summary = run.summary() | {"status": result.status, "message": result.message}
                summary |= asked.tracking.finish(result.status)
                write_last(folder, summary)
        except OSError as error:
            where = None if folder is None else folder.path
            result = Result(FAILED, f"{where} cannot be written ({reason(error)})")
            summary = run.summary() | {"status": result.status, "message": result.message}
        if live is not None and live.hosts is not None:
            # When `hosts` is closed, it tells the other hosts whether the run can go on later.
            live.hosts.is_unfinished = result.status == INTERRUPTED
    if result.status == FAILED:
        # With --nnodes MIN:MAX torchrun may be about to end this rank and start it again, as a host comes or goes. If
        # it ended by itself first, torchrun would count that as a failure of its own.
        wait_for_new_start(launch)
    return Ended(result, summary, live, unexpected)


class _Attempt:
    """Prepares a run and trains it, once.

    Args:
        asked: the run.
        train: the training itself.
        stop_request: listens.
        closing: what is entered here is left when the run has ended.
    """

    def __init__(self, asked: Asked, train: Train, stop_request: StopRequest, closing: contextlib.ExitStack) -> None:
        self._asked = asked
        self._train = train
        self._stop_request = stop_request
        self._closing = closing
        self.live: Live | None = None
        """The run, as soon as it is prepared."""

    def prepare_and_train(self) -> tuple[Result, Exception | None]:
        """Prepare the run and train it, and make a result of what is raised.

        A UsageError writes its own summary here and is raised. The summary of every other end is for the caller.

        Returns:
            How the run ended, and an exception that is neither a UsageError nor a RunError.
        """
        folder = self._asked.folder
        try:
            return self._prepare_and_train(), None
        except UsageError as error:
            of_trackers = self._asked.tracking.finish(FAILED)  # what each tracker has come to, for the summary
            summary = self._asked.run.summary() | {"status": FAILED, "message": str(error)} | of_trackers
            if self.live is not None:
                self.live.machine.finish()
            write_last(folder, summary)
            raise
        except KeyboardInterrupt:
            return BEFORE_TRAINING if self.live is None else INTERRUPTED_AT_ONCE, None
        except RunError as error:
            return Result(FAILED, str(error), has_parameters=False), None
        except OSError as error:
            where = error.filename or (self._asked.run.task.name if folder is None else folder.path)
            return Result(FAILED, f"{where}: {reason(error)}", has_parameters=False), None
        except Exception as error:
            if is_out_of_memory(error):
                return Result(FAILED, OUT_OF_MEMORY, has_parameters=False), None
            return Result(FAILED, f"{type(error).__name__}: {error}", has_parameters=False), error
        finally:
            if self.live is not None:
                if self.live.saver is not None:
                    self.live.saver.finish()
                self.live.record.close()

    def _prepare_and_train(self) -> Result:
        """Keep other runs out of the task's folders, meet ranks and hosts, prepare the run, and train it."""
        task = self._asked.run.task
        has_server = self._asked.run.runtime.has_server
        launch = self._asked.launch
        stop_request = self._stop_request
        for name in task.output_folders:  # names of the task's fields
            output = getattr(task, name)
            if output is not None:
                self._closing.enter_context(one_writer(Path(output), flag_of(name)))
        stop_request.check()
        end_with_launcher(leads=True)  # from here on this process ends when its launcher does
        # Synchronous ranks that torchrun has started meet in the store that torchrun has opened.
        torchrun_world = None if launch.starts_workers(has_server=has_server) else World.of_torchrun()
        hosts = None
        if launch.several_hosts:
            hosts = self._closing.enter_context(self._other_hosts(has_server))
        live = prepare(self._asked, torchrun_world, hosts, stop_request)
        stop_request.check()
        self._closing.enter_context(stop_request.during_a_run())  # the first signal asks the loop to stop
        self.live = live
        live.machine.start()
        with stop_request.watched(
            when_slow_to_stop=lambda: note_interrupted(live),
            when_forced=live.machine.kill_others,
            when_stuck=lambda: _leave(live),
        ):
            result = self._train(live, torchrun_world)
        if live.saver is not None:
            live.saver.finish()  # within the listener, so that a second signal can end this wait too
        return result

    def _other_hosts(self, has_server: bool) -> Hosts:
        """Meet the other hosts."""
        output = self._asked.run.output
        this_host = ThisHost.of_torchrun(self._asked.launch)
        if not self._asked.launch.is_elastic:
            _check_mirror(output.mirror, this_host)
        # torch.distributed, which synchronous ranks use, knows no token: their network is trusted.
        token = token_of(output) if has_server else TRUSTED
        signs = SignsOfLife.of(output.worker_deadline, has_server)
        tell = silent if self._asked.quiet else say
        return Hosts(this_host, token, output.interface, signs, self._stop_request.check, tell)


def _check_mirror(mirror: int | None, this_host: ThisHost) -> None:
    """Refuse a mirror, the number of the host that keeps a copy of each checkpoint, if there is no such host.

    Raises:
        UsageError: with the numbers that there are.
    """
    if mirror is not None and mirror >= this_host.num_hosts:
        raise UsageError(f"--mirror {mirror}: the other hosts are 1 to {this_host.num_hosts - 1}; type one of them")


def _leave(live: Live) -> None:
    """Wait for the checkpoint that is being written, write the summary and end this process. The thread of
    `StopRequest.watched` calls it, since the main one stands still in C. If even this takes too long, a timer ends the
    process."""
    last = threading.Timer(_EXIT_GRACE_SECONDS, os._exit, (EXIT_CODES[INTERRUPTED],))
    last.daemon = True
    last.start()
    try:
        if live.saver is not None:
            live.saver.finish()
        finish(live, INTERRUPTED_AT_ONCE)
        print(f"{INTERRUPTED}: {INTERRUPTED_AT_ONCE.message}", file=sys.stderr, flush=True)
    finally:
        os._exit(EXIT_CODES[INTERRUPTED])


def _with_memory_advice(live: Live, result: Result) -> Result:
    """If a run ended without memory and has a checkpoint, add to its message how to resume with smaller
    micro-batches."""
    folder = live.record.folder
    if live.facts["normalises_over_batch"]:
        return result  # such a model goes on with the same number of micro-batches only
    if OUT_OF_MEMORY not in result.message or folder is None or not has_checkpoint(folder.path):
        return result
    before = live.run.micro_batches
    parts = _more_parts(before, live.run.task.batch_size, evenly=live.run.runtime.cuts_model)
    if parts == before:
        return result
    how = f"to go on from the last checkpoint, type --resume {folder.path} --micro-batches {parts}"
    return dataclasses.replace(result, message=f"{result.message}; {how}")


def _more_parts(parts: int, batch_size: int, *, evenly: bool) -> int:
    """A larger number of parts of a batch; the same if the batch has no more.

    Args:
        evenly: whether parts have one size, as in a pipeline.

    >>> _more_parts(2, 5, evenly=False), _more_parts(4, 5, evenly=False), _more_parts(5, 5, evenly=False)
    (4, 5, 5)
    >>> _more_parts(8, 24, evenly=True), _more_parts(24, 24, evenly=True)
    (12, 24)
    """
    if evenly:
        return next((more for more in range(parts + 1, batch_size + 1) if batch_size % more == 0), parts)
    return min(2 * parts, batch_size)
