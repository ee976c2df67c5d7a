"""How a process that computes gradients begins, how it slows them down to declared speeds, and how it fails."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing import parent_process
from typing import NoReturn

import torch

from asyncsgd.backends.launch import OUT_OF_MEMORY, RAISED, REASONS
from asyncsgd.core.signals import NUMBERS
from asyncsgd.errors import is_out_of_memory
from asyncsgd.run.run import Run
from asyncsgd.simulation.speeds import Sampler


class Straggling:
    """Says how long a worker has to wait after its gradients, so that they take as long as the run's speeds declare.

    >>> Straggling(None, 0).wait_seconds(0.5, first_draw=7)
    0.0
    """

    def __init__(self, sampler: Sampler | None, worker: int) -> None:
        self._sampler = sampler
        self._worker = worker

    @classmethod
    def of(cls, run: Run, worker: int) -> Straggling:
        speeds = run.runtime.speeds
        return cls(None if speeds is None else speeds.on(run.runtime.num_workers, run.seed), worker)

    def wait_seconds(self, computed_seconds: float, first_draw: int, num_gradients: int = 1) -> float:
        """How long to wait after `num_gradients` that have taken `computed_seconds` together.

        Args:
            first_draw: how many gradients the worker was given before these. So a resumed run continues the sequence of
                drawn times.
        """
        if self._sampler is None:
            return 0.0
        each = computed_seconds / num_gradients
        draws = range(first_draw, first_draw + num_gradients)
        total = sum(self._sampler.stretched(self._worker, draw, each) for draw in draws)
        return max(0.0, total - computed_seconds)


def set_up_process(threads: int) -> None:
    """Set the number of threads of this process, and ignore signals: the server handles them, and tells workers to
    stop."""
    torch.set_num_threads(threads)
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def fail(who: str, error: Exception) -> NoReturn:
    """End this process because of `error`. The exit code tells a leader that has started it why."""
    if is_out_of_memory(error):
        if parent_process() is None:
            print(f"{who}: {REASONS[OUT_OF_MEMORY]}", file=sys.stderr, flush=True)
        os._exit(OUT_OF_MEMORY)
    print(f"{who} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    os._exit(1 if parent_process() is None else RAISED)
