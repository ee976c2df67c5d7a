"""Whether the seconds of runs are a speed comparison: the hardware they were measured on, and what else used it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from analysis.study.run import Run

MOST_OTHER_LOAD = 0.1
"""Share of all cores' time that other programs and other virtual machines may have had while a run trained."""

_HARDWARE = ("cpu", "cpu_capability", "cores", "gpus", "torch_build")
"""What environment.json says of the machine and of torch's build: seconds are compared only where all of it agrees."""


def hardware_of(run: Run) -> tuple[str, ...] | None:
    """The machine of a run and its torch in words, e.g. ``("a processor", "4 cores", "torch 2.13.0")``.

    None where the run has no environment.json.
    """
    if not run.environment:
        return None
    ranks = run.environment.get("hardware_of_ranks")
    told = [_words(machine) for machine in (ranks if isinstance(ranks, list) else [run.environment])]
    return tuple(text for texts in told for text in texts)


def _words(machine: Mapping[str, Any]) -> list[str]:
    told = {key: machine[key] for key in _HARDWARE if machine.get(key)}
    versions = machine.get("versions")
    version = told.pop("torch_build", versions.get("torch") if isinstance(versions, Mapping) else None)
    cores = told.get("cores")
    if cores:
        told["cores"] = f"{cores} core{'s' * (cores != 1)}"
    texts = [", ".join(map(str, value)) if isinstance(value, list) else str(value) for value in told.values()]
    return texts + [f"torch {version}"] * (version is not None)


def placements_of(runs: Iterable[Run]) -> set[str]:
    """The threads per worker and the devices of runs, in words: one where all of them agree."""
    found = set()
    for run in runs:
        threads, number, device = (run.environment.get(key) for key in ("threads_per_worker", "num_devices", "device"))
        if threads is not None or device is not None:
            several = f"{number} x " if number and device != "cpu" else ""
            found.add(f"{threads} thread{'s' * (threads != 1)} a worker on {several}{device}")
    return found


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


def timing_notes(runs: Iterable[Run]) -> list[str]:
    """Why the seconds of some of these runs are no speed comparison, each a sentence."""
    runs = list(runs)
    told = []
    if any(run.oversubscribed for run in runs):
        told.append("The machine had more threads than cores, so its seconds are no speed comparison.")
    if any(run.timed_in_parts for run in runs):
        told.append("Some runs were stopped and resumed, so their seconds are no speed comparison.")
    if loads := [other_load(run) or 0.0 for run in runs if disturbed(run)]:
        told.append(
            f"Other programs used up to {100 * max(loads):.0f} % of the machine during {len(loads)} of {len(runs)} "
            "runs, so their seconds are no speed comparison."
        )
    return told
