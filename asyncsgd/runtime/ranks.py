"""Whether this process is alone or one of torchrun's ranks, and how ranks tell each other what to do."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import signal
import threading
import time
from collections.abc import Mapping

from asyncsgd.errors import UsageError

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
        try:
            world_size = int(environment.get("WORLD_SIZE", "1"))
            if world_size == 1:
                return cls(nproc, None, False)
            rank, local = int(environment["RANK"]), int(environment.get("LOCAL_WORLD_SIZE", world_size))
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
        return cls(world_size, rank, local != world_size)

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


def go_offline(model: str, data: str) -> None:
    """No network call where the user named neither a Hub model nor a Hub data set; to be called before transformers
    is imported.
    """
    if (
        model in ("tiny", "small", "tiny-distilbert") or os.path.isdir(os.path.expanduser(model))
    ) and "hub:" not in data:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Noticeboard:
    """Where torchrun's ranks meet and read what rank 0 has prepared, instead of preparing it themselves.

    This is the store that torchrun opens, which anybody on the network can write to.
    """

    def __init__(self) -> None:
        from torch import distributed as dist

        self.several_hosts = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
        if not self.several_hosts and os.path.isdir("/sys/class/net/lo"):
            # One host: gloo would resolve the host's name, which need not have an address.
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store, self.rank, self.world_size = next(iter(dist.rendezvous("env://")))
        self.store = dist.PrefixStore("asyncsgd", store)

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

        It may come from a stranger.
        """
        self.store.wait(["notice"], _PATIENCE)
        return self.store.get("notice")
