"""A worker's process: it builds the model, and obeys until the server tells it to stop or is gone. A worker is a
`ServedWorker`, or a `HogwildWorker` if workers step the shared parameters themselves.
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


def run_worker(
    run: Run,
    link_source: LinkSource,
    worker: int,
    profile: Profile | None = None,
    tells_compile_seconds: bool = False,
) -> None:
    """Entry point of a worker. It blocks until the worker is told to stop, and ends the process.

    Args:
        run: the run as `Run.as_sent_to` gives it to this worker.
        link_source: how the worker comes to its link with the server.
        worker: the number of the worker.
        profile, tells_compile_seconds: see `Run.worker`.
    """
    try:
        set_up_process(run.runtime.threads)
        kind = HogwildWorker if run.runtime.steps_in_workers else ServedWorker
        kind(run, link_source, worker, profile, tells_compile_seconds).obey()
    except Gone:
        os._exit(1)  # the server is gone and has said why; there is nobody to report to
    except Exception as error:
        fail(f"worker {worker}", error)
    sys.stdout.flush()
    os._exit(0)  # skips the teardown of threads that torch may still have waiting


class ServedWorker:
    """Pulls a version, computes a gradient or takes local steps, and brings the result to the worker's slot."""

    def __init__(
        self, run: Run, link_source: LinkSource, number: int, profile: Profile | None, tells_compile_seconds: bool
    ) -> None:
        self._run = run
        self._straggling = Straggling.of(run, number)
        self._num_batches = run.limits.num_batches(run.task.batch_size)
        self._device = torch.device(run.device)
        self._link, self._segment = link_source.connect(number)
        self._vector_link = self._link if isinstance(self._link, Pair) else None
        """The link, if vectors travel through it; None: they lie in the segment."""
        self._slot: Tensor | None = None
        if self._segment is not None and self._segment.slots:
            self._slot = self._segment.slots[number]
        self._flat = self._flat_model(run.task.model(run.seed).to(self._device))
        self._statistics = self._flat.statistics
        if self._statistics is not None and self._slot is not None and self._segment is not None:
            self._statistics.moved = self._segment.moved[number]
        self._worker = run.worker(self._flat, profile, tells_compile_seconds=tells_compile_seconds)
        self._inner: Optimizer | None = None
        self._cpu_buffer = self._flat.parameters.cpu()
        """The link receives vectors into this one, which on a CPU is the model's own. Gradients on a GPU are sent from
        it."""
        self._last_index = 0
        """The index of the last batch. The next one is guessed from it."""
        self._idle_since = 0.0

    def _flat_model(self, model: torch.nn.Module) -> FlatModel:
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
            # A `Wake` that comes here was for a wait that is over.
        self._flat.check()  # that the model still has its parameters in the flat vector

    def _carry_out(self, command: Compute) -> bool:
        """Run `_compute`. If it raises RunError, tell the server, which ends the run. Return whether the run goes
        on."""
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
        """Bring a point from the slot, or else the newest consistent version, into the model.

        Args:
            version_in_slot: the version of the point in the slot; None: the newest version is wanted.

        Returns:
            The version that the model has now. It means nothing in an evaluation, where nobody asks for it.
        """
        parameters = self._flat.parameters
        statistics = self._statistics
        link = self._vector_link
        if link is not None:
            link.receive_vector(self._cpu_buffer)
            if self._cpu_buffer is not parameters:
                parameters.copy_(self._cpu_buffer)
            if statistics is not None:
                link.receive_vector(statistics.values)
            return version_in_slot or 0  # 0 in an evaluation; with a pair a gradient is always given a version
        if version_in_slot is not None:
            assert self._slot is not None
            parameters.copy_(self._slot)
            if statistics is not None:
                statistics.values.copy_(statistics.moved[0])
            return version_in_slot
        assert self._segment is not None
        values = None if statistics is None else statistics.values
        return self._segment.pull(parameters, self._link.check, values)

    def _push(self, gradients: Tensor) -> None:
        """Bring gradients to the server, through the link or into the slot, unless they were computed in the slot."""
        link = self._vector_link
        if link is not None:
            link.send(GradientFollows())
            link.send_vector(gradients if gradients.is_cpu else self._cpu_buffer.copy_(gradients))
            if self._statistics is not None:
                link.send_vector(self._statistics.moved)
            link.flush()
        elif self._slot is not None and gradients.data_ptr() != self._slot.data_ptr():
            self._slot.copy_(gradients)

    def _compute(self, command: Compute) -> bool:
        """Compute a gradient and send it. Return whether the run goes on."""
        began = time.perf_counter()
        version = self._pull(command.version_in_slot)
        pulled = time.perf_counter()
        indices = indices_of(command.batches)
        worker = self._worker
        # Workers are also given batches after the last one of the budget, in case gradients are dropped. If the data
        # end there, the exit code tells the server that this worker has left, and others compute the rest.
        if indices[-1] >= self._num_batches and not worker.has_batch(indices[-1]):
            os._exit(NO_BATCH_LEFT)
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
        # The next batch is prepared while the server applies the gradient. At equal speeds a worker takes every N-th
        # batch, so the same stride is likely.
        stride = indices[0] - self._last_index
        worker.prepare(max(0, indices[0] + stride))
        self._last_index = indices[0]
        return True


class HogwildWorker(ServedWorker):
    """Computes gradients at the shared parameters and steps them, without locks. It waits while they are frozen."""

    def __init__(
        self, run: Run, link_source: LinkSource, number: int, profile: Profile | None, tells_compile_seconds: bool
    ) -> None:
        super().__init__(run, link_source, number, profile, tells_compile_seconds)
        assert self._segment is not None
        assert isinstance(run.runtime, Hogwild)
        self._shared = self._segment
        self._schedule = run.schedule
        self._optimizer = run.recipe.on(self._flat.parameters, self._flat.layout)
        if run.runtime.share_state:
            self._optimizer.share_state(self._segment.extra)

    def _flat_model(self, model: torch.nn.Module) -> FlatModel:
        assert self._segment is not None
        return FlatModel(model, parameters=self._segment.parameters, keep_parameters=True)

    def _pull(self, version_in_slot: int | None) -> int:
        return self._shared.version

    def _compute(self, command: Compute) -> bool:
        """Compute a gradient, take the step and tell the server. Return whether the run goes on."""
        began = time.perf_counter()
        version = self._pull(None)
        gradient = self._worker.gradient(command.batches[0].first)
        until = time.perf_counter() + self._straggling.wait_seconds(time.perf_counter() - began, command.first_draw)
        frozen_seconds = 0.0  # they do not count
        while (left := until + frozen_seconds - time.perf_counter()) > 0:
            self._link.sleep_unless_woken(left)
            frozen_at = time.perf_counter()
            if not self._may_step():
                return False
            frozen_seconds += time.perf_counter() - frozen_at
        computed = time.perf_counter() - frozen_seconds
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
        """Wait while the parameters are frozen. Return whether the run goes on."""
        if not int(self._shared.control[FROZEN]):
            return True
        self._link.send(Holding())
        while not isinstance(command := self._link.receive(), Proceed | Stop):
            if isinstance(command, Evaluate):
                self._evaluate(command)
        return isinstance(command, Proceed)
