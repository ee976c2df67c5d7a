"""Whether this process is alone or one of torchrun's ranks, and how ranks tell each other what to do."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from asyncsgd.errors import UsageError
from asyncsgd.numbers import spelled_bytes
from asyncsgd.runtime.private_folder import check_private, new_folder

_LOOK_SECONDS, _STOP_SECONDS = 1.0, 30.0
"""Between two looks for the launcher; that rank 0 has to stop the others when it is gone."""

_PATIENCE = datetime.timedelta(minutes=30)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the script was started.

    >>> Launch.read({}, 4, nproc_given=True)
    Launch(num_workers=4, rank=None, several_hosts=False)
    >>> Launch.read({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, nproc_given=False)
    Launch(num_workers=2, rank=1, several_hosts=False)
    """

    num_workers: int
    rank: int | None
    """This process's rank among torchrun's, or None where this script starts its workers itself."""
    several_hosts: bool

    @classmethod
    def read(cls, environment: Mapping[str, str], nproc: int, *, nproc_given: bool) -> Launch:
        """Compare what a launcher set with ``--nproc``.

        A WORLD_SIZE of 1 is torchrun without ``--nproc-per-node``: the script then starts `nproc` workers itself.

        Raises:
            UsageError: if both name a number of workers and they differ, or the launcher's variables are incomplete.
        """
        world_size = _number(environment, "WORLD_SIZE", "1")
        if world_size == 1:
            return cls(nproc, None, False)
        if nproc_given and nproc != world_size:
            raise UsageError(
                f"the launcher started {world_size} processes but --nproc is {nproc}; drop --nproc, or type "
                f"torchrun --nproc-per-node {nproc}"
            )
        local = _number(environment, "LOCAL_WORLD_SIZE", str(world_size))
        return cls(world_size, _number(environment, "RANK"), local != world_size)

    @property
    def leads(self) -> bool:
        """Whether this process prepares the run, keeps the record and speaks to the user."""
        return self.rank in (None, 0)


def another_speaks(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several ranks and not the first, so that what all of them have to say is said already.

    A RANK that is left over from another program makes no rank.

    >>> launched = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    >>> another_speaks(launched), another_speaks(launched | {"RANK": "0"}), another_speaks({"RANK": "1"})
    (True, False, False)
    """
    complete = all(name in environment for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"))
    return complete and environment["WORLD_SIZE"] != "1" and environment["RANK"] != "0"


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


_FEWEST_FILES = 64
_SMALLEST_ADDRESS_SPACE = 2**30


def check_surroundings() -> None:
    """Refuse a working folder that is gone and limits under which not even the imports succeed: torch's libraries then
    end the process with messages of their own.

    Raises:
        UsageError: with what to type.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError("the working folder is not there any more; type cd FOLDER, and the command again") from error
    files, space = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS))
    if files != resource.RLIM_INFINITY and files < _FEWEST_FILES:
        raise UsageError(f"ulimit -n lets a process open {files} files, which is too few; type ulimit -n 4096")
    if space != resource.RLIM_INFINITY and space < _SMALLEST_ADDRESS_SPACE:
        raise UsageError(
            f"ulimit -v leaves {spelled_bytes(space)} of address space, and the imports alone need "
            f"{spelled_bytes(_SMALLEST_ADDRESS_SPACE)}; type ulimit -v unlimited"
        )


def go_offline(model: str, data: str) -> None:
    """No network call where the user named neither a Hub model nor a Hub data set; to be called before transformers
    is imported.
    """
    if (
        model in ("tiny", "small", "tiny-distilbert") or os.path.isdir(os.path.expanduser(model))
    ) and "hub:" not in data:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name, default)
    if not text.isdigit():
        raise UsageError(
            _left_over(name, f"is {text!r}" if name in environment else "is not set, though WORLD_SIZE is")
        )
    return int(text)


def _left_over(name: str, what: str) -> str:
    return (
        f"the environment variable {name} {what}; a launcher sets all of them. If they are left over from another "
        f"program, type unset WORLD_SIZE RANK, otherwise start with torchrun"
    )


def _check_interfaces(names: str) -> None:
    """Refuse names of network interfaces that this host lacks, which gloo would say in words of its own.

    Raises:
        UsageError: with those there are.
    """
    there = [interface for _, interface in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name not in there:
            raise UsageError(
                f"GLOO_SOCKET_IFNAME names {name}, and the network interfaces of this host are {', '.join(there)}; "
                f"type export GLOO_SOCKET_IFNAME=NAME with one of them, or unset GLOO_SOCKET_IFNAME"
            )


class Noticeboard:
    """Where torchrun's ranks meet and read what rank 0 has prepared, instead of preparing it themselves.

    On one host this is a file in a private folder of rank 0; only its name goes through the store that torchrun opens,
    which anybody on the network can write to. On several hosts it is that store itself.
    """

    def __init__(self) -> None:
        from torch import distributed as dist

        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UsageError(_left_over(name, "is not set, though WORLD_SIZE is"))
        self.several_hosts = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
        if self.several_hosts:
            _check_interfaces(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        store, self.rank, self.world_size = next(iter(dist.rendezvous("env://")))
        self.store: dist.Store = dist.PrefixStore("asyncsgd", store)
        if not self.several_hosts:
            if os.path.isdir("/sys/class/net/lo"):
                # One host: gloo would resolve the host's name, which need not have an address.
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            self.store = dist.FileStore(str(self._folder() / "store"), self.world_size)

    def _folder(self) -> Path:
        """Rank 0's private folder, by the name that it has put into torchrun's store."""
        if self.rank == 0:
            folder = new_folder("ranks-")
            self.store.set("folder", str(folder))
            return folder
        self.store.wait(["folder"], _PATIENCE)
        return check_private(Path(os.fsdecode(self.store.get("folder"))))

    def put(self, notice: bytes) -> None:
        """Publish `notice`; rank 0 only."""
        self.store.set("notice", notice)  # type: ignore[arg-type]  # bytes are fine, the stub says str

    def say(self, notice: bytes) -> None:
        """Publish a notice of this rank for rank 0."""
        self.store.set(f"rank{self.rank}", notice)  # type: ignore[arg-type]  # as above

    def heard(self) -> list[bytes]:
        """Wait for what the ranks from 1 on `say`, as long as `get` does; rank 0 only. It may come from a stranger."""
        names = [f"rank{rank}" for rank in range(1, self.world_size)]
        self.store.wait(names, _PATIENCE)
        return [self.store.get(name) for name in names]

    def get(self) -> bytes:
        """Wait for what rank 0 publishes, up to half an hour (a large corpus takes its time).

        On several hosts it may come from a stranger.
        """
        self.store.wait(["notice"], _PATIENCE)
        return self.store.get("notice")
