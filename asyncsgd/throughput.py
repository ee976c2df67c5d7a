"""How much of the machine a training has used: tokens a second, and model FLOPs utilisation.

    MFU = f R / (D F)

f is the number of floating-point operations of the model for one sample, R the samples trained on in a second, D the
number of devices and F what one device can do in a second (Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with
Pathways", appendix B). Here f is counted, not estimated: `torch.utils.flop_counter` counts the matrix products of a
forward pass, padding included, and a backward pass takes twice as many. F is measured: the rate of one large matrix
product in the run's number format. It is not what the maker of the device promises."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from asyncsgd.evaluation import evaluating
from asyncsgd.tasks.base import Batch, Task, map_tensors

SHORTEST_SECONDS = 1.0
"""Of training. The rates of a shorter run say how it began."""
BATCHES = 8
"""Samples have different lengths, so tokens and operations are means over so many batches."""
SIDE = {"cpu": 1024, "cuda": 8192}
"""Of the matrices whose product is timed."""
REPETITIONS = 5


def flops_per_sample(task: Task, model: nn.Module, batches: Sequence[Batch]) -> float | None:
    """The operations of a forward and a backward pass on one training sample; None where they cannot be counted.

    Nothing is computed: the pass goes through fake tensors, which have shapes and no values. A model whose shapes
    depend on values cannot be counted so.

    Args:
        task: prepared.
        batches: to take the mean over.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    device = next(model.parameters()).device
    try:
        # Attention as plain products: the counter does not know every fused kernel.
        with (
            evaluating(model),
            sdpa_kernel(SDPBackend.MATH),
            counter,
            FakeTensorMode(allow_non_fake_inputs=True) as fake,
        ):
            for batch in batches:
                task.outputs(model, map_tensors(lambda tensor: fake.from_tensor(tensor).to(device), batch))
    except Exception:  # a user's own model may do anything, and the run has ended well
        return None
    return 3.0 * counter.get_total_flops() / (len(batches) * task.batch_size)


@functools.cache
def peak_flops(device: str, precision: torch.dtype) -> float:
    """Operations a second of one large matrix product on a device, in this process and with its threads; measured.

    Args:
        device: ``cpu`` or a GPU's name.
    """
    side = SIDE[torch.device(device).type]
    left = torch.ones(side, side, dtype=precision, device=device)
    best = float("inf")
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        product = left @ left
        if product.is_cuda:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * side**3 / best


def throughput(
    task: Task, model: nn.Module, totals: Mapping[str, Any], *, seed: int, device: str, num_devices: int, precision: Any
) -> dict[str, Any]:
    """The summary's fields of a run on the measured clock; each is None where it is not known.

    Args:
        totals: `asyncsgd.records.totals.Totals.as_summary`.
        device: one that a worker computed on; each of `num_devices` is like it.
    """
    found: dict[str, Any] = dict.fromkeys(FIELDS)
    rate = totals["samples_per_second"]
    if rate is None or totals["train_seconds"] < SHORTEST_SECONDS:
        return found
    try:
        data = task.data(seed)
        batches = [data.batch(0, index) for index in range(BATCHES)]
        tokens = [task.count_tokens(batch) for batch in batches]
    except Exception:  # a user's own data may have fewer batches, and the run has ended well
        return found
    if None not in tokens:
        found["tokens_per_second"] = rate * sum(filter(None, tokens)) / (len(batches) * task.batch_size)
    operations = flops_per_sample(task, model, batches)
    with contextlib.suppress(RuntimeError):  # e.g. no product in this number format
        found["peak_flops_per_second"] = peak_flops(device, precision)
    if operations:
        found["model_flops_per_sample"] = operations
        if found["peak_flops_per_second"]:
            found["model_flops_utilisation"] = operations * rate / (num_devices * found["peak_flops_per_second"])
    return found


FIELDS = ("tokens_per_second", "model_flops_per_sample", "peak_flops_per_second", "model_flops_utilisation")
