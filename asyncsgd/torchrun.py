"""Lets ``torchrun script.py --nproc 4`` start. Standard library only.

torchrun parses *all* tokens for its own options, also those after the script's name. It refuses ``--nproc`` as an
ambiguous abbreviation of ``--nproc-per-node`` and ``--nproc_per_node`` (pytorch/pytorch#120601). At the end of
``import torch``, before torchrun parses, torch calls the entry points of the group ``torch.backends``. `accept_nproc`
is one of them. It writes the token out in full. Without it that token is an error in torchrun, so nothing that works
changes.

It also says what to type where torchrun would wait without a word. With ``--rdzv-backend c10d`` the host whose address
is that of ``--rdzv-endpoint`` opens the store in which all meet, and a host asks its own name for its addresses.
Debian's installer writes 127.0.1.1 for it into /etc/hosts. Then no host believes that it is the one, and all wait.

With ``--nnodes MIN:MAX`` it tells the ranks how many hosts there may be, which torchrun keeps to itself, and asks for a
new store each time torchrun starts all ranks again: hosts that keep the old one look for it where rank 0 was before,
and would wait there for ever."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys

MOST_HOSTS = "ASYNCSGD_MOST_HOSTS"
"""Variable for ranks: the MAX of ``--nnodes MIN:MAX``; not set where the number of hosts is fixed."""
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable by which torchrun leaves it to the ranks to open a store."""


def accept_nproc() -> None:
    """Rewrite ``--nproc`` and ``--nproc=N`` in `sys.argv` to ``--nproc-per-node``, only when the program is torchrun;
    and say what to type where it would wait in silence.

    Called by torch at the end of ``import torch``. An exception here would break every ``import torch`` of the
    environment, so all are caught."""
    try:
        if is_torchrun(sys.orig_argv):
            sys.argv[1:] = spell_out(sys.argv[1:])
            most_hosts = most_hosts_of(sys.argv[1:], os.environ.get("PET_NNODES", ""))
            if most_hosts is not None:
                os.environ[MOST_HOSTS] = str(most_hosts)
                os.environ.setdefault(OWN_STORE, "1")
            endpoint = endpoint_to_be_decided(sys.argv[1:])
            advice = None if endpoint is None else advice_on(endpoint)
            if advice is not None:
                print(advice, file=sys.stderr, flush=True)
    except Exception:
        return


def is_torchrun(orig_argv: list[str]) -> bool:
    """Say whether an interpreter's command line is torchrun: the console script, or ``-m torch.distributed.run``.

    `sys.argv[0]` cannot tell: under ``-m`` it is just ``-m`` while torch is being imported.

    >>> is_torchrun(["python", "/usr/bin/torchrun", "script.py"])
    True
    >>> is_torchrun(["python", "-u", "-m", "torch.distributed.run", "script.py"])
    True
    >>> is_torchrun(["python", "script.py", "torchrun"])
    False
    """
    program = next((token for token in orig_argv[1:] if not token.startswith("-")), "")
    return program == "torch.distributed.run" or os.path.splitext(os.path.basename(program))[0] == "torchrun"


def spell_out(arguments: list[str]) -> list[str]:
    """Return `arguments` with ``--nproc`` spelt ``--nproc-per-node``, up to a literal ``--``.

    >>> spell_out(["script.py", "--nproc", "4", "--", "--nproc=2"])
    ['script.py', '--nproc-per-node', '4', '--', '--nproc=2']
    >>> spell_out(["script.py", "--nproc=4", "--nprocs", "2"])
    ['script.py', '--nproc-per-node=4', '--nprocs', '2']
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    head = [
        "--nproc-per-node" + token[len("--nproc") :] if token == "--nproc" or token.startswith("--nproc=") else token
        for token in arguments[:end]
    ]
    return head + arguments[end:]


def most_hosts_of(arguments: list[str], default: str) -> int | None:
    """Return the MAX of ``--nnodes MIN:MAX``; None where the number of hosts is fixed.

    Args:
        arguments: of torchrun.
        default: what counts where they do not say it.

    >>> most_hosts_of(["--nnodes", "1:3", "script.py"], ""), most_hosts_of(["--nnodes=2", "script.py"], "1:3")
    (3, None)
    >>> most_hosts_of(["script.py", "--nnodes", "1:3"], "2:4")
    4
    """
    chosen = default
    for number, argument in enumerate(arguments):
        if argument.endswith(".py"):
            break
        name, equals, value = argument.partition("=")
        if name == "--nnodes":
            chosen = value if equals else arguments[number + 1]
    fewest, _, most = chosen.partition(":")
    return int(most) if most and int(most) > int(fewest) else None


def endpoint_to_be_decided(arguments: list[str]) -> str | None:
    """Return the host of ``--rdzv-endpoint`` where torchrun has to find out by itself whether it is this one.

    >>> endpoint_to_be_decided(["--nnodes", "2", "--rdzv-backend=c10d", "--rdzv_endpoint", "10.0.0.1:29400", "a.py"])
    '10.0.0.1'
    >>> endpoint_to_be_decided(["--rdzv-endpoint=10.0.0.1:29400", "--local-addr", "10.0.0.2", "a.py"])
    >>> endpoint_to_be_decided(["--rdzv-endpoint=10.0.0.1:29400", "--rdzv-conf", "is_host=0", "a.py"])
    """
    endpoint = None
    for number, argument in enumerate(arguments):
        name, equals, value = argument.replace("_", "-").partition("=")
        if name == "--local-addr" or "is-host" in argument.replace("_", "-"):
            return None
        if name == "--rdzv-endpoint":
            endpoint = value if equals else arguments[number + 1]
    if endpoint is None:
        return None
    return endpoint.rpartition(":")[0] or endpoint


def advice_on(endpoint: str) -> str | None:
    """Return what to type where this host's own name means loopback and `endpoint` does not; None elsewhere."""
    name = socket.gethostname()
    own = socket.gethostbyname(name)
    address = socket.gethostbyname(endpoint)
    if not ipaddress.ip_address(own).is_loopback or ipaddress.ip_address(address).is_loopback:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:  # nothing is sent
        way.connect((address, 9))
        towards = way.getsockname()[0]
    is_host = int(towards == address)
    return (
        f"asyncsgd: this host's name {name} means {own}, so torchrun may wait for ever; if it does, type "
        f"--rdzv-conf is_host={is_host} --local-addr {towards} in front of the script"
    )
