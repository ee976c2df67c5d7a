"""What asynchrony costs: samples per second of the parameter server beside a bare PyTorch loop on the same batches.

    python experiments/benchmarks/overhead.py --rounds 5

Each round runs three things, one after another: the bare loop, ``--mode async --nproc 1`` and
``--mode async --nproc 2``. All have one thread per worker. The bare loop steps the model's own parameters with fused
AdamW. Of this library it uses only the task. Ratios are taken round by round, since machines drift, and then the
median; their range is printed beside it. Targets: one worker at least 95 % of the bare loop, two workers at least 90 %
of twice one worker."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from asyncsgd.records.run_folder import RunFolder
from asyncsgd.runtime.launch import Launch, Processes, fork_server
from asyncsgd.scripts.base import run_script
from asyncsgd.settings.run import Run, run_of
from asyncsgd.settings.task import task_flags
from asyncsgd.signals import StopRequest
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.training import lead

WARMUP_STEPS = 10


def bare_loop(run: Run, num_steps: int, answer: Connection) -> None:
    """Send the samples per second of a plain training loop; runs in a process of its own, as a worker does."""
    torch.set_num_threads(run.runtime.threads)
    task = run.task
    model = task.model(run.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = task.data(run.seed)
    for step in range(num_steps + WARMUP_STEPS):
        if step == WARMUP_STEPS:
            began = time.perf_counter()
        optimizer.zero_grad()
        batch = data.batch(0, step)
        task.loss(task.outputs(model, batch), batch).backward()
        optimizer.step()
    answer.send(num_steps * task.batch_size / (time.perf_counter() - began))


def measure_bare(run: Run, num_steps: int, context: ForkServerContext) -> float:
    receive, send = context.Pipe(duplex=False)
    with Processes(context) as processes:
        processes.start(0, bare_loop, run, num_steps, send)
        return receive.recv()


def measure_async(settings: Any, context: ForkServerContext, folder: Path) -> float:
    """Samples per second of a run, from after its first batches (in which workers warm up) to its end."""
    launch = Launch(settings.job.nproc, None, False)
    with contextlib.redirect_stdout(io.StringIO()):
        code = lead(run_of("stilt_mlm", settings), launch, RunFolder(folder), context)
    if code:
        raise SystemExit(f"the run in {folder} ended with exit code {code}")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    arrivals = [event for event in events if event["kind"] == "arrival"][WARMUP_STEPS * settings.job.nproc :]
    samples = arrivals[-1]["total_samples"] - arrivals[0]["total_samples"]
    return samples / (arrivals[-1]["train_seconds"] - arrivals[0]["train_seconds"])


def main(argv: list[str], stop: StopRequest) -> int:
    parser = argparse.ArgumentParser(description="Overhead of the parameter server against a bare PyTorch loop.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="batches per worker in each run")
    parser.add_argument("--model", default="tiny", choices=["tiny", "small"])
    parser.add_argument("--transport", default="auto", choices=["auto", "shared_memory", "process_group"])
    arguments = parser.parse_args(argv)

    def settings_of(num_workers: int) -> Any:
        return task_flags(MaskedLM).make(
            {
                "nproc": num_workers,
                "model": arguments.model,
                "transport": arguments.transport,
                "samples": 16 * num_workers * (arguments.steps + WARMUP_STEPS),
                "evaluations": 1,
                "eval_samples": 32,
                "clip_norm": 0.0,
            }
        )

    context = fork_server(arguments.model)
    one, two = settings_of(1), settings_of(2)
    prepared = run_of("stilt_mlm", one).prepared().at(0)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for round_number in range(arguments.rounds):
            bare = measure_bare(prepared, arguments.steps, context)
            single = measure_async(one, context, Path(temporary) / f"{round_number}-1")
            double = measure_async(two, context, Path(temporary) / f"{round_number}-2")
            rows.append((bare, single, double))
            print(
                f"round {round_number}: bare {bare:7.1f}   1 worker {single:7.1f}   2 workers {double:7.1f} samples/s",
                flush=True,
            )
    for name, ratios, target in (
        ("1 worker / bare loop        ", [single / bare for bare, single, _ in rows], 0.95),
        ("2 workers / (2 x 1 worker)  ", [double / (2 * single) for _, single, double in rows], 0.90),
    ):
        low, median, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"{name} median {median:.3f}  [{low:.3f}, {high:.3f}]  n={len(ratios)}  target {target}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
