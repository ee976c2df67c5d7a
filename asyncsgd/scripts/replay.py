"""Replay a recorded run in one process and say whether it ends at the same parameters, bit for bit.

    python -m asyncsgd replay runs/stilt_mlm-async-w4-s0-3f9a1c

Exit code 0 when the parameters are identical, 1 when they are not (naming the update at which the runs part), 2 for
a run that cannot be replayed. ``--to VERSION`` stops there and saves that version's model, for finding where a loss
went wrong."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.recorded_run import difference_at_end, read_of_run, summary_to_replay
from asyncsgd.records.events import EVENTS
from asyncsgd.records.run_folder import find_run
from asyncsgd.scripts.base import add_task_flag


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m asyncsgd replay", description="Replay a recorded run, bit for bit.", allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="a run of mode async or single: its folder, how it begins, or last")
    add_task_flag(parser)
    parser.add_argument("--to", type=int, metavar="VERSION", help="stop at this version and save its model")
    parser.add_argument("--out", type=Path, help="folder for the model of --to (default RUN/model-at-VERSION)")
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    given = parser.parse_args(argv)
    folder = find_run(given.run)
    summary, settings = summary_to_replay(folder), read_of_run(folder, "settings.yaml")
    if given.to is not None:
        return save_version(folder, summary, given, settings)
    if "simulate" in settings:
        return replay_simulation(folder, settings["simulate"], summary)

    from asyncsgd.api import replay
    from asyncsgd.scripts.task import class_given

    done = replay(folder, class_given(given.task), cache=given.cache_dir)
    return _said(
        done.num_updates, done.num_checked, done.difference, summary["parameters_sha256"], done.parameters_sha256
    )


def save_version(folder: Path, summary: dict[str, Any], given: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Replay up to a version and save its model; the exit code."""
    from asyncsgd.replaying import PreparedReplay, run_again
    from asyncsgd.runtime.replay import read_log
    from asyncsgd.scripts.task import class_given

    if {"simulate", "task_class"} & settings.keys():
        raise UsageError("--to saves a model of a script's run of a task; drop it")
    run = run_again(folder, given.cache_dir, class_given(given.task))
    out = given.out or folder / f"model-at-{given.to}"
    prepared = PreparedReplay(run, read_log(folder / EVENTS), summary)
    difference, reached = prepared.replay.run(given.to), prepared.server.version
    code = _said(reached, prepared.replay.num_checked, difference.message if difference else "")
    if code == 0 and reached < given.to:
        raise UsageError(f"the run has no version {given.to}; its last one is {reached}")
    if code == 0 and reached > given.to:
        raise UsageError(f"version {given.to} lies between two steps of one arrival; type --to {reached}, after it")
    if code == 0:
        prepared.save(out)
        print(f"saved      the model of version {given.to} in {out}")
    return code


def replay_simulation(folder: Path, settings: dict[str, Any], summary: dict[str, Any]) -> int:
    """A run of simulate.py: the same server and rule, fed the log's arrivals."""
    from asyncsgd.runtime.replay import read_log
    from asyncsgd.simulation.settings import SimulationSettings
    from asyncsgd.simulation.simulate import replay_of, vector_sha256

    replaying, server = replay_of(SimulationSettings(**settings), read_log(folder / EVENTS))
    difference = replaying.run()
    sha256 = vector_sha256(server.parameters)
    what = difference_at_end(summary, sha256, server.num_samples) if difference is None else difference.message
    return _said(server.version, replaying.num_checked, what, summary["parameters_sha256"], sha256)


def _said(version: int, num_checked: int, difference: str, recorded: str = "", replayed: str = "") -> int:
    """Say how the replay ended; the exit code."""
    print(f"updates    {version} replayed, {num_checked} losses compared")
    if recorded:
        print(f"recorded   {recorded}\nreplayed   {replayed}")
    if difference:
        print(f"different  {difference}\n           the runs part at update {version} or before it")
    elif recorded:
        print("identical")
    return int(bool(difference))
