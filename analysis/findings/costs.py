"""What runs say of their cost: where time went, memory, rates, the machine's use. Older runs say nothing of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from analysis.study.run import Run


@dataclasses.dataclass(frozen=True)
class Cost:
    """Means over runs; None where no run says it."""

    n: int
    """Runs."""
    compute: float | None
    """Share of the workers' time, as the next two. It goes on where the training clock stands still."""
    wait: float | None
    communicate: float | None
    apply: float | None
    """Share of the training clock in which the server stepped."""
    evaluate: float | None
    """Seconds in which all were evaluating, as the next."""
    checkpoint: float | None
    resident_bytes: float | None
    """The sum of the peaks of a run's processes; shared pages count in each."""
    gpu_bytes: float | None
    tokens_per_second: float | None
    utilisation: float | None
    """Model FLOPs utilisation."""
    cores: float | None
    """Busy cores of all processes of the run."""


def cost_of(runs: Sequence[Run]) -> Cost:
    """The cost of runs of one kind. Nothing is said of the machine's use where others used it too."""
    alone = [run for run in runs if not disturbed(run)]
    return Cost(
        len(runs),
        compute=_mean(_share_of_workers(run, "compute") for run in runs),
        wait=_mean(_share_of_workers(run, "wait") for run in runs),
        communicate=_mean(_share_of_workers(run, "communicate") for run in runs),
        apply=_mean(_share(_said(run, "seconds", "apply"), _train_seconds(run)) for run in runs),
        evaluate=_mean(_said(run, "seconds", "evaluate") for run in runs),
        checkpoint=_mean(_said(run, "seconds", "checkpoint") for run in runs),
        resident_bytes=_mean(_peak(run, 0) for run in runs),
        gpu_bytes=_mean(_peak(run, 1) for run in runs),
        tokens_per_second=_mean(_said(run, "throughput", "tokens_per_second") for run in runs),
        utilisation=_mean(_said(run, "throughput", "model_flops_utilisation") for run in alone),
        cores=_mean(_cores(run) for run in alone),
    )


MOST_OTHER_LOAD = 0.1
"""Share of all cores' time that other programs and other virtual machines may have had while a run trained."""


def other_load(run: Run) -> float | None:
    """Share of all cores' time that others had while the run trained; None on the virtual clock, and if not known."""
    load = run.summary.get("machine_load")
    if run.virtual or not isinstance(load, Mapping):
        return None
    shares = [load.get(key) for key in ("others_share", "stolen_share")]
    return sum(share for share in shares if isinstance(share, int | float))


def disturbed(run: Run) -> bool:
    """Whether others are known to have had more than `MOST_OTHER_LOAD` of the machine."""
    return (other_load(run) or 0.0) > MOST_OTHER_LOAD


def _said(run: Run, group: str, key: str) -> float | None:
    found = run.summary.get(group)
    value = found.get(key) if isinstance(found, dict) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _share_of_workers(run: Run, part: str) -> float | None:
    told = sum(_said(run, "seconds", own) or 0.0 for own in ("compute", "wait", "communicate"))
    return _share(_said(run, "seconds", part), max(told, _train_seconds(run) * (run.summary.get("num_workers") or 1)))


def _train_seconds(run: Run) -> float:
    return float(run.summary.get("train_seconds") or 0.0)


def _share(seconds: float | None, whole: float) -> float | None:
    return None if seconds is None or not whole else seconds / whole


def _peak(run: Run, which: int) -> float | None:
    memory = run.summary.get("memory")
    if not isinstance(memory, dict):
        return None
    # One process is leader and worker at once.
    workers = [] if run.summary.get("mode") == "single" else [peak[which] for _, peak in memory.get("workers", ())]
    return float(memory["leader"][which] + sum(workers))


def _cores(run: Run) -> float | None:
    usage = run.summary.get("usage")
    return None if not isinstance(usage, dict) else math.fsum(usage["cores"].values())


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
