"""Who this process is: alone, or one of torchrun's ranks; and how ranks tell each other what to do."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Mapping
from typing import Any

from asyncsgd.errors import UsageError


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


def go_offline(model: str, data: str) -> None:
    """No network call where the user named neither a Hub model nor a Hub data set; to be called before transformers
    is imported.
    """
    if (model in ("tiny", "small") or os.path.isdir(os.path.expanduser(model))) and "hub:" not in data:
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


class Noticeboard:
    """Where torchrun's ranks read what rank 0 has prepared, instead of preparing it themselves; on torchrun's own
    store.
    """

    def __init__(self) -> None:
        from torch import distributed as dist

        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UsageError(_left_over(name, "is not set, though WORLD_SIZE is"))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE") and os.path.isdir("/sys/class/net/lo"):
            # One host: gloo would resolve the host's name, which need not have an address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store, self.rank, self.world_size = next(iter(dist.rendezvous("env://")))
        self.store = dist.PrefixStore("asyncsgd", store)

    def put(self, name: str, content: object) -> None:
        """Publish `content`, pickled; rank 0 only."""
        self.store.set(name, pickle.dumps(content))  # type: ignore[arg-type]  # bytes are fine, the stub says str

    def get(self, name: str) -> Any:
        """Wait for what rank 0 publishes under `name`, up to half an hour (a large corpus takes its time)."""
        import datetime

        self.store.wait([name], datetime.timedelta(minutes=30))
        return pickle.loads(self.store.get(name))
