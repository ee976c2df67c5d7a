"""This host among those of a run, as torchrun numbers them, and what hosts agree about."""

from __future__ import annotations

import dataclasses
import os
import platform
from importlib import metadata

from asyncsgd import __version__
from asyncsgd.backends.addresses import address_of_interface, address_towards
from asyncsgd.backends.launch import Launch
from asyncsgd.backends.pair import Rendezvous

_DEADLINE_SECONDS = 60.0
_MAX_INTERVAL_SECONDS = 5.0
_MIN_SIGNS = 4
"""A host sends at least so many signs of life within the deadline."""


@dataclasses.dataclass(frozen=True)
class SignsOfLife:
    """When hosts send signs of life, the messages `Alive`."""

    deadline: float = _DEADLINE_SECONDS
    """A host is lost after so many seconds without a sign of life."""

    @classmethod
    def of(cls, worker_deadline: float | None) -> SignsOfLife:
        return cls() if worker_deadline is None else cls(worker_deadline)

    @property
    def interval(self) -> float:
        """Seconds between two signs of life."""
        return min(_MAX_INTERVAL_SECONDS, self.deadline / _MIN_SIGNS)


def versions() -> dict[str, str]:
    """The versions that must be equal on all hosts, since the server uses what workers compute unseen."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"asyncsgd": __version__, "torch": metadata.version("torch").partition("+")[0], "python": python}


@dataclasses.dataclass(frozen=True)
class ThisHost:
    """This host among those of a run, as torchrun numbers them."""

    number: int
    """The number of this host. Rank 0 is on host 0."""
    num_hosts: int
    first_worker: int
    """The rank of the first process of this host. The workers of a host are numbered by its ranks."""
    num_workers: int
    """The number of workers on this host."""
    leader: str
    """The address of the host of rank 0, as torchrun was given it."""
    port: int
    """The port of torchrun's store on that host."""
    prefix: str
    """The prefix of names in the store: it tells apart two starts by torchrun."""

    @classmethod
    def of_torchrun(cls, launch: Launch) -> ThisHost:
        """The host of this process, which is the first rank of it."""
        assert launch.rank is not None
        environment = os.environ
        attempt = f"{environment.get('TORCHELASTIC_RUN_ID')}/{environment.get('TORCHELASTIC_RESTART_COUNT')}"
        return cls(
            int(environment["GROUP_RANK"]),
            int(environment["GROUP_WORLD_SIZE"]),
            launch.rank - launch.local_rank,
            launch.ranks_here,
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            f"asyncsgd/{attempt}",
        )

    @property
    def workers(self) -> range:
        """The workers of this host."""
        return range(self.first_worker, self.first_worker + self.num_workers)

    def rendezvous(self, address: str, token: bytes) -> Rendezvous:
        """Where this host and another one find each other. Gloo listens on `address` of this host."""
        return Rendezvous("", (self.leader, self.port), self.prefix, address, token)


def own_address(interface: str | None, other: str) -> str:
    """The address of this host that another host reaches: that of `interface`; None: that of the way to `other`."""
    return address_towards(other) if interface is None else address_of_interface(interface)


def name_of_address(host: int) -> str:
    """The name under which a host writes its address into the store."""
    return f"address of host {host}"
