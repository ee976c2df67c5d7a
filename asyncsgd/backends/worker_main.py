"""A worker's process: build the model, obey until the server says stop or is gone. Hogwild's workers are its other
branch: they step the shared parameters themselves.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import Tensor

from asyncsgd.backends.launch import NO_BATCH_LEFT
from asyncsgd.backends.link import (
    Compute,
    Computed,
    Evaluate,
    EvaluatedAgain,
    Gone,
    GradientFollows,
    Holding,
    Proceed,
    Ready,
    Refused,
    ShardEvaluated,
    Stop,
)
from asyncsgd.backends.pair import LinkSource, Pair
from asyncsgd.backends.process_setup import Straggling, fail, set_up_process
from asyncsgd.backends.segment import FROZEN, SAMPLES
from asyncsgd.core.batches import indices_of
from asyncsgd.core.flat import FlatModel
from asyncsgd.core.optimizers import Optimizer
from asyncsgd.errors import RunError
from asyncsgd.records.events import Taken
from asyncsgd.run.run import Run
from asyncsgd.run.runtimes import Hogwild
from asyncsgd.tasks.base import encode_sums
from asyncsgd.worker.profile import Profile, peak_bytes


def serve(
    run: Run,
    link_source: LinkSource,
    worker: int,
    profile: Profile | None = None,
    tells: bool = False,
) -> None:
    """Entry point of a worker; blocks until it is told to stop, and ends the process.

    Args:
        run: of `Run.at`.
        link_source: to the server.
        profile, tells: see `Run.worker`.
    """
    try:
        set_up_process(run.runtime.threads)
        kind = HogwildWorker if run.runtime.steps_in_workers else ServedWorker
        kind(run, link_source, worker, profile, tells).obey()
    except Gone:
        os._exit(1)  # the server is gone and has said why; there is nobody to report to
    except Exception as error:
        fail(f"worker {worker}", error)
    sys.stdout.flush()
    os._exit(0)  # skips the teardown of threads that torch may still have waiting


class ServedWorker:
    """Pulls a version, computes a gradient or takes local steps, and brings that to the worker's slot."""

    def __init__(self, run: Run, link_source: LinkSource, number: int, profile: Profile | None, tells: bool) -> None:
        self._run = run
        self._straggling = Straggling.of(run, number)
        self._num_batches = run.limits.num_batches(run.task.batch_size)
        self._device = torch.device(run.device)
        self._link, self._segment = link_source.connect(number)
        self._through = self._link if isinstance(self._link, Pair) else None
        """The link, where vectors travel through it; None: they lie in the segment."""
        self._slot = self._segment.slots[number] if self._segment is not None and self._segment.slots else None
        self._flat = self._bound(run.task.model(run.seed).to(self._device))
        self._statistics = self._flat.statistics
        if self._statistics is not None and self._slot is not None and self._segment is not None:
            self._statistics.moved = self._segment.moved[number]
        self._worker = run.worker(self._flat, profile, tells=tells)
        self._inner: Optimizer | None = None
        self._staging = self._flat.parameters if self._device.type == "cpu" else self._flat.parameters.cpu()
        """Where what the link brings is received."""
        self._last_index = 0
        self._idle_since = 0.0

    def _bound(self, model: torch.nn.Module) -> FlatModel:
        gradients = self._slot if self._device.type == "cpu" else None
        return FlatModel(model, gradients=gradients, changing_buffers=self._run.changing_buffers or ())

    def obey(self) -> None:
        """Carry out commands in order until `Stop`."""
        self._link.send(Ready(self._flat.fingerprint))
        self._idle_since = time.perf_counter()
        while not isinstance(command := self._link.receive(), Stop):
            if isinstance(command, Evaluate):
                self._pull(None)
                self._evaluate(command)
                self._idle_since = time.perf_counter()
            elif isinstance(command, Compute) and not self._carry_out(command):
                return
        self._flat.check()

    def _carry_out(self, command: Compute) -> bool:
        """`_compute`; where the model cannot be trained, the server says so, and the run ends."""
        try:
            return self._compute(command)
        except RunError as error:
            self._link.send(Refused(str(error)))
            return False

    def _evaluate(self, command: Evaluate) -> None:
        sums = encode_sums(self._worker.evaluate(command.shard, command.num_shards))
        peaks = peak_bytes(self._flat.parameters.device)
        reestimated = None if self._statistics is None else self._statistics.reestimated
        if command.shard == 0 and reestimated is not None:
            self._link.send(EvaluatedAgain(0, sums, peaks, reestimated.numpy().tobytes()))
        else:
            self._link.send(ShardEvaluated(command.shard, sums, peaks))

    def _pull(self, version_in_slot: int | None) -> int:
        """Bring one consistent version into the model, or the point that lies in the slot; return its version.

        Args:
            version_in_slot: of the point; None: the newest version is wanted, and in an evaluation nobody asks which.
        """
        parameters = self._flat.parameters
        if self._through is not None:
            self._through.receive_vector(self._staging)
            if self._staging is not parameters:
                parameters.copy_(self._staging)
            if self._statistics is not None:
                self._through.receive_vector(self._statistics.values)
            return version_in_slot or 0
        if version_in_slot is not None:
            assert self._slot is not None
            parameters.copy_(self._slot)
            if self._statistics is not None:
                self._statistics.values.copy_(self._statistics.moved[0])
            return version_in_slot
        assert self._segment is not None
        statistics = None if self._statistics is None else self._statistics.values
        return self._segment.pull(parameters, self._link.check, statistics)

    def _push(self, gradients: Tensor) -> None:
        """Nothing to do where they were computed in the slot."""
        if self._through is not None:
            self._through.send(GradientFollows())
            self._through.send_vector(gradients if gradients.is_cpu else self._staging.copy_(gradients))
            if self._statistics is not None:
                self._through.send_vector(self._statistics.moved)
            self._through.flush()
        elif self._slot is not None and gradients.data_ptr() != self._slot.data_ptr():
            self._slot.copy_(gradients)

    def _compute(self, command: Compute) -> bool:
        """Answer with a gradient; False if the run is over."""
        began = time.perf_counter()
        version = self._pull(command.version_in_slot)
        pulled = time.perf_counter()
        indices = indices_of(command.batches)
        worker = self._worker
        if indices[-1] >= self._num_batches and not worker.has_batch(indices[-1]):
            os._exit(NO_BATCH_LEFT)  # its exit code tells the server that it has left, and others compute the rest
        if command.learning_rate is None:
            gradient = worker.gradient(indices[0])
        else:
            self._inner = self._inner or self._run.recipe.on(self._flat.parameters, self._flat.layout)
            gradient = worker.pseudo_gradient(indices, self._inner, command.learning_rate)
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)
        wait_seconds = self._straggling.wait_seconds(time.perf_counter() - pulled, command.first_draw, len(indices))
        if wait_seconds > 0:
            self._link.sleep_unless_woken(wait_seconds)  # an abandoned gradient need not be waited for
        computed = time.perf_counter()
        self._push(self._flat.gradients)
        pushed = time.perf_counter()
        taken = Taken(pulled - began, computed - pulled, pushed - computed, began - self._idle_since)
        self._link.send(Computed(command.dispatch, version, gradient, taken))
        self._idle_since = time.perf_counter()
        # This is done while the server applies. Workers at equal speeds take every N-th batch, so the same stride is
        # likely.
        worker.prepare(max(0, 2 * indices[0] - self._last_index))
        self._last_index = indices[0]
        return True


class HogwildWorker(ServedWorker):
    """Computes on the shared parameters and steps them, without locks; holds a step while they are frozen."""

    def __init__(self, run: Run, link_source: LinkSource, number: int, profile: Profile | None, tells: bool) -> None:
        super().__init__(run, link_source, number, profile, tells)
        assert self._segment is not None
        assert isinstance(run.runtime, Hogwild)
        self._shared = self._segment
        self._schedule = run.schedule
        self._optimizer = run.recipe.on(self._flat.parameters, self._flat.layout)
        if run.runtime.share_state:
            self._optimizer.share_state(self._segment.extra)

    def _bound(self, model: torch.nn.Module) -> FlatModel:
        assert self._segment is not None
        return FlatModel(model, parameters=self._segment.parameters, keep_parameters=True)

    def _pull(self, version_in_slot: int | None) -> int:
        return self._shared.version

    def _compute(self, command: Compute) -> bool:
        """Answer when the step is taken; False if the run is over."""
        began = time.perf_counter()
        version = self._pull(None)
        gradient = self._worker.gradient(command.batches[0].first)
        until = time.perf_counter() + self._straggling.wait_seconds(time.perf_counter() - began, command.first_draw)
        while (left := until - time.perf_counter()) > 0:
            self._link.sleep_unless_woken(left)
            held = time.perf_counter()
            if not self._may_step():
                return False
            until += time.perf_counter() - held  # whoever holds does not get nearer to its end
        computed = time.perf_counter()
        if not self._may_step():
            return False
        control = self._shared.control
        if gradient.weight:
            self._optimizer.step(self._flat.gradients, self._schedule(int(control[SAMPLES]) + gradient.num_samples))
        taken = Taken(compute=computed - began, wait=began - self._idle_since)
        self._link.send(Computed(command.dispatch, version, gradient, taken))
        self._idle_since = time.perf_counter()
        return True

    def _may_step(self) -> bool:
        """Keep the gradient unapplied while the parameters are frozen; False if the run is over."""
        if not int(self._shared.control[FROZEN]):
            return True
        self._link.send(Holding())
        while not isinstance(command := self._link.receive(), Proceed | Stop):
            if isinstance(command, Evaluate):
                self._evaluate(command)
        return isinstance(command, Proceed)
