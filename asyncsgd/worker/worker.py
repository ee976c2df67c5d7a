"""A worker: model plus batches, parameters in, gradient out. It knows no server, no rule and no other worker."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel, parallel_apply, replicate

from asyncsgd.core.flat import FlatModel, cannot_freeze
from asyncsgd.core.optimizers import Optimizer, PlainSGD
from asyncsgd.core.running_statistics import UnchangedBuffers
from asyncsgd.core.state import restore, state_of
from asyncsgd.data.random import dropout_seed
from asyncsgd.errors import UsageError
from asyncsgd.records.events import Gradient
from asyncsgd.settings.groups import Machine
from asyncsgd.tasks.base import Batch, Data, Sums, Task, map_tensors, row_counts, tensors_in, to_device
from asyncsgd.worker.evaluation import evaluate_sets, reestimate, seed_noise
from asyncsgd.worker.prefetching import Prefetching


def take_local_steps(
    indices: Sequence[int],
    gradient_of: Callable[[int], Gradient],
    parameters: Tensor,
    gradients: Tensor,
    start: Tensor,
    optimizer: Optimizer | PlainSGD,
    learning_rate: float,
) -> Gradient:
    """Take one step per batch from `start`, where `parameters` lie; `gradients`, `(P,)`, becomes start minus end.

    Args:
        gradient_of: computes a batch's gradient at `parameters` into `gradients`.
        optimizer: steps `parameters`.

    Returns:
        The mean loss over all batches' loss terms, NaN if there are none, and the sums of weights and samples.
    """
    loss = weight = 0.0
    num_samples = 0
    loss_scales: tuple[float, ...] = ()
    for index in indices:
        gradient = gradient_of(index)
        if gradient.frozen:
            raise cannot_freeze(gradient.frozen[0])
        if gradient.weight:
            optimizer.step(gradients, learning_rate)
            loss += gradient.loss * gradient.weight
        weight += gradient.weight
        num_samples += gradient.num_samples
        loss_scales += gradient.loss_scales
    with torch.no_grad():
        torch.sub(start, parameters, out=gradients)
    return Gradient(loss / weight if weight else math.nan, weight, num_samples, loss_scales)


def _nothing() -> None:
    pass


class Loss(nn.Module):
    """A task's loss on one model as a module, so that DistributedDataParallel and compilers can wrap it."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return self.task.loss(self.task.outputs(self.model, batch), batch)


class OnAllGPUs(nn.Module):
    """A `Loss` computed on all GPUs of this process: a share of the batch on each, by `torch.nn.DataParallel`'s parts.

    Parameters are copied to every GPU for every batch, and gradients added up on the first. With losses L_k of w_k loss
    terms on each it gives sum_k (w_k / w) L_k. Without several GPUs it is the `Loss` itself.
    """

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self._devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]

    def forward(self, batch: Batch) -> Tensor:
        first = next(self.loss.parameters()).device
        rows = min(row_counts(batch), default=1)
        devices = self._devices[: max(rows, 1)] if first.type == "cuda" else []
        if len(devices) < 2:
            return self.loss(batch)
        task = self.loss.task
        split = task.split(batch, len(devices))
        weights = [task.weight(part) for part in split]
        shares = [weight / sum(weights) for weight in weights]
        parts = [(to_device(part, device),) for part, device in zip(split, devices, strict=True)]
        losses = parallel_apply(replicate(self.loss, devices), parts, devices=devices)
        terms = []
        for loss, share in zip(losses, shares, strict=True):
            if share:  # the mean over no loss term at all may not be a number
                terms.append(share * loss.to(first))
        return torch.stack(terms).sum()


class Replicated(DistributedDataParallel):
    """A `Loss` whose gradients are summed over ranks, also where a batch leaves parameters unused, as experts do.

    DistributedDataParallel sends gradients in buckets, and sends none that waits for a parameter. So `complete` hands
    zeros to the parameters that the last backward pass did not reach. It is called after that pass, on every rank.

    Args:
        loss: its trainable parameters are set to rank 0's, in place; its buffers stay as each rank built them.
    """

    def __init__(self, loss: nn.Module) -> None:
        with warnings.catch_warnings():
            # torch 2.13 has another name for it that older versions do not know.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(loss, broadcast_buffers=False)
        self._trained = [parameter for parameter in loss.parameters() if parameter.requires_grad]
        self._reached: set[int] = set()
        self._nodes = []
        for number, parameter in enumerate(self._trained):
            # The node that adds up a parameter's gradient, whose end torch's own hook waits for too.
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            assert node is not None
            node.register_hook(lambda *_, number=number: self._reached.add(number))
            self._nodes.append(node)

    def forward(self, *batch: Any) -> Any:
        self._reached.clear()
        return super().forward(*batch)

    def complete(self) -> None:
        """Hand zeros to the parameters that the last backward pass has not reached."""
        missing = [one for number, one in enumerate(self._trained) if number not in self._reached]
        frozen = [one for one in missing if not one.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)  # a bucket waits for those that are frozen, too
        if missing:
            torch.autograd.backward(missing, [torch.zeros_like(one) for one in missing])
        for parameter in frozen:
            parameter.requires_grad_(False)


_NO_SAVINGS = Machine()
LOOKED_AT = 9
"""Batches whose shapes are compared before the loss is compiled. Texts of about one length come in runs of 8."""


def checkpoint_activations(model: nn.Module) -> None:
    """Let `model` keep the inputs of its layers alone, and compute the rest again in the backward pass.

    Raises:
        UsageError: if it cannot; the message gives the reason.
    """
    # transformers 5.23 gave the method a new name, and version 6 is to know no other.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    kind = type(model).__name__
    fix = "drop --gradient-checkpointing, and type --micro-batches for less memory"
    if enable is None:
        raise UsageError(f"a {kind} has no method gradient_checkpointing_enable, as transformers models have; {fix}")
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise UsageError(f"{kind}: {error}; {fix}") from error


def check_compiler(device: str) -> None:
    """Refuse `Machine.compile` where it would fail in every worker.

    Raises:
        UsageError: on a CPU without a C++ compiler.
    """
    if device != "cpu":
        return
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    if not any(map(shutil.which, compilers)):
        raise UsageError("--compile writes C++ for a CPU, and there is no compiler here; install g++, or drop it")


class _Part(NamedTuple):
    """A part of a batch that is computed at once, on the worker's device, and its share of the batch's loss terms."""

    number: int
    batch: Batch
    share: float


class Worker:
    """Computes gradients of a task on the batches of one stream.

    With K = `micro_batches` above 1 a batch is cut into K parts, which are computed one after the other. With w_k, the
    loss terms of part k, the gradient and the loss are those of the whole batch, up to rounding and dropout:

        g = sum_k (w_k / w) grad f(x; part k),    w = sum_k w_k

    Only the activations of one part are in memory at a time. Every part has dropout of its own. A model that
    normalises over the samples of a batch (BatchNorm) sees the parts, not the batch. Running statistics begin at
    ``flat.statistics.values`` in each gradient, and what its forward passes make of them is ``flat.statistics.moved``.

    Args:
        flat: the model; its gradient vector receives the result.
        task: what the model is to learn.
        data: the task's, with the same seed.
        seed, stream: with a batch's index they seed its dropout, so a batch has one dropout whoever computes it.
        precision: float32, or the type of the forward pass under autocast (bfloat16, float16).
        micro_batches: K, parts of a batch.
        all_gpus: whether a batch is computed on all GPUs of this process; see `OnAllGPUs`.
        savings: ways to less time or less memory; none of them changes which gradient it is.
        watches: whether all buffers but those of ``flat.statistics`` stood still in a dry run, and have to.
        statistics_batches: over how many batches running statistics are estimated again for an evaluation; 0: they are
            evaluated as they are.
    """

    KEPT = ("_loss_scale",)

    def __init__(
        self,
        flat: FlatModel,
        task: Task,
        data: Data,
        *,
        seed: int,
        stream: int = 0,
        precision: torch.dtype = torch.float32,
        micro_batches: int = 1,
        all_gpus: bool = False,
        savings: Machine = _NO_SAVINGS,
        watches: bool = False,
        statistics_batches: int = 0,
    ) -> None:
        self.flat = flat
        self._statistics_batches = statistics_batches
        self._still = None
        if watches:
            self._still = UnchangedBuffers(flat.model, () if flat.statistics is None else flat.statistics.names)
        self.savings = savings
        if savings.gradient_checkpointing:
            checkpoint_activations(flat.model)
        self.task = task
        self.data = data
        loss = Loss(task, flat.model)
        self.loss: nn.Module = OnAllGPUs(loss) if all_gpus else loss
        """The function from a batch to its loss. It may be wrapped (DistributedDataParallel)."""
        self._seed = seed
        self._stream = stream
        self._device = flat.parameters.device
        self._precision = precision
        self._micro_batches = micro_batches
        self._prepared: tuple[int, list[_Part], float] | None = None
        self._prefetching = Prefetching(self._make, savings.prefetch) if savings.prefetch else None
        self._start: Tensor | None = None
        self._loss_scale = LossScale() if precision == torch.float16 else None
        self.compile_seconds = self._compile() if savings.compile else 0.0

    def _compile(self) -> float:
        """Compile the loss and compute a first gradient with it; the seconds that took.

        Every process compiles so, before any clock runs and before ranks wait for one another.
        """
        began = time.perf_counter()
        batches = (self.data.batch(self._stream, index) for index in range(LOOKED_AT))
        shapes = {str([tensor.shape for tensor in tensors_in(batch)]) for batch in batches}
        # Ranks would split what is compiled later at their buckets, which torch cannot with checkpointed activations.
        torch._dynamo.config.optimize_ddp = False
        before = state_of(self)
        self.gradient(0)  # a task may set up things in its first pass, such as hooks, and code from before it is slow
        # Where shapes differ, a compiler that took the first for the only one would begin again at the second.
        self.loss.compile(dynamic=len(shapes) > 1 or None)
        self.gradient(0)
        restore(self, before)
        return time.perf_counter() - began

    def gradient(
        self,
        index: int,
        weigh: Callable[[float], float] | None = None,
        loss_scale: float | None = None,
    ) -> Gradient:
        """Compute the gradient of batch `index` at the current parameters into ``flat.gradients``, `(P,)`.

        Args:
            weigh: given the batch's loss terms, returns a factor for its gradient, not for the loss reported. A runtime
                that adds gradients inside the backward pass needs it.
            loss_scale: the scale of the loss, for a gradient in float16 that is computed again; None: this worker's
                own, which depends on what it has computed before.

        Returns:
            The gradient's loss and counts. For a batch without a loss term the weight is 0 and the loss is NaN, which
            is no divergence; its gradient is zero.
        """
        parts, weight = self._take(index)
        factor = 1.0 if weigh is None else weigh(weight)
        loss = math.nan  # it stays so for a batch without a loss term: the loop looks at the weight first
        flat = self.flat
        statistics = flat.statistics
        own_scale = self._loss_scale if loss_scale is None else None
        while True:
            flat.release_gradients()
            if statistics is not None:
                statistics.begin()
            scale = loss_scale
            if own_scale is not None:
                scale = own_scale.value
            if weight:
                loss = self._backward(index, parts, factor if scale is None else factor * scale)
            else:  # other ranks' gradients come with their scale, and are computed again by all of them
                self._exchange_nothing(index)
            flat.gather_gradients()
            if scale is not None:
                flat.gradients.div_(scale)
            if own_scale is not None and not own_scale.accept(flat):
                continue
            if statistics is not None:
                statistics.end()
            scales = () if scale is None else (scale,)
            return Gradient(loss, weight, self.task.batch_size, scales, flat.frozen)

    def cut_into(self, micro_batches: int) -> None:
        """Compute batches in so many parts from here on, as a run did that went on in more."""
        if micro_batches != self._micro_batches:
            self._micro_batches = micro_batches
            self._prepared = None
            if self._prefetching is not None:
                self._prefetching.forget()

    def _backward(self, index: int, parts: Sequence[_Part], factor: float) -> float:
        """Add up `factor` times the parts' gradients, weighted by their shares; the mean loss over all loss terms."""
        losses = []
        statistics = self.flat.statistics
        for part in parts:
            # The one allowed use of torch's default generator: dropout draws from nothing else.
            seed_noise(dropout_seed(self._seed, self._stream, index, part.number), self._device)
            # The last part's backward pass makes the exchange with other ranks, for all parts at once.
            ddp = self.loss if isinstance(self.loss, Replicated) and part is not parts[-1] else None
            with contextlib.nullcontext() if ddp is None else ddp.no_sync():
                loss = self._forward(part.batch)
                if statistics is not None:
                    statistics.note()
                scale = factor * part.share
                (loss if scale == 1.0 else loss * scale).backward()
            if statistics is not None and part is not parts[-1]:
                statistics.put_back()  # layers that were computed again have moved them again
            losses.append(loss.detach())
        self.flat.unfreeze_used()
        if isinstance(self.loss, Replicated):
            self.loss.complete()
        return sum(part.share * float(loss) for part, loss in zip(parts, losses, strict=True))

    def _forward(self, batch: Batch) -> Tensor:
        """The loss of a batch, or of a part of one."""
        before = self.flat.before_forward()
        with self._autocast():
            loss: Tensor = self.loss(batch)
        self.flat.check_forward(before)
        if self._still is not None:
            self._still.check()
        return loss

    def _exchange_nothing(self, index: int) -> None:
        """Give the gradient of a batch without a loss term, zero, into the exchange. Other ranks wait for it."""
        if isinstance(self.loss, Replicated):
            # The exchange begins with a forward pass.
            self._forward(self._on_device(self.data.batch(self._stream, index)))
            self.loss.complete()
        else:
            self.flat.frozen = ()

    def pseudo_gradient(
        self,
        indices: Sequence[int],
        optimizer: Optimizer | PlainSGD,
        learning_rate: float,
        loss_scales: Sequence[float] = (),
    ) -> Gradient:
        """Take one local step per batch from the current parameters; ``flat.gradients`` becomes start minus end.

        The parameters stay where the last step left them. The loss is the mean over all batches' loss terms.

        Args:
            optimizer: steps ``flat.parameters``; its state is this worker's own and stays from call to call.
            loss_scales: the scale of each batch's loss where the gradients are computed again; see `gradient`.
        """
        if self._start is None:
            self._start = torch.empty_like(self.flat.parameters)
        with torch.no_grad():
            self._start.copy_(self.flat.parameters)
        flat = self.flat
        scales = iter(loss_scales)
        statistics = self.flat.statistics
        with contextlib.nullcontext(_nothing) if statistics is None else statistics.local_steps() as follow:

            def gradient_of(index: int) -> Gradient:
                gradient = self.gradient(index, loss_scale=next(scales, None))
                follow()
                return gradient

            return take_local_steps(
                indices, gradient_of, flat.parameters, flat.gradients, self._start, optimizer, learning_rate
            )

    def evaluate(self, shard: int, num_shards: int, *, estimates: bool = True) -> Sums:
        """The sums of a shard of every evaluation set at the current parameters; see `evaluate_sets`.

        Args:
            estimates: whether running statistics are estimated again, where the run evaluates such. A process that
                evaluates several shards does it with the first.
        """
        statistics = self.flat.statistics
        if statistics is not None:
            if estimates and self._statistics_batches:
                reestimate(self.flat, self.task, self.data, self._seed, self._statistics_batches)
            statistics.put(statistics.evaluated)
        return evaluate_sets(self.task, self.flat.model, self.data.evaluation, shard, num_shards, self._device)

    def prepare(self, index: int) -> None:
        """Make batch `index` ahead of time, as a guess. A wrong guess costs only its computation, and what it raises is
        not told: the data may end before it.
        """
        self._prepared = None
        if self._prefetching is None:
            with contextlib.suppress(Exception):
                self._prepared = (index, *self._make(index))

    def has_batch(self, index: int) -> bool:
        """Whether the data have batch `index`, which is made for the next gradient."""
        if self._prefetching is not None:
            return self._prefetching.has(index)
        if self._prepared is None or self._prepared[0] != index:
            self.prepare(index)
        return self._prepared is not None

    def _make(self, index: int) -> tuple[list[_Part], float]:
        """The parts of batch `index` on the device, and its loss terms; called by another thread with `prefetch`."""
        batch = self.data.batch(self._stream, index)
        if self._micro_batches == 1:
            return [_Part(0, self._on_device(batch), 1.0)], self.task.weight(batch)
        split = self.task.split(batch, self._micro_batches)
        weights = [self.task.weight(part) for part in split]
        weight = sum(weights)
        parts = []
        for number, (part, own) in enumerate(zip(split, weights, strict=True)):
            if own > 0:  # the mean over no loss term at all may not be a number
                parts.append(_Part(number, self._on_device(part), own / weight))
        return parts, weight

    def _on_device(self, batch: Batch) -> Batch:
        """Return the batch on the device. A thread that makes batches ahead does not wait for a copy to a GPU."""
        if self._prefetching is None or self._device.type == "cpu":
            return to_device(batch, self._device)
        with torch.cuda.device(self._device):  # of this thread, or pinning would take memory of the first GPU

            def move(tensor: Tensor) -> Tensor:
                pinned = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
                return pinned.to(self._device, non_blocking=True)

            return map_tensors(move, batch)

    def _take(self, index: int) -> tuple[list[_Part], float]:
        if self._prefetching is not None:
            return self._prefetching.take(index)
        prepared = self._prepared
        self._prepared = None
        if prepared is None or prepared[0] != index:
            return self._make(index)
        return prepared[1:]

    def _autocast(self) -> AbstractContextManager[object]:
        if self._precision == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._precision)


class LossScale:
    """Dynamic loss scaling for float16: halved when a gradient overflows, doubled after `PATIENCE` that did not.

    An overflowed batch is computed again at the halved scale. So no batch is lost, and nothing non-finite leaves the
    worker. (torch's GradScaler skips the step instead, which a server cannot tell from a lost gradient.) Below 1 the
    overflow is the model's own and is passed on."""

    KEPT = ("value", "_good")
    PATIENCE = 2000

    def __init__(self) -> None:
        self.value = 2.0**16
        self._good = 0

    def accept(self, flat: FlatModel) -> bool:
        """Look at a gradient computed with the scale; return False if the batch has to be computed again."""
        if not bool(torch.isfinite(flat.gradients).all()) and self.value > 1.0:
            self.value /= 2.0
            self._good = 0
            return False
        self._good += 1
        if self._good == self.PATIENCE:
            self.value = self.value * 2.0
            self._good = 0
        return True
