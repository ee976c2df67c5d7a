"""A trace of what a worker does while it computes some gradients, by `torch.profiler`."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from asyncsgd.worker import Gradient, Worker

TRACE = Path("profile") / "worker0.json.gz"
"""In the run's folder."""

WARM_UP = 3
"""Gradients before the trace begins; the first ones allocate memory and choose kernels."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """What to trace; can be sent to another process."""

    num_gradients: int
    path: Path
    """Of the trace, which ends in ``.json.gz``; its folder is made."""

    def describe(self) -> str:
        """What the user is told at the end of the run."""
        if self.path.is_file():
            return f"trace  {self.path}; open it at https://ui.perfetto.dev"
        return (
            f"trace  none: worker 0 computed fewer than {self.num_gradients + WARM_UP} gradients; type more --samples"
        )


class ProfiledWorker(Worker):
    """A worker that traces some of its gradients, and what its process does between them."""

    profile: Profile
    """To be set before the first gradient."""
    _computed = 0
    _profiler: torch.profiler.profile | None = None
    _stop: Callable[[], object]
    """Stops the profiler, once."""

    def gradient(
        self,
        index: int,
        weigh: Callable[[float], float] | None = None,
        loss_scale: float | None = None,
    ) -> Gradient:
        if self._computed == WARM_UP:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()
            # a run that ends before its trace does: torch crashes if its profiler still runs when the process ends
            self._stop = weakref.finalize(self, self._profiler.stop)
        with torch.profiler.record_function(f"gradient of batch {index}"):
            gradient = super().gradient(index, weigh, loss_scale)
        self._computed += 1
        if self._profiler is not None and self._computed == WARM_UP + self.profile.num_gradients:
            self._write(self._profiler)
        return gradient

    def _write(self, profiler: torch.profiler.profile) -> None:
        self._profiler = None
        self._stop()
        self.profile.path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(self.profile.path))
