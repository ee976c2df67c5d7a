"""Processes of this library's own: started from a fork server that has imported torch, watched, and never left behind.

Imports nothing heavy, so that the fork server can be started, and import, while this process still does its own
imports."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import parent_process
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from asyncsgd import errors
from asyncsgd.errors import UsageError
from asyncsgd.records.console import best_effort
from asyncsgd.signals import held

LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What torchrun sets for its own ranks. Processes that this library starts must not see it, or they would act as such
ranks.
"""


def fork_server(model: str | None, *modules: str) -> ForkServerContext:
    """Start a fork server that imports what workers of `model` need in the background, and return its context.

    Args:
        model: as `asyncsgd.models.build_model` takes it; None: workers need no transformers.
        modules: further modules to import there; none may run a tensor operation.

    It never runs a tensor operation, so it has one thread and its children may use OpenMP. To be called early and
    once. It imports the model's own module: a plain import of transformers gains nothing, since that loads models
    at first use."""
    kind = None if model is None else _kind_of_model(model)
    return fork_server_of(
        "asyncsgd.runtime.rank_process",
        "asyncsgd.runtime.worker_loop",
        *([] if kind is None else [f"transformers.models.{kind}.modeling_{kind}"]),
        *modules,
    )


def fork_server_of(*modules: str) -> ForkServerContext:
    """Start a fork server that imports `modules` and nothing else; see `fork_server`."""
    from multiprocessing import forkserver, resource_tracker

    if len(tempfile.gettempdir()) > 70:  # a Unix socket's path has at most 107 characters
        raise UsageError(f"TMPDIR={tempfile.gettempdir()} is too long for the paths of sockets; export TMPDIR=/tmp")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    # Inherited by all that it starts: Ctrl-C, and the SIGTERM that a batch system sends to every process of a job, are
    # for the leader, which stops the others in good order.
    with clean_environment():
        resource_tracker.ensure_running()  # lets all signals through when it starts, so it comes first
        with held():
            forkserver.ensure_running()
    return context


def _kind_of_model(model: str) -> str:
    """The transformers family of a local folder; bert where it cannot be known yet, which costs a worker an import
    at most.
    """
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        return str(config["model_type"]).replace("-", "_")
    except (OSError, ValueError, KeyError, TypeError):
        return "bert"


@contextlib.contextmanager
def clean_environment() -> Iterator[None]:
    """Within it, processes are started without a launcher's variables, on one OpenMP thread, without parallel
    tokenizers.
    """
    # Each process then sets the number of OpenMP threads that it was told.
    here = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = {name: os.environ.pop(name, None) for name in (*LAUNCHER_VARIABLES, *here)}
    os.environ.update(here)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def end_with_parent() -> None:
    """End this process as soon as the process that started it has ended, also if this one computes, or waits for a peer
    that will never answer.
    """

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """Entry point of every process of a group."""
    end_with_parent()
    with best_effort():
        target(*arguments)


OUT_OF_MEMORY, NO_BATCH_LEFT = 4, 6
"""Exit codes of processes for which the leader has a sentence."""
REASONS = {
    OUT_OF_MEMORY: errors.OUT_OF_MEMORY,
    NO_BATCH_LEFT: "the data end with the budget, and it was given a batch behind it",
}

_FORK_SERVER_GONE = 255
"""The exit code that is seen when the fork server has ended, since only the fork server knows the true one."""


class Processes:
    """A group of worker processes, numbered from 0; a context manager that ends them all on the way out.

    Args:
        context: of `fork_server`.
    """

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context
        self.stop_seconds = 10.0
        """How long processes may take to end by themselves."""
        self._processes: dict[int, BaseProcess] = {}

    def start(self, number: int, target: Callable[..., None], *arguments: object) -> None:
        """Start process `number`: ``target(*arguments)``, both pickled."""
        process = self._context.Process(target=_run, args=(target, arguments), name=f"worker{number}", daemon=True)
        process.start()
        self._processes[number] = process

    def pid(self, number: int) -> int | None:
        """The operating system's number of process `number`."""
        return self._processes[number].pid

    @property
    def sentinels(self) -> dict[int, int]:
        """number -> what becomes ready when the process ends, for `multiprocessing.connection.wait`."""
        return {number: process.sentinel for number, process in self._processes.items()}

    def exit_code(self, number: int) -> int | None:
        """The exit code of process `number`, negative for a signal; None while it lives."""
        return self._processes[number].exitcode

    def how_it_ended(self, number: int, seconds: float) -> str | None:
        """How process `number` ended, in words; None while it lives (looked at for `seconds`) or if it is not ours."""
        process = self._processes.get(number)
        if process is None:
            return None
        process.join(seconds)
        code = process.exitcode
        if code is None:
            return None
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return REASONS.get(code) or f"its process ended with exit code {code}"

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait for all to end, then make them."""
        deadline = time.monotonic() + (self.stop_seconds if exception[0] is None else 1.0)
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            if process.exitcode is None:
                process.kill()
            elif process.exitcode == _FORK_SERVER_GONE and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.join(5.0)  # not for ever: the fork server tells, and it may itself be stopped
