"""What checkpoints and records cost: throughput, how long training stands still, bytes on the disk.

    python experiments/benchmarks/checkpoint_cost.py --rounds 5

Each round trains the model ``small`` with one process and with two asynchronous workers, without checkpoints and with
one every `--every` seconds. It prints the ratio of samples per second round by round, then the median, and from it the
cost at one checkpoint a minute. A minute is long and machines drift, so the cost at one a minute is computed a second
time from its parts: training stands still for one copy of the state (beside it, how long a plain copy of as many bytes
takes), and a thread spends CPU seconds to write it, which at worst training lacks. (Target: at most 2 % of throughput.)

Last, it prints the bytes that a gradient which arrives takes in events.jsonl, by mode."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from asyncsgd import checkpoints
from asyncsgd.checkpoints import find
from asyncsgd.errors import UsageError
from asyncsgd.records.events import read_events
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.runtime.processes import fork_server
from asyncsgd.runtime.ranks import Launch
from asyncsgd.scripts.pretraining import pretraining
from asyncsgd.settings.training import make_settings
from asyncsgd.training import lead

WARMUP = 10
MINUTE = 60.0
MODES: dict[str, dict[str, Any]] = {
    "single": {"mode": "single"},
    "async 2": {"mode": "async", "nproc": 2},
    "sync 2": {"mode": "sync", "nproc": 2},
    "virtual 2": {"clock": "virtual", "nproc": 2, "speeds": "exponential:1"},
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one run."""

    samples_per_second: float
    copy_seconds: tuple[float, ...]
    """Of every checkpoint."""
    num_bytes: int
    """Of its last checkpoint."""
    bytes_per_arrival: float


def measured(folder: Path, **values: Any) -> Cost:
    """Train, and take throughput from after the first batches, in which workers warm up, to the end."""
    settings = make_settings({"evaluations": 1, "eval_samples": 16, "warmup": 0, **values})
    num_workers = settings.job.nproc
    context = None if settings.job.mode == "single" or "clock" in values else fork_server(settings.model.model)
    with contextlib.redirect_stdout(io.StringIO()):
        code = lead(pretraining(settings), Launch(num_workers, None, False), RunFolder(folder), context)
    if code:
        raise SystemExit(f"the run in {folder} ended with exit code {code}")
    records = list(read_events(folder / "events.jsonl"))
    arrivals = [record for record in records if record["kind"] == "arrival"]
    first, last = arrivals[WARMUP * num_workers], arrivals[-1]
    copies = tuple(record["copy_seconds"] for record in records if record["kind"] == "checkpoint")
    lines = [line for line in (folder / "events.jsonl").read_bytes().splitlines(True) if b'"kind":"arrival"' in line]
    return Cost(
        (last["total_samples"] - first["total_samples"]) / (last["train_seconds"] - first["train_seconds"]),
        copies,
        find(folder).checkpoint.num_bytes if copies else 0,
        sum(map(len, lines)) / len(lines),
    )


def cost_of_writing(folder: Path, num_bytes: int, times: int) -> tuple[list[float], list[float]]:
    """CPU seconds to write a state of so many bytes, and seconds to copy it, each time."""
    vectors = [torch.zeros(num_bytes // 12) for _ in range(3)]  # parameters and AdamW's two
    writing, copying = [], []
    for number in range(times):
        began = time.perf_counter()
        for vector in vectors:
            vector.clone()
        copying.append(time.perf_counter() - began)
        writer = checkpoints.StateWriter(folder, checkpoints.Policy(), lambda written: None)
        writer.take({"state": vectors}, version=0, num_samples=number, train_seconds=0.0)
        cpu = time.process_time()
        writer.start()
        writer.finish()
        writing.append(time.process_time() - cpu)
    return writing, copying


def shown(values: list[float]) -> str:
    return f"median {statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}] n={len(values)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="What checkpoints and records cost.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="batches per worker in each run")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two checkpoints (3)")
    arguments = parser.parse_args()
    ratios: dict[str, list[float]] = {name: [] for name in list(MODES)[:2]}
    copies: dict[str, list[float]] = {name: [] for name in ratios}
    spacing: dict[str, list[float]] = {name: [] for name in ratios}
    num_bytes = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for number in range(arguments.rounds):
            for name in ratios:
                values = {"model": "small", "batch_size": 16, **MODES[name]}
                values["samples"] = 16 * values.get("nproc", 1) * (arguments.steps + WARMUP)
                plain = measured(root / f"{number}-{name}-plain", **values)
                kept = measured(root / f"{number}-{name}", checkpoint_seconds=arguments.every, **values)
                ratios[name].append(kept.samples_per_second / plain.samples_per_second)
                copies[name] += kept.copy_seconds
                seconds = values["samples"] / kept.samples_per_second
                spacing[name].append(seconds / max(1, len(kept.copy_seconds)))
                num_bytes = max(num_bytes, kept.num_bytes)
                print(
                    f"round {number}: {name:8} {plain.samples_per_second:6.1f} samples/s, with "
                    f"{len(kept.copy_seconds)} checkpoints {kept.samples_per_second:6.1f}",
                    flush=True,
                )
        (root / "copies").mkdir()
        writing, copying = cost_of_writing(root / "copies", num_bytes, 7)
        print(f"\na checkpoint has {num_bytes / 2**20:.1f} MiB; CPU seconds to write it: {shown(writing)}")
        print(f"seconds of a plain copy of as many bytes: {shown(copying)}")
        for name, each in ratios.items():
            every = statistics.median(spacing[name])
            lost = 1 - statistics.median(each)
            parts = (statistics.median(copies[name]) + statistics.median(writing)) / MINUTE
            print(f"{name}: seconds that training stands still per checkpoint: {shown(copies[name])}")
            print(f"{name}: throughput with one every {every:.1f} s / without: {shown(each)}")
            print(
                f"{name}: at one a minute {100 * lost * every / MINUTE:.2f} % from the ratio, {100 * parts:.2f} % from "
                f"the parts (target: at most 2 %)"
            )
        for name, mode in MODES.items():
            values = {"model": "tiny", "batch_size": 16, **mode}
            values["samples"] = 16 * values.get("nproc", 1) * 2 * WARMUP
            print(f"{name}: {measured(root / name, **values).bytes_per_arrival:.0f} bytes in the records per arrival")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
