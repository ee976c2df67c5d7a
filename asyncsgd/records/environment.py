"""The software of a run and the cores it may use: versions, commit. Standard library only."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncsgd import __version__


def describe_environment(threads: int, num_workers: int) -> dict[str, Any]:
    """Versions, commit and threads of this run; no host name, user name or path."""
    packages = ("torch", "transformers", "tokenizers", "datasets", "numpy", "scipy")
    versions = {"asyncsgd": __version__}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "platform": sys.platform,
        "versions": versions,
        **_commit(),
        "threads_per_worker": threads,
        "num_workers": num_workers,
        "oversubscription": num_workers * threads / available_cores(),
    }


def available_cores() -> int:
    """Cores this process may use (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> dict[str, Any]:
    def git(*arguments: str) -> str:
        here = Path(__file__).resolve().parent
        return subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "modified": None}  # installed without its repository, or git is not there


def cpu_model() -> str | None:
    """The processor's name; None where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return None  # not Linux
    return None
