"""The machine of a run: its software, its cores, and what the run and others made of them meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from asyncsgd import __version__
from asyncsgd.extensions import imported
from asyncsgd.records.events import Evaluation, Record, Resumed

USAGE = "usage.jsonl"
SECONDS = 1.0
LOOKS_A_RUN = 600
"""A look comes after a second, and later after this part of the run so far, so that a file does not grow for ever."""


def describe_environment(threads: int, num_workers: int) -> dict[str, Any]:
    """Versions, commit and threads of this run, and what installed packages have brought into this process; no host
    name, user name or path.
    """
    from importlib import metadata  # it takes as long as all of --help's parser

    versions = {"asyncsgd": __version__}
    for package in ("torch", "transformers", "tokenizers", "datasets", "numpy", "scipy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    described: dict[str, Any] = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "platform": sys.platform,
        "versions": versions,
        **_commit(),
        "threads_per_worker": threads,
        "num_workers": num_workers,
        "oversubscription": num_workers * threads / available_cores(),
    }
    if imported():
        described["extensions"] = imported()
    return described


def _commit() -> dict[str, str | bool | None]:
    """Of this code; None where git is not there, and in an installation without its repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "modified": None}
    return {"commit": said.removesuffix("-dirty"), "modified": said.endswith("-dirty")}


def available_cores() -> int:
    """Cores this process may use (its affinity mask where the system has one)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class MachineWatch:
    """What a run and others make of the machine. Call it with each record of the run, all of whose processes descend
    from `root`, itself among them.

    It looks at every evaluation, when nobody trains, and in a thread about every second, where there is a folder. Each
    look of the thread is a line of ``usage.jsonl``::

        {"seconds": 12.0, "train_seconds": 9.1, "machine": 1.9, "processes": {"leader": [0.1, 4.1e8]}, "gpus": []}

    `machine` and the first number of a process are busy cores since the look before; the second is the bytes of its
    resident set. A GPU has its utilisation (the share of time in which something ran on it) and the bytes in use; it is
    seen with the extra `usage` (nvidia-ml-py)."""

    def __init__(self, folder: Path | None, root: int) -> None:
        self._folder = folder
        self._root = root
        self._resumed = False
        self._train_seconds = 0.0
        self._evaluations: list[tuple[float, ...]] = []
        """`_seconds` at the first and the last."""
        self._processes: dict[str, psutil.Process] = {}
        self._rows: list[dict[str, Any]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_regularly, name="usage", daemon=True)

    def __call__(self, record: Record) -> None:
        self._train_seconds = record.train_seconds
        self._resumed |= isinstance(record, Resumed)
        if isinstance(record, Evaluation):
            self._evaluations[1:] = [self._seconds()]

    def _seconds(self) -> tuple[float, ...]:
        """Seconds of all cores since the machine started: of the run's processes, of all programs, of other machines on
        the same hardware, and all there were."""
        times = psutil.cpu_times()._asdict()
        own = 0.0
        total = sum(seconds for kind, seconds in times.items() if not kind.startswith("guest"))  # they are in user
        stolen = times.get("steal", 0.0)
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._root)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    own += sum(process.cpu_times()[:4])  # its own and those of its children that have ended
        return own, total - times["idle"] - times.get("iowait", 0.0) - stolen, stolen, total

    def load(self) -> dict[str, float] | None:
        """The cores of the leader's host, and the shares of their time, from the end of the first evaluation to the end
        of the last, of the run, of others, and of other machines. None in a run without training, or resumed."""
        if len(self._evaluations) < 2 or self._resumed:
            return None
        own, busy, stolen, total = (last - first for first, last in zip(*self._evaluations, strict=True))
        if total <= 0:
            return None
        own = min(total, own)  # the seconds of the machine and of a process are counted in different ways
        others = max(0.0, busy - own)
        return {
            "cores": psutil.cpu_count() or 1,
            "own_share": own / total,
            "others_share": others / total,
            "stolen_share": stolen / total,
        }

    def start(self) -> None:
        self.follow("leader", os.getpid())
        if self._root != os.getpid():  # torchrun has started other ranks beside this process
            ranks: list[psutil.Process] = []
            with contextlib.suppress(psutil.Error):
                ranks = psutil.Process(self._root).children()
            for process in ranks:
                with contextlib.suppress(psutil.Error):  # it may have ended
                    if process.pid != os.getpid() and "RANK" in (environment := process.environ()):
                        self.follow(f"worker {environment['RANK']}", process.pid)
        if self._folder is not None:
            self._thread.start()

    def follow(self, name: str, pid: int | None) -> None:
        """Look at the process `pid` too, until it has ended."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            process.cpu_percent()  # the next call tells what was used since this one
            self._processes[name] = process

    def kill_others(self) -> None:
        """End all processes that are followed, this one excepted, at once, also those that are stopped."""
        for process in list(self._processes.values()):
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def finish(self) -> dict[str, Any] | None:
        """Stop looking; means over the looks, and peaks, for the summary. None where there was none."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(SECONDS)
        rows = list(self._rows)
        mean = statistics.fmean
        if not rows:
            return None
        names = dict.fromkeys(name for row in rows for name in row["processes"])
        cores = {}
        for name in names:
            cores[name] = mean(row["processes"].get(name, (0.0,))[0] for row in rows)
        gpus = []
        for looks in zip(*(row["gpus"] for row in rows), strict=True):
            utilisation = mean(look["utilisation"] for look in looks)
            gpus.append({"utilisation": utilisation, "peak_bytes": max(look["bytes"] for look in looks)})
        machine_cores = mean(row["machine"] for row in rows)
        return {"looks": len(rows), "machine_cores": machine_cores, "cores": cores, "gpus": gpus}

    def _look_regularly(self) -> None:
        began = time.monotonic()
        gpus = _gpus()
        psutil.cpu_percent()
        with contextlib.suppress(Exception):  # whatever a full disk or a library raises is no reason to disturb a run
            assert self._folder is not None
            while not self._over.wait(max(SECONDS, (time.monotonic() - began) / LOOKS_A_RUN)):
                processes = {}
                for name, process in list(self._processes.items()):
                    with contextlib.suppress(psutil.Error):  # it has ended
                        processes[name] = (process.cpu_percent() / 100.0, process.memory_info().rss)
                row = {
                    "seconds": round(time.monotonic() - began, 3),
                    "train_seconds": self._train_seconds,
                    "machine": psutil.cpu_percent() * (psutil.cpu_count() or 1) / 100.0,
                    "processes": processes,
                    "gpus": gpus(),
                }
                self._rows.append(row)
                with open(self._folder / USAGE, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


def _gpus() -> Callable[[], list[dict[str, float]]]:
    """What looks at each GPU through NVIDIA's library; it sees none where that is not there."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # not installed, no driver, no permission
        return list
    share = pynvml.nvmlDeviceGetUtilizationRates
    memory = pynvml.nvmlDeviceGetMemoryInfo
    return lambda: [{"utilisation": share(gpu).gpu / 100.0, "bytes": memory(gpu).used} for gpu in gpus]
