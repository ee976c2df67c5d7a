"""A host among those of a run, as torchrun numbers them, and what hosts agree about."""

from __future__ import annotations

import dataclasses
import os
import platform
from importlib import metadata

from asyncsgd import __version__
from asyncsgd.backends.addresses import address_of_interface, address_towards
from asyncsgd.backends.launch import Launch
from asyncsgd.backends.pair import Meeting

_DEADLINE = 60.0
_BETWEEN_SIGNS = 5.0
_SIGNS_BEFORE_DEADLINE = 4
"""How often a host says at least that it lives before it would be lost."""


@dataclasses.dataclass(frozen=True)
class Signs:
    """When hosts say that they live."""

    deadline: float = _DEADLINE
    """Seconds without a sign of life after which a host is lost."""

    @classmethod
    def of(cls, worker_deadline: float | None) -> Signs:
        return cls() if worker_deadline is None else cls(worker_deadline)

    @property
    def between(self) -> float:
        """Seconds between two signs of life."""
        return min(_BETWEEN_SIGNS, self.deadline / _SIGNS_BEFORE_DEADLINE)


def versions() -> dict[str, str]:
    """What must be equal on all hosts, since workers compute with it what the server believes."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"asyncsgd": __version__, "torch": metadata.version("torch").partition("+")[0], "python": python}


@dataclasses.dataclass(frozen=True)
class Host:
    """This host among those of a run, as torchrun numbers them."""

    number: int
    """Of this host; 0 has rank 0."""
    num_hosts: int
    first: int
    """Worker of this host: the rank of its first process."""
    num_workers: int
    leader: str
    """Address of the host of rank 0, as torchrun was given it."""
    port: int
    prefix: str

    @classmethod
    def of_torchrun(cls, launch: Launch) -> Host:
        """This process's; called in the first rank of a host."""
        assert launch.rank is not None
        attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
        return cls(
            int(os.environ["GROUP_RANK"]),
            int(os.environ["GROUP_WORLD_SIZE"]),
            launch.rank - launch.local_rank,
            launch.ranks_here,
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            f"asyncsgd/{attempt}",
        )

    def meeting(self, address: str, token: bytes) -> Meeting:
        """Where this host meets another one, with gloo on `address`."""
        return Meeting("", (self.leader, self.port), self.prefix, address, token)


def own_address(interface: str | None, other: str) -> str:
    return address_towards(other) if interface is None else address_of_interface(interface)


def name_of_address(host: int) -> str:
    return f"address of host {host}"
