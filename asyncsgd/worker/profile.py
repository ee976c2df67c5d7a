"""What a training is measured by: the hardware, peaks of memory, a profiler's trace, tokens a second, utilisation.

    MFU = f R / (D F)

f is the number of floating-point operations of the model for one sample, R the samples trained on in a second, D the
number of devices and F what one device can do in a second (Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with
Pathways", appendix B). f is counted: `torch.utils.flop_counter` counts the matrix products of a forward pass, padding
included, and a backward pass takes twice as many. F is measured: the rate of one large matrix product in the run's
number format, not what the maker of the device promises."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import resource
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from asyncsgd.records.hardware import instruction_limits, processor
from asyncsgd.records.machine import available_cores
from asyncsgd.tasks.base import Batch, Task, to_device
from asyncsgd.worker.evaluation import evaluating
from asyncsgd.worker.worker import Gradient, Worker

TRACE = Path("profile") / "worker0.json.gz"
"""The path of the trace within the run's folder."""
WARM_UP = 3
"""The number of gradients before a trace begins. The first ones allocate memory and choose kernels."""
SIDE = {"cpu": 1024, "cuda": 8192}
"""Device -> the number of rows and columns of the two matrices whose product is timed."""
ENOUGH_SECONDS = 0.5
"""After so long the product is not computed again: in float16 some processors need seconds for each."""


def hardware(device: str) -> dict[str, Any]:
    """What a process that computes on `device`, ``cpu`` or ``cuda``, has, as environment.json says it; no host name.

    Seconds on other hardware are not compared, and bits of results are only promised where the hardware is equal.
    """
    num_gpus = 0
    libraries: dict[str, Any] = {}
    if device == "cuda":
        num_gpus = torch.cuda.device_count()
        libraries = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    found = processor()
    return {
        "cpu": found["name"],
        "cores": available_cores(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(num_gpus)],
        "torch_build": str(torch.__version__),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": found,
        "instruction_limits": instruction_limits(),
        "gpu_libraries": libraries,
    }


def by_ranks(hardware: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The hardware of every rank, each kind once with the ranks that have it.

    >>> by_ranks([{"cpu": "slow"}, {"cpu": "slow"}, {"cpu": "fast"}])
    [{'ranks': [0, 1], 'cpu': 'slow'}, {'ranks': [2], 'cpu': 'fast'}]
    """
    kinds: list[dict[str, Any]] = []
    for kind in hardware:
        ranks = [rank for rank, other in enumerate(hardware) if other == kind]
        with_ranks = {"ranks": ranks, **kind}
        if with_ranks not in kinds:
            kinds.append(with_ranks)
    return kinds


def peak_bytes(device: torch.device) -> tuple[int, int]:
    """The most bytes that this process has had in memory, and that torch has had on `device` (0 on a CPU).

    The first is the peak of the resident set, shared pages included. `resource.getrusage` may give that of the program
    that started this one, so on Linux it is read from ``/proc/self/status``.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        resident = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return resident, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def forget_peaks(device: torch.device) -> None:
    """Measure `peak_bytes` from here on, where the system can: a process may make several runs."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def leave_memory_for(others: int, device: torch.device) -> None:
    """Let this process have its share of the free memory alone, with `others` that want as much each.

    So this process is refused more in good order, and the system need not kill one. On a GPU it is a share of all its
    memory.
    """
    if device.type == "cuda":
        on_this_one = math.ceil((others + 1) / torch.cuda.device_count())
        torch.cuda.set_per_process_memory_fraction(1.0 / on_this_one, device)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + psutil.virtual_memory().available // (others + 1)
    if soft != resource.RLIM_INFINITY:
        limit = min(soft, limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@dataclasses.dataclass(frozen=True)
class Profile:
    """What to trace with `torch.profiler`."""

    num_gradients: int
    path: Path
    """The path of the trace, which ends in ``.json.gz``. Its folder is made."""

    def describe(self) -> str:
        if self.path.is_file():
            return f"trace  {self.path}; open it at https://ui.perfetto.dev"
        needed = self.num_gradients + WARM_UP
        return f"trace  none: worker 0 computed fewer than {needed} gradients; type more --samples"

    def profiler(self) -> torch.profiler.profile:
        def write(profiler: torch.profiler.profile) -> None:
            if profiler.step_num >= WARM_UP + self.num_gradients:  # else the run has ended
                self.path.parent.mkdir(exist_ok=True)
                profiler.export_chrome_trace(str(self.path))

        steps = torch.profiler.schedule(wait=0, warmup=WARM_UP, active=self.num_gradients, repeat=1)
        return torch.profiler.profile(schedule=steps, on_trace_ready=write, record_shapes=True)


class ProfiledWorker(Worker):
    """A worker that traces some of its gradients, and what its process does between them."""

    profile: Profile | None = None
    """What to trace. It is None while the worker is made, so gradients that a compiler needs are in no trace."""
    _profiler: torch.profiler.profile | None = None

    def gradient(
        self, index: int, weigh: Callable[[float], float] | None = None, loss_scale: float | None = None
    ) -> Gradient:
        if self.profile is None:
            return super().gradient(index, weigh, loss_scale)
        if self._profiler is None:
            self._profiler = self.profile.profiler()
            self._profiler.start()
            # A run may end before its trace does, and torch crashes if its profiler still runs when the process ends.
            weakref.finalize(self, self._profiler.stop)
        with torch.profiler.record_function(f"gradient of batch {index}"):
            gradient = super().gradient(index, weigh, loss_scale)
        self._profiler.step()
        return gradient


def flops_per_sample(task: Task, model: nn.Module, batches: Sequence[Batch]) -> float:
    """The mean operations of a forward and a backward pass on a sample of `batches`, whose forward passes are made."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    device = next(model.parameters()).device
    # Attention as plain products: the counter does not know every fused kernel.
    with evaluating(model), sdpa_kernel(SDPBackend.MATH), counter:
        for batch in batches:
            task.outputs(model, to_device(batch, device))
    return 3.0 * counter.get_total_flops() / (len(batches) * task.batch_size)


@functools.cache
def peak_flops(device: str, precision: torch.dtype) -> float:
    """Operations a second of one large matrix product on `device`, in this process and with its threads; measured."""
    side = SIDE[torch.device(device).type]
    left = torch.ones(side, side, dtype=precision, device=device)
    seconds: list[float] = []
    while len(seconds) < 5 and sum(seconds) < ENOUGH_SECONDS:
        began = time.perf_counter()
        product = left @ left
        if product.is_cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2.0 * side**3 / min(seconds)
