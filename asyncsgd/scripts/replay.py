"""Replay a recorded run in one process and say whether it ends at the same parameters, bit for bit.

    python -m asyncsgd replay runs/stilt_mlm-async-w4-s0-3f9a1c

Exit code 0 when the parameters are identical, 1 when they are not (naming the update at which the runs part), 2 for
a run that cannot be replayed. ``--to VERSION`` stops there and saves that version's model, for finding where a loss
went wrong. It begins at the last checkpoint before that version, where there is one that a replay can begin at."""

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
    parser.add_argument(
        "--check-every", type=int, default=1, metavar="K", help="compare the loss of every K-th gradient (default 1)"
    )
    parser.add_argument("--to", type=int, metavar="VERSION", help="stop at this version and save its model")
    parser.add_argument("--out", type=Path, help="folder for the model of --to (default RUN/model-at-VERSION)")
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    given = parser.parse_args(argv)
    given.run_dir = find_run(given.run)
    return replay(given)


def replay(arguments: argparse.Namespace) -> int:
    if arguments.check_every < 1:
        raise UsageError(f"--check-every must be 1 or more, got {arguments.check_every}")
    summary = summary_to_replay(arguments.run_dir)
    settings = read_of_run(arguments.run_dir, "settings.yaml")
    if "simulate" in settings:
        return replay_simulation(arguments, settings["simulate"], summary)
    if "task_class" in settings:
        return replay_from_python(arguments, settings, summary)

    from asyncsgd.replaying import PreparedReplay, experiment_of_run, nearest_checkpoint
    from asyncsgd.runtime.log import read_log
    from asyncsgd.scripts.task import class_named

    kind = None if arguments.task is None else class_named(arguments.task)
    experiment = experiment_of_run(arguments.run_dir, arguments.cache_dir, kind)
    records = read_log(arguments.run_dir / "events.jsonl")
    state = None
    if arguments.to is not None and (nearest := nearest_checkpoint(arguments.run_dir, arguments.to, records)):
        found, state, records = nearest
        print(f"from       checkpoint {found.checkpoint.name}, version {found.checkpoint.version}")
    prepared = PreparedReplay(experiment, records, arguments.check_every, state)
    prepared.check_data(summary)
    difference = prepared.run(arguments.to)
    if not agrees(difference, prepared.version, prepared.num_checked):
        return 1
    if arguments.to is not None:
        if prepared.version < arguments.to:
            raise UsageError(f"the run has no version {arguments.to}; its last one is {prepared.version}")
        if prepared.version > arguments.to:
            raise UsageError(
                f"version {arguments.to} lies between two steps of one arrival; type --to {prepared.version}, after it"
            )
        folder = arguments.out or arguments.run_dir / f"model-at-{arguments.to}"
        prepared.save(folder)
        print(f"saved      the model of version {arguments.to} in {folder}")
        return 0
    return verdict(summary, prepared.parameters_sha256, prepared.num_samples, prepared.version)


def replay_from_python(arguments: argparse.Namespace, settings: dict[str, Any], summary: dict[str, Any]) -> int:
    """A run of `asyncsgd.train`."""
    from asyncsgd import api
    from asyncsgd.scripts.task import class_named

    if arguments.to is not None or arguments.out is not None or arguments.check_every != 1:
        raise UsageError("--to, --out and --check-every are for runs of a script; drop them")
    task: Any = None if arguments.task is None else class_named(arguments.task)
    module, name = settings["task_class"].removeprefix("__main__").split(":")
    if task is None and not module:
        raise UsageError(f"the run's task was defined in the script that was run; type --task FILE:{name}")
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in settings["task_fields"].items()}
    done = api.replay(arguments.run_dir, None if task is None else task(**fields), cache=arguments.cache_dir)
    print(f"updates    {done.num_updates} replayed, {done.num_checked} losses compared")
    print(f"recorded   {summary['parameters_sha256']}\nreplayed   {done.parameters_sha256}")
    print("identical" if done.identical else f"different  {done.difference}")
    return 0 if done.identical else 1


def replay_simulation(arguments: argparse.Namespace, settings: dict[str, Any], summary: dict[str, Any]) -> int:
    """A run of simulate.py: the same server and rule, fed the log's arrivals."""
    from asyncsgd.runtime.log import read_log
    from asyncsgd.simulation.simulate import SimulationSettings, vector_sha256

    if arguments.to is not None or arguments.out is not None:
        raise UsageError("--to and --out save a model, and a closed-form problem has none; drop them")
    records = read_log(arguments.run_dir / "events.jsonl")
    replaying, server = SimulationSettings(**settings).replay(records, arguments.check_every)
    if not agrees(replaying.run(), server.version, replaying.num_checked):
        return 1
    return verdict(summary, vector_sha256(server.parameters), server.num_samples, server.version)


def agrees(difference: Any, version: int, num_checked: int) -> bool:
    """Say how far the replay came and where it parts from the log, if it does."""
    print(f"updates    {version} replayed, {num_checked} losses compared")
    if difference is None:
        return True
    say_different(difference.message, difference.version)
    return False


def verdict(summary: dict[str, Any], replayed: str, num_samples: int, version: int) -> int:
    """Compare what the whole log came to with the run's summary; the exit code."""
    print(f"recorded   {summary['parameters_sha256']}\nreplayed   {replayed}")
    if different := difference_at_end(summary, replayed, num_samples):
        say_different(different, version)
        return 1
    print("identical")
    return 0


def say_different(message: str, version: int) -> None:
    print(f"different  {message}")
    print(f"           the runs part at update {version} or before it")
