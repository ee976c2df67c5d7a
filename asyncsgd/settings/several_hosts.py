"""How the hosts of a run meet, in one object for `asyncsgd.train`. Scripts have a flag for each of its fields."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class SeveralHosts:
    """How hosts meet, where torchrun starts a script with an asynchronous run on several of them.

    Args:
        token_file: a file with the token that all hosts have, 32 bytes or more, which nobody else may read. None: the
            token is in the variable ``ASYNCSGD_TOKEN``.
        trust_network: do without a token, on a network that nobody else can reach.
        interface: the network interface to the other hosts, e.g. ``eth1``. None: that of the way to each host.
        worker_deadline: seconds without a sign of life after which another host is lost, and its workers. None: 60.
        mirror: the number of the host, 1 or more, that keeps a copy of each checkpoint in its own `folder`; see
            `asyncsgd.backends.mirror`. Needs `checkpoint_every` or `checkpoint_seconds`. None: no host.
    """

    token_file: str | Path | None = None
    trust_network: bool = False
    interface: str | None = None
    worker_deadline: float | None = None
    mirror: int | None = None
