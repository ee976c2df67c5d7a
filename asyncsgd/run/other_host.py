"""What ranks other than rank 0 do: synchronous ranks that torchrun has started, and the first of each other host in an
asynchronous run, which starts workers. Each other host has the same run as rank 0, or it is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from asyncsgd.backends.copies import listed
from asyncsgd.backends.host import SignsOfLife, ThisHost
from asyncsgd.backends.launch import ChildProcesses, Launch, World, end_with_launcher, wait_for_new_start
from asyncsgd.backends.link import Begin, Prepared, Refused
from asyncsgd.backends.member import Member
from asyncsgd.backends.mirror import Keeper
from asyncsgd.backends.rank_main import run_rank
from asyncsgd.backends.token import TRUSTED, token_of
from asyncsgd.backends.worker_main import run_worker
from asyncsgd.core import checkpoints
from asyncsgd.core.checkpoints import Found
from asyncsgd.core.signals import NUMBERS
from asyncsgd.errors import RunError, UsageError
from asyncsgd.records.console import say
from asyncsgd.run.choose_folder import folder_of_copies, newest_set_aside
from asyncsgd.run.execute import Notice
from asyncsgd.run.finish import comparable, facts_at_start, hashes_at_start
from asyncsgd.run.found import Received, found_by, with_found
from asyncsgd.run.run import Run
from asyncsgd.run.written import Given, run_of_values, values_of
from asyncsgd.settings.yaml_reader import TASK
from asyncsgd.worker.profile import hardware


def begin_of(run: Run, facts: Mapping[str, Any], resume: Found | None = None) -> Begin:
    """Return the message in which rank 0 tells the other hosts of a prepared run.

    Args:
        facts: see `asyncsgd.run.finish.facts_at_start`.
        resume: the checkpoint from which the run goes on. Synchronous ranks read it too. None: the run is new.
    """
    folders = [listed(path) for path in run.task.folders()]
    found = found_by(run.task) if folders else {}
    if resume is not None and not run.runtime.has_server:
        state = f"{checkpoints.FOLDER}/{resume.checkpoint.name}.pt"
        folders.append(listed(str(resume.folder.resolve()), [state]))
    return Begin(
        _settings_of(run),
        hashes_at_start(run, facts),
        hardware(run.device),
        found,
        tuple(folders),
        run.micro_batches,
        run.changing_buffers,
        run.output.mirror,
    )


_LEFT_THERE = (
    "its folder lies on that host. If it has a checkpoint, the run goes on from there with --resume FOLDER; if that "
    "host is not to be had, nothing is left of it"
)


_GOES_ON = (
    "the hosts that are left go on from the newest checkpoint that lies on one of them, when torchrun starts them "
    "again (--max-restarts) or the same command is typed again"
)


class Here(Struct, frozen=True, forbid_unknown_fields=True):
    """What the first rank of a host tells its other ranks."""

    settings: dict[str, Any]
    """The settings of rank 0, by name."""
    places: dict[str, str]
    """Path of a folder on the host of rank 0 -> its path on this host."""


def follow_as_host(
    run: Run,
    launch: Launch,
    context: ForkServerContext,
    *,
    goes_on: Callable[[Path], str],
    typed: Collection[str] = frozenset(),
) -> NoReturn:
    """Take part in the run that rank 0 on another host leads, and end the process.

    Args:
        run: the run as this host has understood it; not prepared.
        context: a fork server.
        goes_on: says with what the run goes on from the folder of a mirror.
        typed: see `as_led`.
    """
    end_with_launcher(leads=False)
    this_host = ThisHost.of_torchrun(launch)
    _introduce(this_host, "worker")
    try:
        member = _member(run, this_host, token_of(run.output))
        notice = member.wait_for_begin()
        try:
            _check_same_mirror(run, notice)
            run = as_led(run, notice.settings, typed)
            places = member.fetch_folders(notice.folders, run.cache, say)
            run = prepared_as(run, notice, places)
            keeper = None
            if notice.mirror == this_host.number:
                keeper = _keeper_of(run, member, Received(notice.found, places))
        except (RunError, UsageError, OSError, ValueError) as error:
            member.answer(Refused(str(error)))
            raise RunError(str(error)) from error
        for number in NUMBERS:
            if number != signal.SIGTERM:
                signal.signal(number, signal.SIG_IGN)
        with ChildProcesses(context) as processes:
            member.answer(Prepared())
            for worker in this_host.workers:
                processes.start(worker, run_worker, run.as_sent_to(worker), member.rendezvous, worker)
            if keeper is None:
                is_done = member.stay(lambda: _GOES_ON if launch.is_elastic else _LEFT_THERE, processes.how_it_ended)
            else:
                keeper.start()
                is_done = member.stay(
                    lambda: _GOES_ON if launch.is_elastic else left_here(keeper, goes_on), processes.how_it_ended
                )
        if launch.is_elastic and not is_done:
            raise RunError(f"{this_host.leader}, which leads, has stopped the run before it was done")
    except RunError as error:
        wait_for_new_start(launch)
        print(f"host {this_host.number}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # gloo may still wait for somebody who is gone
    sys.stdout.flush()
    os._exit(0)


def _keeper_of(run: Run, member: Member, received: Received) -> Keeper:
    """Make the folder in which this host keeps copies of the checkpoints of a run.

    Raises:
        UsageError: if something else lies there, or it cannot be written.
    """
    path, events = folder_of_copies(run)
    if received.found:
        received.write(path)
    say(f"host {member.this_host.number}: keeps a copy of each checkpoint in {path}")
    return Keeper(member.mirror(), path, events)


def left_here(keeper: Keeper, goes_on: Callable[[Path], str]) -> str:
    """The words in which a mirror says what is left of a run."""
    if keeper.last is None:
        earlier = newest_set_aside(keeper.folder)
        kept = "" if earlier is None else f"; an earlier copy lies in {earlier}"
        return f"{_LEFT_THERE}. No checkpoint had come to {keeper.folder} yet{kept}"
    return (
        f"a copy of it up to checkpoint {keeper.last} lies here, and goes on on this host with {goes_on(keeper.folder)}"
    )


def follow_as_rank(
    run: Run, launch: Launch, *, goes_on: Callable[[Path], str], typed: Collection[str] = frozenset()
) -> NoReturn:
    """Be a rank other than 0 of synchronous ranks: wait for what rank 0 has prepared, do its part, and end the process.

    Args:
        run: the run as this rank has understood it; not prepared.
        goes_on: see `follow_as_host`.
        typed: see `as_led`.
    """
    end_with_launcher(leads=False)
    world = World.of_torchrun()
    places: Mapping[str, str] = {}
    keeper = None
    left = None
    if launch.several_hosts and launch.rank != launch.local_rank:
        here, keeper = _told_on_this_host(run, launch, world, typed)
        run = as_led(run, here.settings, typed)
        places = here.places
        if launch.local_rank == 0:
            left = functools.partial(_left_of_synchronous_ranks, ThisHost.of_torchrun(launch), keeper, goes_on)
    try:
        notice = msgspec.json.decode(world.get("run"), type=Notice)
        task = with_found(run.task, notice.found)
    except ValueError as error:
        raise RunError(f"the notice of rank 0 is not one: {error}; start the run again") from error
    run = dataclasses.replace(run, task=task.in_folders(places), changing_buffers=notice.changing_buffers)
    run = run.with_parts(notice.micro_batches)
    resume = None
    if notice.resume is not None:
        folder, checkpoint = notice.resume
        resume = (Path(places.get(folder, folder)), checkpoint)
    run_rank(run.as_sent_to(world.rank), resume, world, keeper=keeper, left=left)


def _left_of_synchronous_ranks(this_host: ThisHost, keeper: Keeper | None, goes_on: Callable[[Path], str]) -> str:
    """The words that another host than that of rank 0 prints where contact is lost."""
    left = _LEFT_THERE if keeper is None else left_here(keeper, goes_on)
    return f"host {this_host.number}: a rank is gone, and with it the run that {this_host.leader} leads; {left}"


def _told_on_this_host(run: Run, launch: Launch, world: World, typed: Collection[str]) -> tuple[Here, Keeper | None]:
    """Return what the ranks of another host than that of rank 0 have to know. Its first rank hears it from rank 0, sees
    to it that the folders that rank 0 has prepared are there, and tells the others. It also keeps the copies of a
    mirror.

    Raises:
        RunError: if rank 0 is gone, or this host has another run.
    """
    this_host = ThisHost.of_torchrun(launch)
    name = f"folders on host {this_host.number}"
    keeper = None
    if launch.local_rank == 0:
        _introduce(this_host, "rank")
        member = _member(run, this_host, TRUSTED)
        notice = member.wait_for_begin()
        try:
            _check_same_mirror(run, notice)
            as_led(run, notice.settings, typed)
            places = member.fetch_folders(notice.folders, run.cache, say)
            if notice.mirror == this_host.number:
                keeper = _keeper_of(run, member, Received(notice.found, places))
        except (RunError, UsageError, OSError, ValueError) as error:
            member.answer(Refused(str(error)))
            raise RunError(str(error)) from error
        world.put(name, msgspec.json.encode(Here(notice.settings, places)))
        member.answer(Prepared())
        if keeper is not None:
            keeper.start()
    return msgspec.json.decode(world.get(name), type=Here), keeper


def _check_same_mirror(run: Run, notice: Begin) -> None:
    """Refuse a host that was told of another mirror than rank 0.

    Raises:
        RunError: with what to type.
    """
    if run.output.mirror not in (None, notice.mirror):
        raise RunError(f"it was started with another --mirror than {notice.mirror}; type the same on every host")


def _introduce(this_host: ThisHost, what: str) -> None:
    """The first line that a host says."""
    first = this_host.first_worker
    last = this_host.workers[-1]
    numbers = f"{what} {last}"
    if last > first:
        numbers = f"{what}s {first} to {last}"
    name = f"host {this_host.number} of {this_host.num_hosts}"
    say(f"{name}: {numbers}; {this_host.leader} leads, and has the run's folder")


def _member(run: Run, this_host: ThisHost, token: bytes) -> Member:
    signs = SignsOfLife.of(run.output.worker_deadline, run.runtime.has_server)
    return Member(this_host, token, run.output.interface, signs, hardware(run.device))


def as_led(run: Run, settings: Mapping[str, Any], typed: Collection[str]) -> Run:
    """This host's run, if it has the settings of rank 0.

    Where it goes on from a folder that this host has no copy of, the settings that were not typed are those of rank 0.

    Args:
        run: the run as this host has understood it.
        settings: the settings of rank 0, without `micro_batches`.
        typed: the names of the settings that this host was given.

    Raises:
        RunError: naming what differs.
    """
    ours = _settings_of(run)
    folder = run.output.resume
    lacks_folder = folder is not None and not (Path(folder) / "settings.yaml").is_file()
    if lacks_folder:
        ours = {name: value for name, value in ours.items() if name in typed or name == TASK}
        ours = {**settings, **ours}
    different = [
        f"{name} {settings.get(name)} -> {ours.get(name)}"
        for name in {**settings, **ours}
        if settings.get(name) != ours.get(name)
    ]
    if different:
        raise RunError(f"it was started with other settings ({', '.join(different)}); type the same on every host")
    if lacks_folder:
        with_parts = {**settings, "micro_batches": run.micro_batches}  # a pipeline needs as many as stages
        return run_of_values(with_parts, Given(task=type(run.task)), run.output)
    return run


def prepared_as(run: Run, notice: Begin, places: Mapping[str, str]) -> Run:
    """This host's run, prepared, if it begins as that of rank 0.

    Args:
        places: path of a folder that rank 0 has prepared -> its path on this host.

    Raises:
        RunError: naming what differs.
        UsageError: if this host cannot prepare it.
    """
    if notice.found:
        task = with_found(run.task, notice.found).in_folders(places)
        run = dataclasses.replace(run, task=task, changing_buffers=notice.changing_buffers)
    else:
        run.task.check_names()
        run = dataclasses.replace(run.prepared(), changing_buffers=notice.changing_buffers)
    began = hashes_at_start(run, facts_at_start(run, run.flat()))
    compared = comparable(notice.began_from, [notice.hardware], hardware(run.device))
    for what, there in compared.items():
        if began.get(what) != there:
            raise RunError(
                f"it has other {what} than rank 0 ({str(there)[:12]} -> {str(began.get(what))[:12]}); copy them from "
                f"the host of rank 0"
            )
    return run.with_parts(notice.micro_batches)


def _settings_of(run: Run) -> dict[str, Any]:
    """The settings of a run as JSON brings them to another host. `micro_batches` is not among them, since rank 0 finds
    it out."""
    values: dict[str, Any] = json.loads(json.dumps(values_of(run)))
    del values["micro_batches"]
    return values
