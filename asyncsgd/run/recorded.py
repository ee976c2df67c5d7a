"""What a finished run says of its end: the summary that a replay is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.run import runtimes
from asyncsgd.settings.yaml_reader import read_of_run


def summary_to_replay(folder: Path) -> dict[str, Any]:
    """The summary of a run that can be replayed.

    Raises:
        UsageError: for a run that cannot, by name and with the reason.
    """
    summary = read_of_run(folder, "summary.json")
    mode = summary.get("mode")
    if refused := next((kind.not_replayed for kind in runtimes.KINDS if kind.mode == mode), ""):
        raise UsageError(f"a run of mode {mode} cannot be replayed: {refused}")
    if not isinstance(summary.get("parameters_sha256"), str):
        raise UsageError(f"the run in {folder} is {summary.get('status')} and has no parameters_sha256 to compare with")
    return summary


def shorter_than_run(summary: Mapping[str, Any], num_samples: int) -> str:
    """How the end of a replayed log differs from the run's summary; empty if it does not differ."""
    recorded = summary.get("num_samples")
    if recorded is not None and num_samples != recorded:
        return f"the log ends after {num_samples} samples, the run had {recorded}"
    return ""
