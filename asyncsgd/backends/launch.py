"""How the processes of a run come about and find each other: a process is (rank, number of ranks, store).

Torchrun has made all ranks where WORLD_SIZE is more than 1. Otherwise this process is rank 0 and starts the others from
a fork server. Imports nothing heavy, so that the fork server can be started, and import, while this process still does
its own imports."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import ipaddress
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import parent_process
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from asyncsgd import errors
from asyncsgd.core.signals import held
from asyncsgd.errors import UsageError
from asyncsgd.records.best_effort import best_effort

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for its own ranks. Processes that this library starts must not see it, or they would act as such
ranks.
"""
_LOOK_SECONDS = 1.0
_STOP_SECONDS = 30.0
"""Between two looks for the launcher; that rank 0 has to stop the others when it is gone."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
TIMEOUT = datetime.timedelta(minutes=30)
"""Longest wait for another rank: a large corpus, a gradient or an evaluation shard may take as long. It is for ranks
that hang, and for hosts that vanish. The others notice at once that the process of a rank has ended.
"""
OUT_OF_MEMORY = 4
NO_BATCH_LEFT = 6
"""Exit codes of processes for which the leader has a sentence."""
REASONS = {
    OUT_OF_MEMORY: errors.OUT_OF_MEMORY,
    NO_BATCH_LEFT: "the data end with the budget, and it was given a batch behind it",
}
_FORK_SERVER_GONE = 255
"""The exit code that is seen when the fork server has ended, since only the fork server knows the true one."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the script was started.

    >>> Launch.read({}, 4, nproc_given=True)
    Launch(num_workers=4, rank=None, local_rank=0, ranks_here=0)
    >>> second = Launch.read({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, nproc_given=False)
    >>> second.several_hosts, second.leads, second.is_needed(has_server=True), second.is_needed(has_server=False)
    (False, False, False, True)
    """

    num_workers: int
    rank: int | None
    """This process's rank among torchrun's, or None where this script starts its workers itself."""
    local_rank: int = 0
    """Its number among the ranks of its host."""
    ranks_here: int = 0
    """Ranks of its host; 0 where torchrun has made none."""

    @classmethod
    def read(cls, environment: Mapping[str, str], nproc: int, *, nproc_given: bool) -> Launch:
        """Compare what a launcher set with ``--nproc``.

        A WORLD_SIZE of 1 is torchrun without ``--nproc-per-node``: the script then starts `nproc` workers itself.

        Raises:
            UsageError: if both name a number of workers and they differ, or the launcher's variables are incomplete.
        """
        try:
            world_size = int(environment.get("WORLD_SIZE", "1"))
            if world_size == 1:
                return cls(nproc, None)
            rank = int(environment["RANK"])
            ranks_here = int(environment.get("LOCAL_WORLD_SIZE", world_size))
            local_rank = int(environment.get("LOCAL_RANK", rank % ranks_here))
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']!r} and RANK is {environment.get('RANK')!r}; a launcher sets "
                f"both. If they are left over from another program, type unset WORLD_SIZE RANK, otherwise start with "
                f"torchrun"
            ) from error
        if nproc_given and nproc != world_size:
            raise UsageError(
                f"the launcher started {world_size} processes but --nproc is {nproc}; drop --nproc, or type "
                f"torchrun --nproc-per-node {nproc}"
            )
        return cls(world_size, rank, local_rank, ranks_here)

    @property
    def leads(self) -> bool:
        """Whether this process prepares the run, keeps the record and speaks to the user."""
        return self.rank in (None, 0)

    @property
    def several_hosts(self) -> bool:
        return self.rank is not None and self.ranks_here != self.num_workers

    @property
    def leads_host(self) -> bool:
        """Whether this process starts the workers of its host, which is not that of rank 0."""
        return self.several_hosts and not self.leads and self.local_rank == 0

    def is_needed(self, *, has_server: bool) -> bool:
        """Whether this process has a part in the run. Where there is a server, the first rank of each host starts the
        workers itself, since torchrun ends all ranks when one of them dies; so the other ranks end at once."""
        return self.leads or self.leads_host or not has_server

    def starts_workers(self, *, has_server: bool) -> bool:
        """Whether the leader starts the other processes of the run; else torchrun has made them."""
        return self.rank is None or has_server


def refuse_ranks() -> None:
    """Refuse ranks of torchrun's for a study, which would begin in each of them.

    Raises:
        UsageError: with what to type.
    """
    if Launch.read(os.environ, 1, nproc_given=False).rank is not None:
        raise UsageError(
            "the launcher started several processes, and a study starts those of its runs itself; type python, not "
            "torchrun"
        )


@functools.cache  # once in a process
def end_with_launcher(*, leads: bool) -> None:
    """Look, from a thread, for the torchrun that started this process; do nothing where none did.

    When it is gone, rank 0 stops in good order, as at SIGTERM, and stops the others. They end by themselves if that
    takes too long.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def look() -> None:
        while os.getppid() == launcher:
            time.sleep(_LOOK_SECONDS)
        if leads:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            time.sleep(_STOP_SECONDS)
            os._exit(1)

    threading.Thread(target=look, name="launcher", daemon=True).start()


def fork_server(model: str | None, *modules: str) -> ForkServerContext:
    """Start a fork server that imports what workers of `model` need in the background, and return its context.

    Args:
        model: as `asyncsgd.tasks.models.build_model` takes it; None: workers need no transformers.
        modules: further modules to import there; none may run a tensor operation.

    It never runs a tensor operation, so it has one thread and its children may use OpenMP. To be called early and
    once. It imports the model's own module: a plain import of transformers gains nothing, since that loads models
    at first use."""
    kind = None if model is None else _kind_of_model(model)
    return fork_server_of(
        "asyncsgd.backends.ranks",
        "asyncsgd.backends.worker_main",
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
    with _clean_environment():
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
def _clean_environment() -> Iterator[None]:
    """Within it, processes are started without a launcher's variables, on one OpenMP thread, without parallel
    tokenizers.
    """
    # Each process then sets the number of OpenMP threads that it was told.
    here = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = {name: os.environ.pop(name, None) for name in (*_LAUNCHED, *here)}
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
    end_with_parent()
    with best_effort():
        target(*arguments)


class ChildProcesses:
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
        return self._processes[number].pid

    def join(self, number: int) -> None:
        self._processes[number].join()

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

    def __enter__(self) -> ChildProcesses:
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


@dataclasses.dataclass(frozen=True)
class World:
    """Which rank a process is, and the store in which it meets the others. Can be pickled until it is used."""

    rank: int
    number: int
    """Of ranks."""
    folder: str | None
    """Where ranks meet that rank 0 has started, private to the user; None: in the store that torchrun opens, which
    anybody on the network can write to.
    """

    @classmethod
    def of_torchrun(cls) -> World:
        """This process's; called where torchrun has made it."""
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None)

    @property
    def several_hosts(self) -> bool:
        return self.folder is None and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")

    @functools.cached_property
    def _store(self) -> Any:
        from torch import distributed as dist

        if self.folder is None:
            return dist.PrefixStore("asyncsgd", next(iter(dist.rendezvous("env://")))[0])
        store = dist.FileStore(f"{self.folder}/store", self.number)
        store.set_timeout(TIMEOUT)
        return store

    def put(self, name: str, notice: bytes) -> None:
        self._store.set(name, notice)

    def get(self, name: str) -> bytes:
        """Wait for a notice. It may come from a stranger."""
        self._store.wait([name], TIMEOUT)
        notice: bytes = self._store.get(name)
        return notice

    def arrive(self) -> None:
        self._store.add("arrived", 1)

    def complete(self, seconds: float) -> bool:
        """Wait so long at most for all ranks from 1 on; whether they are ready."""
        until = time.monotonic() + seconds
        while self._store.add("arrived", 0) < self.number - 1:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def _interface(self, wanted: str | None) -> str | None:
        """The network interface on which gloo listens; None: as gloo chooses.

        Gloo would resolve the host's name, which may have no address, or one that other hosts cannot reach.

        Args:
            wanted: by the user.
        """
        if sys.platform != "linux":
            return None
        if not self.several_hosts:
            return "lo"  # an interface that the user has named is for hosts
        if wanted is not None or _INTERFACE in os.environ:
            return wanted or os.environ[_INTERFACE]
        from asyncsgd.backends.addresses import address_towards, interface_of, is_loopback

        address = address_towards(os.environ["MASTER_ADDR"])
        if is_loopback(address):  # here the leader's name means this host: the way to another one is asked for
            other = str(ipaddress.ip_address(self.get("an address").decode()))
            address = address_towards(other)
        else:
            self.put("an address", address.encode())
        return interface_of(address)

    @contextlib.contextmanager
    def group(self, device: str, interface: str | None = None) -> Iterator[None]:
        """Within it, this process is a rank of the process group: of NCCL where every rank has a GPU of its own (it
        refuses two on one), of gloo elsewhere.

        Args:
            interface: the network interface to other hosts; None: that of the way to them.
        """
        import torch
        from torch import distributed as dist

        nccl = device.startswith("cuda") and torch.cuda.device_count() >= self.number
        before = os.environ.get(_INTERFACE)
        chosen = self._interface(interface)
        if chosen is not None:
            os.environ[_INTERFACE] = chosen
        try:
            dist.init_process_group(
                "nccl" if nccl else "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.number,
                timeout=TIMEOUT,
            )
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.pop(_INTERFACE, None)
            if before is not None:
                os.environ[_INTERFACE] = before
