"""What a run makes of the machine while it goes on: ``usage.jsonl`` in its folder, a line for every look.

    {"seconds": 12.0, "train_seconds": 9.1, "machine": 1.9, "processes": {"leader": [0.1, 4.1e8], ...}, "gpus": [...]}

`machine` and the first number of a process are busy cores since the look before; the second is the bytes of its
resident set. A GPU has its utilisation (the share of time in which something ran on it) and the bytes in use. It needs
the extra `usage`: psutil, and nvidia-ml-py for GPUs. Without psutil nothing is looked at."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from asyncsgd.records.events import Record

USAGE = "usage.jsonl"
SECONDS = 1.0
LOOKS_A_RUN = 600
"""A look comes after a second, and later after this part of the run so far, so that a file does not grow for ever."""


class Usage:
    """Looks at the run's processes from a thread of this one. Call it with each record of the run.

    Args:
        folder: of the run; None: it does not look.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._train_seconds = 0.0
        self._processes: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        self._psutil: Any = None
        """None where nothing is looked at."""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, record: Record) -> None:
        self._train_seconds = record.train_seconds

    def start(self) -> None:
        """Begin to look, where psutil is there."""
        try:
            import psutil
        except ImportError:
            return
        if self._folder is not None:
            self._psutil, self._gpus = psutil, _Gpus()
            self.follow("leader", os.getpid())
            self._follow_ranks()
            psutil.cpu_percent()
            self._thread = threading.Thread(target=self._look_regularly, name="usage", daemon=True)
            self._thread.start()

    def follow(self, name: str, pid: int | None) -> None:
        """Look at the process `pid` too, until it has ended."""
        if pid is None or self._psutil is None:
            return
        with contextlib.suppress(self._psutil.Error):
            process = self._psutil.Process(pid)
            process.cpu_percent()  # the next call tells what was used since this one
            self._processes[name] = process

    def _follow_ranks(self) -> None:
        """Those that torchrun has started beside this process, on this host."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return
        with contextlib.suppress(self._psutil.Error):
            for process in self._psutil.Process(os.getppid()).children():
                rank = process.environ().get("RANK")
                if process.pid != os.getpid() and rank is not None:
                    self.follow(f"worker {rank}", process.pid)

    def finish(self) -> dict[str, Any] | None:
        """Stop looking; means over the looks, and peaks, for the summary. None where there was none."""
        if self._thread is None:
            return None
        self._over.set()
        self._thread.join(SECONDS)
        rows = self._rows
        if not rows:
            return None
        names = list(dict.fromkeys(name for row in rows for name in row["processes"]))
        mean = statistics.fmean
        return {
            "looks": len(rows),
            "machine_cores": mean(row["machine"] for row in rows),
            "cores": {name: mean(row["processes"].get(name, (0.0,))[0] for row in rows) for name in names},
            "gpus": [
                {
                    "utilisation": mean(row["gpus"][number]["utilisation"] for row in rows),
                    "peak_bytes": max(row["gpus"][number]["bytes"] for row in rows),
                }
                for number in range(len(rows[0]["gpus"]))
            ],
        }

    def _look_regularly(self) -> None:
        began = time.monotonic()
        try:
            assert self._folder is not None
            while not self._over.wait(max(SECONDS, (time.monotonic() - began) / LOOKS_A_RUN)):
                row = self._look(time.monotonic() - began)
                self._rows.append(row)
                with open(self._folder / USAGE, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        except Exception:
            return  # whatever a full disk or these libraries raise: it is no reason to disturb a run

    def _look(self, seconds: float) -> dict[str, Any]:
        processes = {}
        for name, process in list(self._processes.items()):
            try:
                with process.oneshot():
                    processes[name] = (process.cpu_percent() / 100.0, process.memory_info().rss)
            except self._psutil.Error:
                del self._processes[name]  # it has ended
        return {
            "seconds": round(seconds, 3),
            "train_seconds": self._train_seconds,
            "machine": self._psutil.cpu_percent() * self._psutil.cpu_count() / 100.0,
            "processes": processes,
            "gpus": self._gpus.look(),
        }


class _Gpus:
    """The GPUs that NVIDIA's library sees; none where it is not there."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        with contextlib.suppress(Exception):  # not installed, no driver, no permission
            import pynvml

            pynvml.nvmlInit()
            self._library = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(k) for k in range(pynvml.nvmlDeviceGetCount())]

    def look(self) -> list[dict[str, float]]:
        return [
            {
                "utilisation": self._library.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
                "bytes": self._library.nvmlDeviceGetMemoryInfo(handle).used,
            }
            for handle in self._handles
        ]
