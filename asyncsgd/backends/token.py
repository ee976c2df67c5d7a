"""The token that all hosts of a run have; see `asyncsgd.backends.seal`. It stands in no record and in no message."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from asyncsgd.backends.addresses import address_of_interface
from asyncsgd.backends.launch import Launch
from asyncsgd.errors import UsageError, reason
from asyncsgd.settings.groups import Output
from asyncsgd.settings.specs import flag_of
from asyncsgd.torchrun import OWN_STORE

VARIABLE = "ASYNCSGD_TOKEN"
MIN_TOKEN_BYTES = 32
TRUSTED = b""
"""The token of a run whose network is trusted; see ``--trust-network``."""
_MAKE = "(umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > token)"


def check_hosts(output: Output, launch: Launch, *, has_server: bool) -> None:
    """Refuse several hosts that have no token, and settings for several hosts if there is one host.

    Raises:
        UsageError: the message says what to type.
    """
    if output.interface is not None:
        if not launch.several_hosts:
            raise UsageError("--interface is for several hosts of torchrun; drop it")
        address_of_interface(output.interface)  # raises UsageError if there is none
    if launch.is_elastic:
        _check_elastic(has_server)
    if output.mirror is not None:
        if not launch.several_hosts:
            raise UsageError("--mirror is for several hosts of torchrun; drop it")
        if not _takes_checkpoints(output):
            raise UsageError("--mirror copies checkpoints, and none is taken; type --checkpoint-every as well")
    if launch.several_hosts and has_server:
        token_of(output)
        return
    for name in ("token_file", "trust_network", "worker_deadline"):
        if getattr(output, name):
            raise UsageError(f"{flag_of(name)} is for --mode async on several hosts of torchrun; drop it")


def _check_elastic(has_server: bool) -> None:
    """Refuse what hosts that come and go cannot do.

    Raises:
        UsageError: with what to type.
    """
    if not has_server:
        raise UsageError(
            "synchronous ranks cannot come and go: --nnodes MIN:MAX is for --mode async; type --nnodes NUMBER"
        )
    if os.environ.get("TORCHELASTIC_RUN_ID", "none") == "none":
        raise UsageError("with --nnodes MIN:MAX torchrun needs a name for the job; type --rdzv-id NAME as well")
    # The store of torchrun's agent stays on the first host of the first start. With the variable each rank 0 opens one.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UsageError(
            f"with --nnodes MIN:MAX hosts that stay look for torchrun's store where it was before a host came; type "
            f"{OWN_STORE}=1 in front of torchrun"
        )


def _takes_checkpoints(output: Output) -> bool:
    """Whether a run may take checkpoints by itself; one that goes on may do so as it did before."""
    asked = (output.checkpoint_every, output.checkpoint_seconds, output.resume)
    return any(value is not None for value in asked)


def token_of(output: Output) -> bytes:
    """The token of a run on several hosts: that of ``--token-file``, else that of the environment. It is empty with
    ``--trust-network``.

    Raises:
        UsageError: if there is none, or others may read it, or it is short.
    """
    if output.trust_network:
        return TRUSTED
    if output.token_file is not None:
        return _checked(_read(Path(output.token_file)), f"--token-file {output.token_file}")
    if VARIABLE in os.environ:
        return _checked(os.fsencode(os.environ[VARIABLE]), VARIABLE)
    raise UsageError(
        f"asynchronous workers on several hosts need a token, by which hosts know each other; type {_MAKE}, copy the "
        f"file to every host, and add --token-file token there. Where nobody else can reach the network, type "
        f"--trust-network"
    )


def _read(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--token-file {path} cannot be read ({reason(error)}); type {_MAKE} to make one") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"others may read --token-file {path}; type chmod 600 {path}")
    return content


def _checked(content: bytes, where: str) -> bytes:
    token = content.strip()
    if len(token) < MIN_TOKEN_BYTES:
        raise UsageError(
            f"the token of {where} has {len(token)} bytes, and {MIN_TOKEN_BYTES} is the fewest; "
            f"type {_MAKE} to make one"
        )
    return token
