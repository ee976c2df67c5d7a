"""Replay a recorded run in one process and say whether it ends at the same parameters, bit for bit.

    python -m asyncsgd replay runs/stilt_mlm-async-w4-s0-3f9a1c

The last line is one of

    identical                                      all bits are equal
    equal to rounding (...)                        other bits, in another environment, as far as rounding explains
    equal to rounding up to update U of N (...)    the same, up to where rounding alone parts two runs
    different at update U or before it: ...        not the run

Exit code 0 for the first three, 1 for a run that is different, 2 for a run that cannot be replayed. ``--to VERSION``
stops there and saves that version's model, for finding where a loss went wrong."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsgd.errors import UsageError
from asyncsgd.records.run_folder import find_run
from asyncsgd.run.recorded import summary_to_replay
from asyncsgd.scripts.base import add_task_flag

if TYPE_CHECKING:  # it imports torch
    from asyncsgd.run.replay import Replayed


def run(argv: list[str], prog: str) -> int:
    parser = argparse.ArgumentParser(prog=prog, description="Replay a recorded run, bit for bit.", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="a run of mode async or single: its folder, how it begins, or last")
    add_task_flag(parser)
    parser.add_argument("--to", type=int, metavar="VERSION", help="stop at this version and save its model")
    parser.add_argument("--out", type=Path, help="folder for the model of --to (default RUN/model-at-VERSION)")
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    given = parser.parse_args(argv)
    if given.to is not None and given.to < 0:
        raise UsageError(f"--to must be at least 0, the version before the first update, got {given.to}")
    folder = find_run(given.run)
    summary = summary_to_replay(folder)
    print(f"run        {folder}", flush=True)  # what follows may take as long as the run took
    if given.to is not None:
        return save_version(folder, summary, given)
    from asyncsgd.api import replay
    from asyncsgd.scripts.task import class_given

    found = replay(folder, class_given(given.task), cache=given.cache_dir)
    return _said(found, summary["parameters_sha256"])


def save_version(folder: Path, summary: dict[str, Any], given: argparse.Namespace) -> int:
    """Replay up to a version and save its model; the exit code."""
    from asyncsgd.run.replay import PreparedReplay, replayed
    from asyncsgd.run.written import Given, run_beside
    from asyncsgd.scripts.task import class_given

    run = run_beside(folder, Given(class_given(given.task), cache=given.cache_dir))
    version = given.to
    out = given.out or folder / f"model-at-{version}"
    prepared = PreparedReplay(run, folder, summary)
    found, replay = replayed(prepared, version)
    code = _said(found)
    if code != 0:
        return code
    reached = found.num_updates
    if reached < version:
        raise UsageError(f"the run has no version {version}; its last one is {reached}")
    if reached > version:
        raise UsageError(f"version {version} lies between two steps of one arrival; type --to {reached}, after it")
    prepared.save(replay, out)
    print(f"saved      the model of version {version} in {out}")
    return 0


def _said(found: Replayed, recorded_sha256: str | None = None) -> int:
    """Say how the replay ended; the exit code."""
    print(f"updates    {found.num_updates} replayed, {found.num_checked} losses compared")
    if recorded_sha256 is not None:
        print(f"recorded   {recorded_sha256}\nreplayed   {found.parameters_sha256}")
    print(found.words)
    return 1 if found.difference else 0
