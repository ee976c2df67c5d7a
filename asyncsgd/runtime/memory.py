"""How much memory a process has needed."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> tuple[int, int]:
    """The most bytes that this process has had in memory, and that torch has had on `device` (0 on a CPU).

    The first is the peak of the resident set, shared pages included. Linux keeps it in ``/proc/self/status``;
    `resource.getrusage` may give that of the program that started this one.
    """
    return _resident(), torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def forget_peaks(device: torch.device) -> None:
    """Measure `peak_bytes` from here on: a process may make several runs. Where the system cannot, it goes on from the
    peak before.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _resident() -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
