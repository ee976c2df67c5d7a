"""What fits in memory, found by trying: the largest batch (``--find-batch-size``), or the fewest parts of a batch
(``--auto-batch``).

A try is a gradient and an optimizer step in a process of its own, so that a kill does not take this one along. Workers
on one CPU share its memory in equal parts, and so do workers on one GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from multiprocessing.context import ForkServerContext

import torch

from asyncsgd.backends.launch import OUT_OF_MEMORY, ChildProcesses
from asyncsgd.backends.process_setup import fail, set_up_process
from asyncsgd.errors import NOT_ONE_SAMPLE, RunError, UsageError
from asyncsgd.run.run import Run
from asyncsgd.tasks.base import tensors_in
from asyncsgd.worker.profile import leave_memory_for

LOOKED_AT = 10_000
"""The number of samples among which the largest batch is looked for."""
STEPS = 16
"""The result is exact to 1 / `STEPS` of it; smaller steps would take more tries."""
LARGEST = 65_536
"""The largest batch that is tried."""
KILLED = -9


def find_batch_size(run: Run, context: ForkServerContext, tell: Callable[[str], None]) -> int:
    """Find the most samples whose gradient and optimizer step fit in the memory of a worker. Nothing is trained or
    written.

    Sizes are doubled until one does not fit, and then bisected. Each is tried with the batch that has the most numbers.

    Args:
        context: the context that `asyncsgd.backends.launch.fork_server` has returned.
        tell: says a line to the user.

    Raises:
        RunError: if not even one sample fits.
    """
    if "batch_size" not in {field.name for field in dataclasses.fields(run.task)}:  # type: ignore[arg-type]
        raise UsageError(f"the batch size of {run.task.name} is no field; declare it: batch_size: int = 32")
    if run.machine.auto_batch:
        raise UsageError("--auto-batch makes every batch fit, so --find-batch-size would find nothing; drop one")
    run = run.prepared()
    task = run.task
    most = min(LARGEST, task.facts().get("num_train_samples") or LARGEST)

    def fits(size: int) -> bool:
        of_size = dataclasses.replace(run, task=dataclasses.replace(task, batch_size=size))  # type: ignore[type-var]
        fitted = _fits(of_size, 1, _largest_batch(of_size), context)
        tell(f"try    {size} sample{'s' * (size > 1)}: {'fit' if fitted else 'too many'}")
        return fitted

    good = 0
    bad = 1
    while bad <= most and fits(bad):
        good = bad
        bad = most + 1 if bad == most else min(2 * bad, most)
    if good == 0:
        raise RunError(NOT_ONE_SAMPLE)
    while bad <= most and bad - good > max(1, good // STEPS):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    limit = f"{bad} do not" if bad <= most else "the data have no more"
    tell(f"fits   {good} sample{'s' * (good > 1)} at once; {limit}")
    asked = task.batch_size
    parts = math.ceil(task.batch_size / good)
    tuned = f", or --batch-size {asked} --micro-batches {parts} for the batch that was asked for" if parts > 1 else ""
    tell(f"type   --batch-size {good} --micro-batches 1{tuned}")
    return good


def find_micro_batches(run: Run, context: ForkServerContext) -> int:
    """Find the fewest parts in which a batch fits, from `Run.micro_batches` on, doubled at a time; `run` is prepared.

    Raises:
        RunError: if not even one sample fits.
    """
    index = _largest_batch(run)
    parts = run.micro_batches
    while not _fits(run, parts, index, context):
        if parts >= run.task.batch_size:
            raise RunError(NOT_ONE_SAMPLE)
        parts = min(2 * parts, run.task.batch_size)
    return parts


def _fits(run: Run, micro_batches: int, index: int, context: ForkServerContext) -> bool:
    with ChildProcesses(context) as processes:
        processes.start(0, _try, run.as_sent_to(0).with_parts(micro_batches), index)
        processes.join(0)
        code = processes.exit_code(0)
    if code not in (0, OUT_OF_MEMORY, KILLED):
        raise RunError(f"a batch of {run.task.batch_size} samples could not be tried: {processes.how_it_ended(0, 1.0)}")
    return code == 0


def _largest_batch(run: Run) -> int:
    """The index of the batch that has the most numbers in it, which is one of the longest sequences."""
    data = run.task.data(run.seed)
    samples = run.task.facts().get("num_train_samples") or LOOKED_AT

    def numbers(index: int) -> int:
        return sum(tensor.numel() for tensor in tensors_in(data.batch(0, index)))

    return max(range(max(1, min(LOOKED_AT, samples) // run.task.batch_size)), key=numbers)


def _try(run: Run, index: int) -> None:
    """Entry point of a process: one gradient of batch `index` and one step."""
    try:
        set_up_process(run.runtime.threads)
        leave_memory_for(run.runtime.num_workers - 1, torch.device(run.device))
        flat = run.flat(device=run.device)
        run.worker(flat).gradient(index)
        run.recipe.on(flat.parameters, flat.layout).step(flat.gradients, 0.0)
    except Exception as error:
        fail("a try", error)
