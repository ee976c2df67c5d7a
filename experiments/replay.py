"""Replay a recorded run in one process and say whether it ends at the same parameters, bit for bit.

    python experiments/replay.py runs/stilt_mlm-async-w4-s0-3f9a1c

Exit code 0 when the parameters are identical, 1 when they are not (naming the update at which the runs part), 2 for
a run that cannot be replayed. ``--to VERSION`` stops there and saves that version's model, for finding where a loss
went wrong."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.modes import KINDS
from asyncsgd.settings.yaml_reader import read_yaml


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Replay a recorded run, bit for bit.", allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, help="a run folder of mode async or single")
    parser.add_argument(
        "--check-every", type=int, default=1, help="compare the loss of every K-th gradient (default 1)"
    )
    parser.add_argument("--to", type=int, help="stop at this version and save its model")
    parser.add_argument("--out", type=Path, help="folder for the model of --to (default RUN_DIR/model-at-VERSION)")
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    arguments = parser.parse_args(argv)
    try:
        return replay(arguments)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def replay(arguments: argparse.Namespace) -> int:
    if arguments.check_every < 1:
        raise UsageError(f"--check-every must be 1 or more, got {arguments.check_every}")
    summary = read_summary(arguments.run_dir)
    simulated = read_settings(arguments.run_dir).get("simulate")
    if simulated is not None:
        return replay_simulation(arguments, simulated, summary)

    from asyncsgd.replaying import PreparedReplay, experiment_of_run
    from asyncsgd.runtime.log import read_log

    experiment = experiment_of_run(arguments.run_dir, arguments.cache_dir)
    records = read_log(arguments.run_dir / "events.jsonl")
    prepared = PreparedReplay(experiment, records, arguments.check_every)
    if prepared.data_fingerprint != summary.get("data_fingerprint"):
        raise UsageError(
            f"the text is not the run's: fingerprint {prepared.data_fingerprint}, the run had "
            f"{summary.get('data_fingerprint')}; install the packages of its environment.json, or give the same file"
        )
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


def replay_simulation(arguments: argparse.Namespace, settings: dict[str, Any], summary: dict[str, Any]) -> int:
    """A run of experiments/simulate.py: the same server and rule, fed the log's arrivals."""
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
    recorded, recorded_samples = summary["parameters_sha256"], summary.get("num_samples")
    print(f"recorded   {recorded}\nreplayed   {replayed}")
    if recorded_samples is not None and num_samples != recorded_samples:
        say_different(f"the log ends after {num_samples} samples, the run had {recorded_samples}", version)
    elif recorded != replayed:
        say_different("all compared losses agree, the final parameters do not", version)
    else:
        print("identical")
        return 0
    return 1


def say_different(message: str, version: int) -> None:
    print(f"different  {message}")
    print(f"           the runs part at update {version} or before it")


def read_summary(folder: Path) -> dict[str, Any]:
    """The run's summary; refuse what cannot be replayed, by name and with the reason."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} holds no finished run (summary.json: {error}); name a folder below runs/"
        ) from error
    if not isinstance(summary, dict):
        raise UsageError(f"{folder / 'summary.json'} is damaged: it holds no keys and values; name another run")
    mode = summary.get("mode")
    if refused := next((kind.not_replayed for kind in KINDS if kind.mode == mode), ""):
        raise UsageError(f"a run of mode {mode} cannot be replayed: {refused}")
    if not isinstance(summary.get("parameters_sha256"), str):
        raise UsageError(
            f"the run in {folder} ended without parameters (status {summary.get('status')}), so there is nothing to "
            f"compare a replay with; name a run that has a parameters_sha256 in its summary.json"
        )
    return summary


def read_settings(folder: Path) -> dict[str, Any]:
    try:
        return dict(read_yaml((folder / "settings.yaml").read_text(encoding="utf-8"), "it") or {})
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{folder / 'settings.yaml'} cannot be read: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
