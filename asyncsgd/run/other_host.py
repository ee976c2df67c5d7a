"""What the first rank of another host does in an asynchronous run: have the same run, and start workers for it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from typing import Any, NoReturn

from asyncsgd.backends.copies import listed
from asyncsgd.backends.hosts import Host, Member
from asyncsgd.backends.launch import ChildProcesses, Launch, end_with_launcher
from asyncsgd.backends.link import Begin, Prepared, Refused
from asyncsgd.backends.token import token_of
from asyncsgd.backends.worker_main import serve
from asyncsgd.core.signals import NUMBERS
from asyncsgd.errors import RunError, UsageError
from asyncsgd.records.console import say
from asyncsgd.run.execute import found_by, with_found
from asyncsgd.run.finish import began_from, began_with
from asyncsgd.run.run import Run
from asyncsgd.run.written import values_of
from asyncsgd.worker.profile import hardware


def begin_of(run: Run, facts: Mapping[str, Any]) -> Begin:
    """What rank 0 tells the other hosts of a prepared run.

    Args:
        facts: of `began_with`.
    """
    folders = tuple(listed(path) for path in run.task.folders())
    found = found_by(run.task) if folders else {}
    return Begin(_settings_of(run), began_from(run, facts), found, folders, run.micro_batches, run.moving)


def follow_leader(run: Run, launch: Launch, context: ForkServerContext) -> NoReturn:
    """Take part in the run that rank 0 on another host leads, and end the process.

    Args:
        run: as this host has understood it; not prepared.
        context: a fork server.
    """
    end_with_launcher(leads=False)
    place = Host.of_torchrun(launch)
    last = place.first + place.num_workers - 1
    workers = f"worker {last}" if last == place.first else f"workers {place.first} to {last}"
    say(f"host {place.number} of {place.num_hosts}: {workers}; {place.leader} leads, and has the run's folder")
    try:
        member = Member(place, token_of(run.output), run.output.interface, hardware(run.device))
        notice = member.told()
        try:
            check_settings(run, notice)
            places = member.places_of(notice.folders, run.cache, say)
            run = prepared_as(run, notice, places)
        except (RunError, UsageError, OSError, ValueError) as error:
            member.answer(Refused(str(error)))
            raise RunError(str(error)) from error
        for number in NUMBERS:
            if number != signal.SIGTERM:
                signal.signal(number, signal.SIG_IGN)
        with ChildProcesses(context) as processes:
            member.answer(Prepared())
            for worker in range(place.first, last + 1):
                processes.start(worker, serve, run.at(worker), member.meeting, worker)
            member.stay()
    except RunError as error:
        print(f"host {place.number}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # gloo may still wait for somebody who is gone
    sys.stdout.flush()
    os._exit(0)


def check_settings(run: Run, notice: Begin) -> None:
    """Refuse another run than that of rank 0.

    Raises:
        RunError: naming what differs.
    """
    ours = _settings_of(run)
    different = [
        f"{name} {notice.settings.get(name)} -> {ours.get(name)}"
        for name in {**notice.settings, **ours}
        if notice.settings.get(name) != ours.get(name)
    ]
    if different:
        raise RunError(f"it was started with other settings ({', '.join(different)}); type the same on every host")


def prepared_as(run: Run, notice: Begin, places: Mapping[str, str]) -> Run:
    """This host's run, prepared, if it begins as that of rank 0.

    Args:
        places: of the folders that rank 0 has prepared, on this host.

    Raises:
        RunError: naming what differs.
        UsageError: if this host cannot prepare it.
    """
    if notice.folders:
        task = with_found(run.task, notice.found).in_folders(places)
        run = dataclasses.replace(run, task=task, moving=notice.moving)
    else:
        run.task.check_names()
        run = dataclasses.replace(run.prepared(), moving=notice.moving)
    began = began_from(run, began_with(run, run.flat()))
    for what, there in notice.began_from.items():
        if began.get(what) != there:
            raise RunError(
                f"it has other {what} than rank 0 ({str(there)[:12]} -> {str(began.get(what))[:12]}); copy them from "
                f"the host of rank 0"
            )
    return run.with_parts(notice.micro_batches)


def _settings_of(run: Run) -> dict[str, Any]:
    """As JSON brings them to the other side; the parts of a batch are found out by rank 0."""
    values: dict[str, Any] = json.loads(json.dumps(values_of(run)))
    del values["micro_batches"]
    return values
