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
from asyncsgd.records.run_folder import find_run


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m asyncsgd replay", description="Replay a recorded run, bit for bit.", allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="a run of mode async or single: its folder, how it begins, or last")
    parser.add_argument("--task", metavar="MODULE:CLASS", help="of the run, where it is none of the library's own")
    parser.add_argument("--to", type=int, metavar="VERSION", help="stop at this version and save its model")
    parser.add_argument("--out", type=Path, help="folder for the model of --to (default RUN/model-at-VERSION)")
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    given = parser.parse_args(argv)
    folder = find_run(given.run)
    summary, settings = summary_to_replay(folder), read_of_run(folder, "settings.yaml")
    if given.to is not None:
        return save_version(folder, given.to, given.out or folder / f"model-at-{given.to}", settings, given)
    if "simulate" in settings:
        return replay_simulation(folder, settings["simulate"], summary)

    from asyncsgd.api import replay

    done = replay(folder, _task_of(given.task, settings), cache=given.cache_dir)
    return said(summary, done.num_updates, done.num_checked, done.parameters_sha256, done.difference)


def _task_of(name: str | None, settings: dict[str, Any]) -> Any:
    """The task that the user names; None: the run's own can be imported."""
    from asyncsgd.scripts.task import class_named

    if name is None:
        module, _, class_name = settings.get("task_class", "").partition(":")
        if module == "__main__":
            raise UsageError(f"the run's task was defined in the script that was run; type --task FILE:{class_name}")
        return None
    fields = settings.get("task_fields", {}).items()
    kind: Any = class_named(name)
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields})


def save_version(folder: Path, version: int, out: Path, settings: dict[str, Any], given: argparse.Namespace) -> int:
    """Replay up to a version and save its model; the exit code."""
    from asyncsgd.replaying import PreparedReplay, run_again
    from asyncsgd.runtime.replay import read_log

    if {"simulate", "task_class"} & settings.keys():
        raise UsageError("--to saves a model of a script's run of a task; drop it")
    task = _task_of(given.task, settings)
    run = run_again(folder, given.cache_dir, None if task is None else type(task))
    prepared = PreparedReplay(run, read_log(folder / "events.jsonl"), read_of_run(folder, "summary.json"))
    difference, reached, checked = prepared.replay.run(version), prepared.server.version, prepared.replay.num_checked
    if difference:
        return said({}, reached, checked, "", difference.message)
    print(f"updates    {reached} replayed, {checked} losses compared")
    if reached < version:
        raise UsageError(f"the run has no version {version}; its last one is {reached}")
    if reached > version:
        raise UsageError(f"version {version} lies between two steps of one arrival; type --to {reached}, after it")
    prepared.save(out)
    print(f"saved      the model of version {version} in {out}")
    return 0


def replay_simulation(folder: Path, settings: dict[str, Any], summary: dict[str, Any]) -> int:
    """A run of simulate.py: the same server and rule, fed the log's arrivals."""
    from asyncsgd.runtime.replay import read_log
    from asyncsgd.simulation.settings import SimulationSettings
    from asyncsgd.simulation.simulate import replay_of, vector_sha256

    replaying, server = replay_of(SimulationSettings(**settings), read_log(folder / "events.jsonl"))
    difference = replaying.run()
    sha256 = vector_sha256(server.parameters)
    what = difference_at_end(summary, sha256, server.num_samples) if difference is None else difference.message
    return said(summary, server.version, replaying.num_checked, sha256, what)


def said(summary: dict[str, Any], version: int, num_checked: int, replayed: str, difference: str) -> int:
    """Say how the replay ended; the exit code."""
    print(f"updates    {version} replayed, {num_checked} losses compared")
    if summary:
        print(f"recorded   {summary['parameters_sha256']}\nreplayed   {replayed}")
    if difference:
        print(f"different  {difference}\n           the runs part at update {version} or before it")
        return 1
    print("identical")
    return 0
