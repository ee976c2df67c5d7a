"""How much memory a process has needed."""

from __future__ import annotations

import contextlib
import math
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


def leave_memory_for(others: int, device: torch.device) -> None:
    """Let this process have its share of the free memory alone, with `others` that want as much each.

    On a CPU that is what Linux calls available. So this process is refused more in good order, and the system need not
    kill one. Where the system does not say what is free, nothing happens. On a GPU it is a share of all its memory.
    """
    if device.type == "cuda":
        on_this_one = math.ceil((others + 1) / torch.cuda.device_count())
        torch.cuda.set_per_process_memory_fraction(1.0 / on_this_one, device)
        return
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        own = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = own + free // (others + 1)
        resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard))
