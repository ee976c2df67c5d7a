"""What `faults` and `resume` share: commands that are found again by a mark, and what they leave behind. Linux only."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXPERIMENTS = Path(__file__).resolve().parents[1]
PATIENCE = 300.0
"""Seconds for what is no promise: to come to the moment, to replay."""
WORDS = ("alpha", "beta", "gamma", "worker", "server", "gradient", "update", "reads", "writes", "stale", "fresh")


def living(mark: str) -> list[int]:
    """Every living process with `mark`, NAME=VALUE, in its environment, in the order they were started."""
    marked = [int(name) for name in os.listdir("/proc") if name.isdigit() and mark in words_of(name, "environ")]
    stats = {pid: words_of(pid, "stat") for pid in marked}
    return [pid for _, pid in sorted((int(stat[19]), pid) for pid, stat in stats.items() if stat and stat[0] != "Z")]


def words_of(pid: int | str, what: str) -> list[str]:
    """The entries of /proc/PID/environ or cmdline, or of stat from the state on; empty for a process that is gone."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
        return text.rpartition(")")[2].split() if what == "stat" else text.split("\0")
    return []


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The records of an events.jsonl, and which of its lines, counted from the end (-1), are damaged."""
    records, damaged = [], []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, -len(lines)):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("torn")
            records.append(dict(json.loads(line)))
        except ValueError:
            damaged.append(number)
    return records, damaged


def replay(path: Path, cache: Path) -> tuple[bool, str]:
    """Whether a replay of the run at `path` ends at the same parameters, and the last thing it says."""
    words = [EXPERIMENTS / "replay.py", path, "--cache-dir", cache]
    try:
        done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return False, f"not done after {PATIENCE:.0f} s"
    return done.returncode == 0, [f"exit code {done.returncode}", *(done.stdout + done.stderr).splitlines()][-1]
