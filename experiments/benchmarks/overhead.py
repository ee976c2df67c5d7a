"""What asynchrony costs: samples per second of the parameter server beside a bare PyTorch loop on the same batches.

    python experiments/benchmarks/overhead.py --rounds 5

Each round runs three things, one after another: the bare loop, which uses only the task of this library and steps the
model's own parameters with fused AdamW; one worker; and two. All have one thread per worker. Ratios are taken round by
round, since machines drift, and then the median; their range is printed beside it. Targets: one worker at least 95 %
of the bare loop, two workers at least 90 % of twice one worker."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import asyncsgd
from asyncsgd.records.events import Event, Record
from asyncsgd.run.run import cache_folder
from asyncsgd.scripts.base import run_script
from asyncsgd.tasks.masked_lm import MaskedLM

WARMUP_STEPS = 10


def bare_loop(task: MaskedLM, num_steps: int) -> float:
    """Samples per second of a plain training loop; runs in a process of its own, as a worker does."""
    torch.set_num_threads(1)
    model = task.model(0)
    data = task.data(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(num_steps + WARMUP_STEPS):
        if step == WARMUP_STEPS:
            began = time.perf_counter()
        optimizer.zero_grad()
        batch = data.batch(0, step)
        outputs = task.outputs(model, batch)
        task.loss(outputs, batch).backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    return num_steps * task.batch_size / seconds


def asynchronous(task: MaskedLM, num_steps: int, num_workers: int, folder: Path) -> float:
    """Samples per second of a run, from after its first batches (in which workers warm up) to its end."""
    arrivals = list[Event]()

    def report(record: Record) -> None:
        if isinstance(record, Event):
            arrivals.append(record)

    num_batches = num_workers * (num_steps + WARMUP_STEPS)
    asyncsgd.train(
        task,
        runtime=asyncsgd.Processes(num_workers),
        samples=task.batch_size * num_batches,
        evaluations=1,
        clip_norm=0.0,
        folder=folder,
        quiet=True,
        report=report,
    )
    first = arrivals[WARMUP_STEPS * num_workers]
    last = arrivals[-1]
    seconds = last.train_seconds - first.train_seconds
    return (last.total_samples - first.total_samples) / seconds


def run(argv: list[str], stop: object) -> int:
    parser = argparse.ArgumentParser(description="Overhead of the parameter server against a bare PyTorch loop.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="batches per worker in each run")
    parser.add_argument("--model", default="tiny", choices=["tiny", "small"])
    arguments = parser.parse_args(argv)
    task = MaskedLM(model_name=arguments.model, eval_samples=32)
    steps = arguments.steps
    one_worker = []
    two_workers = []
    prepared = task.prepare(0, cache_folder(None))
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(arguments.rounds):
            with ProcessPoolExecutor(1, context) as pool:
                bare = pool.submit(bare_loop, prepared, steps).result()
            folder = Path(temporary)
            one = asynchronous(task, steps, 1, folder / f"{number}-1")
            two = asynchronous(task, steps, 2, folder / f"{number}-2")
            one_worker.append(one / bare)
            two_workers.append(two / (2 * one))
            print(
                f"round {number}: bare {bare:7.1f}   1 worker {one:7.1f}   2 workers {two:7.1f} samples/s", flush=True
            )
    print_ratios("1 worker / bare loop        ", one_worker, 0.95)
    print_ratios("2 workers / (2 x 1 worker)  ", two_workers, 0.90)
    return 0


def print_ratios(name: str, ratios: list[float], target: float) -> None:
    median = statistics.median(ratios)
    print(f"{name} median {median:.3f}  [{min(ratios):.3f}, {max(ratios):.3f}]  n={len(ratios)}  target {target}")


if __name__ == "__main__":
    sys.exit(run_script(run))
