"""What a model's forward pass changes beside its parameters: running statistics of its layers, and counters.

BatchNorm, and InstanceNorm that tracks, keep a moving average of the statistics of their batches. With momentum m,
every call of a layer moves its average s by the statistics b of the call's batch:

    s <- (1 - m) s + m b

A gradient reads s_0, calls the layer `calls` times, and leaves s_1. Meanwhile other gradients have moved the server's
s. With q = (1 - m)^calls the server's becomes

    s <- s_1 + q (s - s_0)

which is the moving average of all batches' own statistics, and s_1 to the bit where nothing came between. A BatchNorm
with momentum=None has the mean of all batches: with N calls so far at the server, n where the gradient began, k in it,

    s <- s_1 + (N (s - s_1) - n (s_0 - s_1)) / (N + k)

which is (N s + (n + k) s_1 - n s_0) / (N + k), and s_1 to the bit where nothing came between.

Counters add up, which is q = 1. Any other buffer (the vectors of spectral norm, a layer of one's own) is that of the
newest gradient that was used, which is q = 0.

After local steps s_0 is where the first of them began, s_1 what the last one left, and q the product over all of them.
Several workers' local steps that are used together with weights w_i move the moving averages to their mean

    s <- sum_i w_i (s_1i + q_i (s - s_0i)) / sum_i w_i

which is the weighted mean of the s_1i where all began at s. Everything else counts every batch, as above.

Where models are averaged, as by EASGD and without a server, so are their moving averages and means of all batches.
Counters and other buffers are those of each model; its own gradients move them as above.

Shapes: S elements of all these buffers, in the order of the model's names; L layers that call."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from asyncsgd.errors import RunError

AVERAGED = "moving averages"
MEAN = "means of all batches"
COUNTED = "added up"
NEWEST = "the newest gradient's"
"""How a buffer is kept at the server: one of these four."""
TRACKED = ("running_mean", "running_var", "num_batches_tracked")
"""The buffers of torch's normalisation layers."""
NUM_ROWS = 3
"""How many vectors a gradient brings, `(3, S)`: the statistics after it, those that it read, and q."""


def is_statistic_or_counter(before: Tensor, after: Tensor | None) -> bool:
    """Whether a buffer that a forward pass has changed can be kept as a statistic or a counter.

    A statistic is float32. A counter is int64 and has not become smaller. Shape and type stay.
    """
    if after is None or after.shape != before.shape or after.dtype != before.dtype:
        return False
    return after.dtype == torch.float32 or (after.dtype == torch.int64 and bool((after.cpu() >= before.cpu()).all()))


class RunningStatistics:
    """The running statistics of a model as one vector, and what its forward passes make of them.

    Args:
        model: the model whose buffers these are.
        also: names of further buffers that forward passes change, beside those of torch's normalisation layers.

    >>> model = nn.BatchNorm1d(1)
    >>> statistics = RunningStatistics(model)
    >>> statistics.begin()
    >>> _ = model(torch.tensor([[1.0], [3.0]]))
    >>> statistics.note()
    >>> statistics.end()
    >>> statistics.move(statistics.moved)
    >>> statistics.names, [round(value, 2) for value in statistics.values.tolist()]
    (('running_mean', 'running_var', 'num_batches_tracked'), [0.2, 1.1, 1.0])
    """

    KEPT = ("values", "names")

    def __init__(self, model: nn.Module, also: Collection[str] = ()) -> None:
        self._model = model
        modules = dict(model.named_modules())
        self._layers = [
            (name, module)
            for name, module in modules.items()
            if isinstance(module, _NormBase) and module.training and module.running_mean is not None
        ]
        layer_of = {name: number for number, (name, _) in enumerate(self._layers)}
        buffers = dict(model.named_buffers())
        kinds: dict[str, str] = {}
        counters: list[int] = []
        of_batches: list[int] = []
        self._slices: dict[str, slice] = {}
        self._averages: list[tuple[int, slice]] = []
        """(layer, place in the vector) of each moving average."""
        self._means: list[tuple[slice, str]] = []
        """(place in the vector, name of its counter) of each mean of all batches."""
        averaged: list[int] = []
        end = 0
        for name, buffer in buffers.items():
            module_name, _, local_name = name.rpartition(".")
            layer = layer_of.get(module_name)
            if layer is None and name not in also:
                continue
            place = slice(end, end + buffer.numel())
            end = place.stop
            self._slices[name] = place
            positions = range(place.start, place.stop)
            is_tracked = layer is not None and local_name in TRACKED
            if is_tracked:
                of_batches.extend(positions)
            if not buffer.is_floating_point():
                kinds[name] = COUNTED
                counters.extend(positions)
                continue
            if layer is None or not is_tracked:
                kinds[name] = NEWEST
                continue
            averaged.extend(positions)
            _, module = self._layers[layer]
            if module.momentum is None and isinstance(module, _BatchNorm):
                kinds[name] = MEAN
                counter = f"{module_name}.num_batches_tracked".lstrip(".")  # the model itself has an empty name
                self._means.append((place, counter))
            else:
                kinds[name] = AVERAGED
                self._averages.append((layer, place))
        self.kinds = kinds
        """Buffer's name -> how it is kept."""
        self.names = tuple(kinds)
        self._is_counter = _marked(end, counters)
        self._is_averaged = _marked(end, averaged)
        self._is_of_batches = _marked(end, of_batches)
        self._calls = torch.zeros(len(self._layers), dtype=torch.float64, device=_device(model))
        for number, (_, module) in enumerate(self._layers):
            module.register_forward_hook(functools.partial(_count, self._calls[number]))
        self.values = self._read()
        """float64 `(S,)`, on the CPU: the statistics at which gradients and evaluations begin. At the server, its
        own."""
        self.moved = torch.zeros(NUM_ROWS, len(self.values), dtype=torch.float64)
        """float64 `(3, S)`: the effect of the last gradient. The rows are the statistics after it, those that it read,
        and q."""
        self.reestimated: Tensor | None = None
        """float64 `(S,)`: the statistics that were estimated again at the current parameters, for their evaluation.
        None: none were."""
        self.note()

    @property
    def size(self) -> int:
        """S, the number of statistics."""
        return len(self.values)

    @property
    def are_of_batches(self) -> bool:
        """Whether a layer tracks the statistics of its batches, so that they can be estimated again."""
        return bool(self._is_of_batches.any())

    @property
    def evaluated(self) -> Tensor:
        """`(S,)`: the statistics that an evaluation sees."""
        return self.values if self.reestimated is None else self.reestimated

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that two processes compare before they exchange statistics."""
        return hashlib.sha256(repr((self.kinds, self.size)).encode()).hexdigest()[:8]

    @property
    def sha256(self) -> str:
        """The hash of the bytes of `values`: equal exactly when all bits are."""
        return hashlib.sha256(self.values.numpy().tobytes()).hexdigest()

    def describe(self) -> str:
        """Which buffers are kept in which way, in a sentence."""
        modules = dict(self._model.named_modules())
        counts: Counter[tuple[str, str, str]] = Counter()
        described: dict[str, list[str]] = {}
        for name, kind in self.kinds.items():
            module, _, buffer = name.rpartition(".")
            counts[kind, type(modules[module]).__name__, buffer] += 1
        for (kind, layer, buffer), number in counts.items():
            described.setdefault(kind, []).append(f"{number} {buffer} of {layer}")
        return "; ".join(f"{', '.join(buffers)}: {kind}" for kind, buffers in described.items())

    def begin(self) -> None:
        """Put `values` into the model, where a gradient, or an evaluation, begins."""
        self.put(self.values)
        self._calls.zero_()
        self.note()

    def note(self) -> None:
        """Note what the forward pass has left in the model, before activation checkpointing computes layers
        again in the backward pass."""
        self._after = self._read()
        self._calls_after = self._calls.clone()

    def put_back(self) -> None:
        """Put what was noted back into the model, from where the next micro-batch of the batch goes on."""
        self.put(self._after)
        self._calls.copy_(self._calls_after)

    def end(self) -> None:
        """Write the effect of the gradient on the statistics into `moved`."""
        after, read, q = self.moved
        after.copy_(self._after)
        read.copy_(self.values)
        q.zero_()
        q[self._is_counter] = 1.0
        calls = self._calls_after.tolist()
        for layer, place in self._averages:
            momentum = self._layers[layer][1].momentum
            q[place] = (1.0 - (momentum or 0.0)) ** calls[layer]  # InstanceNorm takes None for 0

    @contextmanager
    def local_steps(self) -> Iterator[Callable[[], None]]:
        """A context for several local steps. Call the yielded function after each step: the next one then begins at the
        statistics that it left. At the end `moved` is the effect of all steps together on the `values` of before, and
        `values` are those that the last step left.
        """
        began = self.values.clone()
        product = torch.ones_like(began)

        def follow() -> None:
            after, _, q = self.moved
            product.mul_(q)
            self.values.copy_(after)

        yield follow
        self.moved[1].copy_(began)
        self.moved[2].copy_(product)

    def move(self, moved: Tensor) -> None:
        """Let `values` follow a gradient that is used. The server calls it.

        Args:
            moved: the effect of the gradient, `(3, S)`; see the attribute `moved` of the worker.
        """
        self._become(self.followed(self.values, moved))

    def followed(self, values: Tensor, moved: Tensor) -> Tensor:
        """Return what `values`, `(S,)`, the statistics of a model, become by a gradient whose effect is `moved`,
        `(3, S)`; new, `(S,)`. The names are those of the equations above.
        """
        after, read, q = moved
        now = after + q * (values - read)
        for place, counter in self._means:
            count = self._slices[counter]
            N = values[count]
            n = read[count]
            k = after[count] - n
            numerator = N * (values[place] - after[place]) - n * (read[place] - after[place])
            now[place] = after[place] + numerator / (N + k).clamp(min=1.0)
        # Round to float32, as the model's buffers do; else the server would hold other values than a gradient reads.
        return torch.where(self._is_counter, now, now.float().double())

    def mixed(self, values: Tensor, others: Tensor, share: float | Tensor) -> Tensor:
        """Return what `values`, `(S,)`, the statistics of a model, become if it goes a share of the way to another
        model, with the statistics `others`, `(S,)`; new.
        """
        mean = values + share * (others - values)
        return torch.where(self._is_averaged, mean.float().double(), values)

    def pull(self, moved: Tensor, share: float) -> Tensor:
        """Let `values`, and the statistics of the model that a worker keeps, go a share of the way to each other.

        Args:
            moved: the effect of the worker's local steps on its own statistics, `(3, S)`.
            share: how much of the way, in [0, 1].

        Returns:
            The statistics of the worker afterwards, `(S,)`, new.
        """
        replica = moved[0]
        centre = self.values.clone()
        followed = self.followed(centre, moved)
        self._become(torch.where(self._is_averaged, self.mixed(centre, replica, share), followed))
        return self.mixed(replica, centre, share)

    def become_mean(self, values: Tensor, weights: Tensor) -> None:
        """Set the moving averages and means of `values` to the weighted mean of those of several models.

        It is called when models are averaged, not when a gradient is used. `reestimated` stays: peers compute their
        mean model whenever somebody reads it, also after its evaluation, when nothing has changed.

        Args:
            values: the statistics of each model, `(N, S)`.
            weights: the weight of each model, `(N,)`.
        """
        mean = (values * weights[:, None]).sum(0) / weights.sum()
        self.values.copy_(torch.where(self._is_averaged, mean.float().double(), self.values))

    def move_by_mean(self, moved: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Let `values` follow the local steps of several workers that are used together. The server calls it.

        Args:
            moved: the effect of each worker's local steps, `(3, S)` each.
            weights: the weight of each worker's displacement.
        """
        now = self.values
        mean = torch.zeros_like(now)
        for each, weight in zip(moved, weights, strict=True):
            mean.add_(self.followed(self.values, each), alpha=weight / sum(weights))
            now = self.followed(now, each)
        for _, place in self._averages:
            now[place] = mean[place].float().double()
        self._become(now)

    def _become(self, values: Tensor) -> None:
        self.reestimated = None
        self.values.copy_(values)

    def use_memory(self, values: Tensor) -> None:
        """Keep `values` in the memory of this tensor from here on. The statistics of now are copied there."""
        values.copy_(self.values)
        self.values = values

    def restored(self) -> None:
        self.put(self.values)

    @contextmanager
    def estimating(self) -> Iterator[None]:
        """A context in which forward passes in training mode compute the cumulative means of the statistics of their
        batches, as `torch.optim.swa_utils.update_bn` does. At its end these become `reestimated`, and every buffer is
        put back.
        """
        self.begin()
        layers = [layer for _, layer in self._layers]
        momenta = [layer.momentum for layer in layers]
        hooks = []
        for layer, calls in zip(layers, self._calls, strict=True):
            layer.reset_running_stats()
            hooks.append(layer.register_forward_pre_hook(functools.partial(_weigh_alike, calls)))
        try:
            yield
            self.reestimated = torch.where(self._is_of_batches, self._read(), self.values)
        finally:
            for layer, momentum, hook in zip(layers, momenta, hooks, strict=True):
                layer.momentum = momentum
                hook.remove()
            self.put(self.values)

    def _read(self) -> Tensor:
        buffers = self._tensors()
        if not buffers:
            return torch.zeros(0, dtype=torch.float64)
        return torch.cat([buffer.detach().double().flatten() for buffer in buffers]).cpu()

    @torch.no_grad()
    def put(self, values: Tensor) -> None:
        """Write `values`, `(S,)`, into the model."""
        buffers = self._tensors()
        parts = values.to(buffers[0].device).split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))

    def _tensors(self) -> list[Tensor]:
        return [self._model.get_buffer(name) for name in self.names]


def statistics_of(model: nn.Module, also: Collection[str]) -> RunningStatistics | None:
    """Return the running statistics of a model; None: it has none. `also` is that of `RunningStatistics`."""
    statistics = RunningStatistics(model, also)
    return statistics if statistics.names else None


def _marked(size: int, positions: Sequence[int]) -> Tensor:
    """`(size,)`, true at these positions and false elsewhere."""
    marks = torch.zeros(size, dtype=torch.bool)
    marks[positions] = True
    return marks


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def _count(calls: Tensor, module: nn.Module, inputs: object, outputs: object) -> None:
    """A forward hook: count a call of a layer, which moves its statistics in training mode."""
    if module.training:
        calls.add_(1.0)


def _weigh_alike(calls: Tensor, module: _NormBase, inputs: object) -> None:
    """A forward pre-hook: set the momentum so that the coming call makes the average the mean over all calls."""
    module.momentum = 1.0 / (float(calls) + 1.0)


class UnchangedBuffers:
    """Checks that the buffers which the dry run saw unchanged stay so.

    Args:
        model: the model whose buffers they are.
        changing: names of the buffers that may change.
    """

    def __init__(self, model: nn.Module, changing: Collection[str]) -> None:
        self._modules = [(name, module, set(module._buffers)) for name, module in model.named_modules()]
        self._unchanged: dict[str, tuple[nn.Module, str]] = {}
        for prefix, module, names in self._modules:
            for name in sorted(names):
                full_name = f"{prefix}.{name}".lstrip(".")
                if full_name not in changing and module._buffers[name] is not None:
                    self._unchanged[full_name] = (module, name)
        self._seen = {name: self._version(name) for name in self._unchanged}
        self._digests = {name: _digest(tensor) for name, (tensor, _) in self._seen.items()}

    def check(self) -> None:
        """Refuse a forward pass that has changed one of the buffers, or made another.

        Raises:
            RunError: with the name of the buffer.
        """
        for prefix, module, names in self._modules:
            for name in module._buffers.keys() - names:
                raise _changes(f"{prefix}.{name}".lstrip("."), module)
        for name, (module, _) in self._unchanged.items():
            tensor, version = self._version(name)
            before, version_before = self._seen[name]
            if tensor is before and version == version_before:
                continue
            if _digest(tensor) != self._digests[name]:
                raise _changes(name, module)
            self._seen[name] = (tensor, version)

    def _version(self, name: str) -> tuple[Tensor | None, int]:
        module, local_name = self._unchanged[name]
        tensor = module._buffers.get(local_name)
        return tensor, 0 if tensor is None or tensor.is_inference() else tensor._version


def _digest(tensor: Tensor | None) -> tuple[object, ...]:
    if tensor is None:
        return ()
    elements = tensor.detach().cpu().contiguous().flatten()
    content = elements.view(torch.uint8).numpy()
    return tensor.shape, tensor.dtype, zlib.crc32(content.data)


def _changes(name: str, module: nn.Module) -> RunError:
    return RunError(
        f"the forward pass changes the buffer {name!r} of {type(module).__name__}, which it left alone in the pass "
        f"before training, so no other process follows it; let the first forward pass in training mode change it too, "
        f"or compute it from the parameters and the batch"
    )
