"""Starts the processes of a run, or recognises those that torchrun has started, and lets them find each other.

Torchrun has started all ranks if WORLD_SIZE is more than 1. Otherwise this process is rank 0 and starts the others from
a fork server. This module imports nothing heavy, so that the fork server can start early and do its imports while this
process does its own."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
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
from asyncsgd.core.signals import signals_held
from asyncsgd.errors import UsageError
from asyncsgd.records.best_effort import best_effort
from asyncsgd.run.runtimes import processes_on_this_host
from asyncsgd.torchrun import MOST_HOSTS

_VARIABLES_OF_A_RANK = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    MOST_HOSTS,
)
"""The variables that make a process a rank of torchrun, and say where the ranks meet. `asyncsgd.torchrun` sets
`MOST_HOSTS`, and torchrun sets the others. Processes that this library starts must not see them, or they would act as
such ranks. Torchrun's further variables stay, such as TORCHELASTIC_RUN_ID: they make no process a rank."""
_LOOK_SECONDS = 1.0
"""A process looks so often whether its launcher is still there."""
_STOP_SECONDS = 30.0
"""When the launcher is gone, rank 0 has so many seconds to stop the other ranks."""
_NEW_START_SECONDS = 5.0
"""See `wait_for_new_start`."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
TIMEOUT = datetime.timedelta(minutes=30)
"""The longest wait for another rank. A rank whose process has ended is noticed at once; this limit is for ranks that
hang and hosts that vanish. Loading a large corpus, a gradient or an evaluation shard may take almost as long."""
OUT_OF_MEMORY = 4
RAISED = 5
NO_BATCH_LEFT = 6
"""A process tells the leader with these exit codes why it ended; `REASONS` has a sentence for each."""
REASONS = {
    OUT_OF_MEMORY: errors.OUT_OF_MEMORY,
    RAISED: "it raised the error that stands above",
    NO_BATCH_LEFT: "the data end with the budget, and the worker was given a batch after their end",
}
_FORK_SERVER_GONE = 255
"""A process seems to have this exit code if the fork server has ended, since only the fork server knows the true
one."""


@dataclasses.dataclass(frozen=True)
class PlaceOfHost:
    """The number of this host and the address of the one that leads: by torchrun, or as hosts that come and go have
    agreed in the message `asyncsgd.backends.link.Agreed`. `asyncsgd.backends.host.ThisHost` has this and more.
    """

    number: int
    """The number of this host. The host of rank 0, which leads, has 0."""
    num_hosts: int
    leader: str
    """The address of the host of rank 0."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the script was started.

    >>> Launch.read({}, 4, nproc_given=True).num_workers
    4
    >>> second = Launch.read({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, nproc_given=False)
    >>> second.several_hosts, second.leads
    (False, False)
    >>> second.is_needed(has_server=True), second.is_needed(has_server=False)
    (False, True)
    """

    num_workers: int
    """The number of workers of the run. Where hosts come and go, it is the most that there may be at a time."""
    rank: int | None
    """The rank of this process: that of torchrun or, where hosts come and go, the agreed one. None: this process starts
    its workers itself."""
    local_rank: int = 0
    """The number of this process among the ranks of its host."""
    ranks_here: int = 0
    """The number of ranks on this host; 0 if torchrun has started none."""
    is_elastic: bool = False
    """Whether hosts come and go, with ``--nnodes MIN:MAX``."""
    agreed: PlaceOfHost | None = None
    """What hosts that come and go have agreed about this one. None: torchrun's numbers count."""

    @classmethod
    def read(cls, environment: Mapping[str, str], nproc: int, *, nproc_given: bool) -> Launch:
        """Compare what a launcher set with ``--nproc``.

        A WORLD_SIZE of 1 is torchrun without ``--nproc-per-node``: the script then starts `nproc` workers itself.

        Raises:
            UsageError: if both name a number of workers and they differ, or the launcher's variables are incomplete.
        """
        try:
            world_size = int(environment.get("WORLD_SIZE", "1"))
            most_hosts = environment.get(MOST_HOSTS)
            if world_size == 1 and most_hosts is None:
                return cls(nproc, None)
            rank = int(environment["RANK"])
            ranks_here = int(environment.get("LOCAL_WORLD_SIZE", world_size))
            local_rank = int(environment.get("LOCAL_RANK", rank % ranks_here))
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"WORLD_SIZE is {environment.get('WORLD_SIZE')!r} and RANK is {environment.get('RANK')!r}; a launcher "
                f"sets both. If they are left over from another program, type unset WORLD_SIZE RANK, otherwise start "
                f"with torchrun"
            ) from error
        if most_hosts is not None:
            most_workers = nproc if nproc_given else int(most_hosts) * ranks_here
            if world_size > most_workers:
                raise UsageError(
                    f"the launcher started {world_size} processes, more than --nproc {most_workers}, which is the most "
                    f"workers that there may be with all hosts; type a larger one"
                )
            return cls(most_workers, rank, local_rank, ranks_here, is_elastic=True)
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
        """Whether a launcher has started the ranks on several hosts. One that does not say how many ranks are here is
        taken to have started all of them here. `World.may_span_hosts` says yes for such a launcher: it decides on which
        network ranks meet, and ranks on several hosts cannot meet on loopback.
        """
        return self.rank is not None and (self.is_elastic or self.ranks_here != self.num_workers)

    @property
    def leads_other_host(self) -> bool:
        """Whether this process starts the workers of a host other than that of rank 0."""
        return self.several_hosts and not self.leads and self.local_rank == 0

    def is_needed(self, *, has_server: bool) -> bool:
        """Whether this process has a part in the run. If the run has a server, the other ranks of a host end at once:
        its first rank starts the workers itself, since torchrun ends all ranks when one of them dies."""
        return self.leads or self.leads_other_host or not has_server

    def starts_workers(self, *, has_server: bool) -> bool:
        """Whether the leader starts the other processes of the run. If not, torchrun has started them."""
        return self.rank is None or has_server


def refuse_ranks() -> None:
    """Refuse a study that torchrun has started, since the study would begin in each rank.

    Raises:
        UsageError: if this process is a rank of torchrun; the message says what to type.
    """
    if Launch.read(os.environ, 1, nproc_given=False).rank is not None:
        raise UsageError(
            "the launcher started several processes, and a study starts those of its runs itself; type python, not "
            "torchrun"
        )


def wait_for_new_start(launch: Launch) -> None:
    """Give torchrun some seconds to start this rank again, where hosts come and go; to be called before it ends.

    When a host comes, torchrun ends the ranks of one host a moment before those of another one. These would see the
    others gone, end with an error, and torchrun would take that for a failure of their own."""
    if launch.is_elastic:
        time.sleep(_NEW_START_SECONDS)


@functools.cache  # once in a process
def end_with_launcher(*, leads: bool) -> None:
    """End this process when the torchrun that started it is gone. A thread looks for it; without torchrun there is
    none.

    Rank 0 then stops in good order, as at SIGTERM, and stops the other ranks. These end by themselves if that takes too
    long.
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
        model: the model, as `asyncsgd.tasks.models.build_model` takes it; None: workers need no transformers.
        modules: further modules to import there; none may run a tensor operation.

    The fork server never runs a tensor operation, so it has one thread and its children may use OpenMP. Call this
    function early, and once. The fork server imports the model's own module: a plain import of transformers gains
    nothing, since that loads models at first use."""
    kind = None if model is None else _kind_of_model(model)
    return fork_server_importing(
        "asyncsgd.backends.ranks",
        "asyncsgd.backends.worker_main",
        *([] if kind is None else [f"transformers.models.{kind}.modeling_{kind}"]),
        *modules,
    )


def fork_server_importing(*modules: str) -> ForkServerContext:
    """Start a fork server that imports `modules` and nothing else; see `fork_server`."""
    from multiprocessing import forkserver, resource_tracker

    if len(tempfile.gettempdir()) > 70:  # a Unix socket's path has at most 107 characters
        raise UsageError(f"TMPDIR={tempfile.gettempdir()} is too long for the paths of sockets; export TMPDIR=/tmp")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    with _clean_environment():
        # The start of the resource tracker unblocks all signals of this process, so it must come before `held`.
        resource_tracker.ensure_running()
        # The fork server starts with signals blocked, and its children inherit that. Only the leader handles Ctrl-C,
        # and the SIGTERM that a batch system sends to every process of a job; it stops the others in good order.
        with signals_held():
            forkserver.ensure_running()
    return context


def _kind_of_model(model: str) -> str:
    """The transformers family of the model in a local folder. It is bert if the family is not known yet, which costs a
    worker an import at most."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        return str(config["model_type"]).replace("-", "_")
    except (OSError, ValueError, KeyError, TypeError):
        return "bert"


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """A context in which processes are started without a launcher's variables, on one OpenMP thread, and without
    parallel tokenizers."""
    # Each process sets the number of its OpenMP threads later, as it was told.
    set_here = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = {name: os.environ.pop(name, None) for name in (*_VARIABLES_OF_A_RANK, *set_here)}
    os.environ.update(set_here)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def end_with_parent() -> None:
    """End this process as soon as the process that started it has ended. A thread does it, so that it happens also
    while this process computes, or waits for a peer that will never answer."""

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    end_with_parent()
    with best_effort():  # errors of the terminal are passed over
        target(*arguments)


def _how_with(code: int) -> str:
    """How a process with this exit code ended; it is negative for a signal, which may have no name.

    >>> _how_with(1), _how_with(-9), _how_with(-40)
    ('its process ended with exit code 1', 'its process was killed by SIGKILL', 'its process was killed by signal 40')
    """
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"its process was killed by {names.get(-code, f'signal {-code}')}"
    return REASONS.get(code) or f"its process ended with exit code {code}"


class ChildProcesses:
    """A group of numbered worker processes. A context manager that ends them all at its end.

    Args:
        context: the fork server, see `fork_server`.
    """

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context
        self.stop_seconds = 10.0
        """How many seconds processes may take to end by themselves, when the context is left without an exception.
        After one it is a second."""
        self._processes: dict[int, BaseProcess] = {}

    def start(self, number: int, target: Callable[..., None], *arguments: object) -> None:
        """Start process `number`, which calls ``target(*arguments)``. Both are pickled."""
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
        """How process `number` ended, in words. Wait up to `seconds` for its end. None: it lives, or it is not ours."""
        process = self._processes.get(number)
        if process is None:
            return None
        process.join(seconds)
        code = process.exitcode
        return None if code is None else _how_with(code)

    def __enter__(self) -> ChildProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait for all processes to end, then kill those that have not."""
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
            process.join(5.0)  # with a limit: the fork server reports the end, and may be suspended itself


@dataclasses.dataclass(frozen=True)
class World:
    """The rank of a process, and the store in which it meets the others. It can be pickled until it has opened the
    store."""

    rank: int
    num_ranks: int
    folder: str | None
    """The folder of the store, which only this user can enter, if rank 0 has started the ranks. None: the store is that
    of torchrun, to which anybody on the network can write."""

    @classmethod
    def of_torchrun(cls) -> World:
        """The world of this process, which torchrun has started."""
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None)

    @property
    def may_span_hosts(self) -> bool:
        """Whether ranks may be on several hosts. If a launcher does not say how many are here, they may; compare
        `Launch.several_hosts`."""
        return self.folder is None and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")

    @functools.cached_property
    def _store(self) -> Any:
        from torch import distributed as dist

        if self.folder is None:
            return dist.PrefixStore("asyncsgd", next(iter(dist.rendezvous("env://")))[0])
        store = dist.FileStore(f"{self.folder}/store", self.num_ranks)
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
        """Tell rank 0, which is in `wait_for_all`, that this rank is ready."""
        self._store.add("arrived", 1)

    def wait_for_all(self, seconds: float) -> bool:
        """Wait at most `seconds` until all other ranks have arrived. Return whether they have."""
        until = time.monotonic() + seconds
        while self._store.add("arrived", 0) < self.num_ranks - 1:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def _interface(self, wanted: str | None) -> str | None:
        """The network interface on which gloo listens; None: as gloo chooses.

        Gloo would resolve the host's name, which may have no address, or one that other hosts cannot reach.

        Args:
            wanted: the interface that the user has named, for the way to other hosts.
        """
        if sys.platform != "linux":
            return None
        if not self.may_span_hosts:
            return "lo"
        from asyncsgd.backends.addresses import address_towards, interface_of, is_loopback

        address = address_towards(os.environ["MASTER_ADDR"])
        self.put(f"address of rank {self.rank}", address.encode())
        named = wanted or os.environ.get(_INTERFACE)
        if named is not None:
            return named
        if is_loopback(address):
            # MASTER_ADDR means this host. So take the way to a rank of another one, if there is any.
            told = (self.get(f"address of rank {rank}").decode() for rank in range(self.num_ranks))
            other = next((one for one in told if not is_loopback(one)), address)
            address = address_towards(other)
        return interface_of(address)

    def takes_nccl(self, device: str) -> bool:
        """Whether every rank has a GPU of its own, since NCCL refuses two ranks on one GPU. All ranks together call
        this function, and get one answer.
        """
        import torch

        ranks_here = processes_on_this_host(self.num_ranks)
        has_one = device.startswith("cuda") and torch.cuda.device_count() >= ranks_here
        if not self.may_span_hosts:
            return has_one
        self.put(f"GPU of rank {self.rank}", str(has_one).encode())  # hosts may differ
        return all(self.get(f"GPU of rank {rank}") == b"True" for rank in range(self.num_ranks))

    @contextlib.contextmanager
    def group(self, device: str, interface: str | None = None) -> Iterator[None]:
        """A context in which this process is a rank of the process group: NCCL's or gloo's, see `takes_nccl`.

        Args:
            interface: the network interface to other hosts; None: that of the way to them.
        """
        from torch import distributed as dist

        nccl = self.takes_nccl(device)
        before = os.environ.get(_INTERFACE)
        chosen = self._interface(interface)
        if chosen is not None:
            os.environ[_INTERFACE] = chosen
        try:
            dist.init_process_group(
                "nccl" if nccl else "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=TIMEOUT,
            )
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.pop(_INTERFACE, None)
            if before is not None:
                os.environ[_INTERFACE] = before
