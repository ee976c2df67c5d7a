"""A recorded run, read to be run again: its files, whether it can be replayed, and whether a replay ends as it did."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncsgd import runtimes
from asyncsgd.errors import UsageError
from asyncsgd.settings.yaml_reader import read_yaml


def read_of_run(folder: Path, name: str) -> dict[str, Any]:
    """The keys and values of a file of a run folder, YAML or JSON.

    Raises:
        UsageError: if it cannot be read.
    """
    try:
        text = (folder / name).read_text(encoding="utf-8")
        content = read_yaml(text, name) if name.endswith(".yaml") else json.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} holds no finished run ({name}: {error}); name a folder below runs/") from error
    if not isinstance(content, dict):
        raise UsageError(f"{folder / name} is damaged: it holds no keys and values; name another run")
    return content


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


def difference_at_end(summary: Mapping[str, Any], parameters_sha256: str, num_samples: int) -> str:
    """How the end of a replayed log differs from the run's summary; empty if it does not differ."""
    recorded = summary.get("num_samples")
    if recorded is not None and num_samples != recorded:
        return f"the log ends after {num_samples} samples, the run had {recorded}"
    if parameters_sha256 != summary["parameters_sha256"]:
        return "all compared losses agree, the final parameters do not"
    return ""
