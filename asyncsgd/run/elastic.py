"""A run in which hosts come and go, with ``torchrun --nnodes MIN:MAX``: what this host has of it, and who leads.

Each time torchrun starts the ranks again, the hosts agree who leads, see `asyncsgd.backends.election`. A host that does
not lead writes down who does, beside where its own folder of the run would be:

    RUN_DIR.led.json    the rendezvous, the name of the host that leads, and the samples from which it goes on

So if that host is lost with its folder, the others know that the run has begun, and do not begin it again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncsgd.backends import election
from asyncsgd.backends.host import SignsOfLife, rendezvous_for_election
from asyncsgd.backends.launch import Launch, PlaceOfHost, wait_for_new_start
from asyncsgd.backends.link import Agreed, Claim
from asyncsgd.backends.token import token_of
from asyncsgd.errors import RunError, UsageError, reason
from asyncsgd.records.console import say
from asyncsgd.records.run_folder import write_text
from asyncsgd.run.choose_folder import goes_on, samples_of_checkpoint
from asyncsgd.run.run import Run


class Led(Struct, frozen=True, forbid_unknown_fields=True):
    """Who led a run when this host took part last."""

    rendezvous: str
    """The ``--rdzv-id`` of torchrun."""
    host: str
    """The name of the host that led."""
    num_samples: int
    """The samples of the checkpoint from which that host went on."""


def agreed_launch(run: Run, launch: Launch, path: Path, stop: Callable[[], None]) -> Launch:
    """Agree with the other hosts who leads, and return the launch with the numbers that follow from it.

    Args:
        run: the run, not prepared.
        launch: that of the first rank of a host, by torchrun.
        path: the folder that the run has, or would have, on this host.
        stop: raises when the user has asked to stop.

    Raises:
        UsageError: if what this host knows of the run cannot be read or written.
        RunError: if the run lies on a host that is not here, or a host is gone.
    """
    rendezvous = os.environ["TORCHELASTIC_RUN_ID"]
    note = path.with_name(f"{path.name}.led.json")
    claim = _claim_of(run, launch, path, _read(note, rendezvous))
    output = run.output
    try:
        agreed = election.agree(
            int(os.environ["GROUP_RANK"]),
            int(os.environ["GROUP_WORLD_SIZE"]),
            claim,
            rendezvous_for_election(token_of(output)),
            output.interface,
            SignsOfLife.of(output.worker_deadline).deadline,
            stop,
            say,
        )
    except RunError:
        wait_for_new_start(launch)
        raise
    try:
        if agreed.number == 0:
            note.unlink(missing_ok=True)
        else:
            led = Led(rendezvous, agreed.leader_name, agreed.num_samples)
            note.parent.mkdir(parents=True, exist_ok=True)
            write_text(note, msgspec.json.encode(led).decode())
    except OSError as error:
        raise UsageError(f"{note} cannot be written ({reason(error)}); type another --run-dir") from error
    if agreed.number == 0:
        say(_line_of(agreed, launch))
        if agreed.note:
            say(f"note   {agreed.note}")
    place = PlaceOfHost(agreed.number, agreed.num_hosts, agreed.leader)
    return dataclasses.replace(launch, rank=agreed.first, agreed=place)


def _claim_of(run: Run, launch: Launch, path: Path, led: Led | None) -> Claim:
    """Return the claim of this host, which says what it has of the run. Its address is not known yet."""
    num_samples = None
    with contextlib.suppress(UsageError):  # the folder holds no run that can be read
        if goes_on(path, run):
            num_samples = samples_of_checkpoint(path)
    before = led or Led("", "", 0)
    return Claim(socket.gethostname(), launch.ranks_here, "", num_samples, before.host, before.num_samples)


def _read(note: Path, rendezvous: str) -> Led | None:
    """Who led the run of this rendezvous; None where this host took no part in it, or led itself."""
    try:
        led = msgspec.json.decode(note.read_bytes(), type=Led)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{note} cannot be read ({error}); remove it") from error
    return led if led.rendezvous == rendezvous else None


def _line_of(agreed: Agreed, launch: Launch) -> str:
    """The line in which the leader tells the user which hosts are here."""
    hosts = "1 host" if agreed.num_hosts == 1 else f"{agreed.num_hosts} hosts"
    return (
        f"hosts  {hosts} now, for at most {launch.num_workers} workers; when one comes, all go on from a checkpoint "
        f"with it"
    )
