"""What a model's forward pass changes beside its parameters: running statistics of its layers, and counters.

BatchNorm, and InstanceNorm that tracks, keep a moving average of the statistics of their batches. With momentum m,
every call of a layer moves its average s by the statistics b of the call's batch:

    s <- (1 - m) s + m b

A gradient that read s_0 leaves s_1 behind, after so many calls. Meanwhile other gradients have moved the server's s.
With q = (1 - m)^calls the server's becomes

    s <- s_1 + q (s - s_0)

which is the moving average of all batches' own statistics, and s_1 to the bit where nothing came between. A BatchNorm
with momentum=None has the mean of all batches: with N calls at the server, n where the gradient began, k in it,

    s <- s_1 + (N (s - s_1) - n (s_0 - s_1)) / (N + k)

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
"""How a buffer is kept at the server."""
TRACKED = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's normalisation layers."""
KINDS = 3
"""Vectors that a gradient brings: the statistics after it, those that it read, and q."""


def moves(before: Tensor, after: Tensor | None) -> bool:
    """Whether a buffer that a forward pass has changed is a statistic or a counter."""
    if after is None or after.shape != before.shape or after.dtype != before.dtype:
        return False
    return after.dtype == torch.float32 or (after.dtype == torch.int64 and bool((after.cpu() >= before.cpu()).all()))


class RunningStatistics:
    """The running statistics of a model as one vector, and what its forward passes make of them.

    Args:
        model: whose buffers these are.
        also: buffers, by name, that forward passes change, beside those of torch's normalisation layers.

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
        layer_of = {f"{name}.".lstrip("."): number for number, (name, _) in enumerate(self._layers)}
        buffers = dict(model.named_buffers())
        rules: dict[str, str] = {}
        counters: list[int] = []
        of_batches: list[int] = []
        self._slices: dict[str, slice] = {}
        self._called: list[tuple[int, slice]] = []
        """Of each moving average its layer, and where it lies."""
        self._means: list[tuple[slice, str]] = []
        """Of each mean of all batches where it lies, and its counter."""
        averaged: list[int] = []
        end = 0
        for name, buffer in buffers.items():
            module_name, _, local_name = name.rpartition(".")
            layer = layer_of.get(f"{module_name}.".lstrip("."))
            if layer is None and name not in also:
                continue
            place = slice(end, end + buffer.numel())
            end = place.stop
            self._slices[name] = place
            if layer is not None and local_name in TRACKED:
                of_batches.extend(range(place.start, place.stop))
            if not buffer.is_floating_point():
                rules[name] = COUNTED
                counters.extend(range(place.start, place.stop))
            elif layer is None or local_name not in TRACKED:
                rules[name] = NEWEST
            elif self._layers[layer][1].momentum is None and isinstance(self._layers[layer][1], _BatchNorm):
                rules[name] = MEAN
                self._means.append((place, f"{module_name}.num_batches_tracked".lstrip(".")))
            else:
                rules[name] = AVERAGED
                self._called.append((layer, place))
            if rules[name] in (MEAN, AVERAGED):
                averaged.extend(range(place.start, place.stop))
        self.rules = rules
        """How each buffer is kept, by its name."""
        self.names = tuple(rules)
        self._is_counter = torch.zeros(end, dtype=torch.bool)
        self._is_counter[counters] = True
        self._is_averaged = torch.zeros(end, dtype=torch.bool)
        self._is_averaged[averaged] = True
        self._is_of_batches = torch.zeros(end, dtype=torch.bool)
        self._is_of_batches[of_batches] = True
        self._calls = torch.zeros(len(self._layers), dtype=torch.float64, device=_device(model))
        for number, (_, module) in enumerate(self._layers):
            module.register_forward_hook(functools.partial(_count, self._calls[number]))
        self.values = self._read()
        """float64 `(S,)`, on the CPU: where gradients and evaluations begin, and at the server its own."""
        self.moved = torch.zeros(KINDS, len(self.values), dtype=torch.float64)
        """float64 `(3, S)`: what the last gradient has made of them."""
        self.reestimated: Tensor | None = None
        """float64 `(S,)`: those that were estimated again at the current parameters, for their evaluation."""
        self.note()

    @property
    def size(self) -> int:
        """S."""
        return len(self.values)

    @property
    def are_of_batches(self) -> bool:
        """Whether a layer tracks the statistics of its batches, so that they can be estimated again."""
        return bool(self._is_of_batches.any())

    @property
    def evaluated(self) -> Tensor:
        """`(S,)`: those that an evaluation sees."""
        return self.values if self.reestimated is None else self.reestimated

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that two processes compare before they exchange statistics."""
        return hashlib.sha256(repr((self.rules, self.size)).encode()).hexdigest()[:8]

    @property
    def sha256(self) -> str:
        """Of the bytes of `values`: equal exactly when all bits are."""
        return hashlib.sha256(self.values.numpy().tobytes()).hexdigest()

    def describe(self) -> str:
        """Which buffers are kept by which rule, in a sentence."""
        modules = dict(self._model.named_modules())
        kinds = Counter(
            (rule, type(modules[name.rpartition(".")[0]]).__name__, name.rpartition(".")[2])
            for name, rule in self.rules.items()
        )
        said = {
            rule: [f"{number} {buffer} of {kind}" for (own, kind, buffer), number in kinds.items() if own == rule]
            for rule in dict.fromkeys(self.rules.values())
        }
        return "; ".join(f"{', '.join(of_rule)}: {rule}" for rule, of_rule in said.items())

    def begin(self) -> None:
        """Put `values` into the model, where a gradient, or an evaluation, begins."""
        self.put(self.values)
        self._calls.zero_()
        self.note()

    def note(self) -> None:
        """Note what the forward pass has left in the model, before its backward pass computes layers again."""
        self._after = self._read()
        self._calls_after = self._calls.clone()

    def put_back(self) -> None:
        """Let the next part of a batch go on from what was noted."""
        self.put(self._after)
        self._calls.copy_(self._calls_after)

    def end(self) -> None:
        """Write what the gradient has made of the statistics into `moved`."""
        after, before, kept = self.moved
        after.copy_(self._after)
        before.copy_(self.values)
        kept.zero_()
        kept[self._is_counter] = 1.0
        calls = self._calls_after.tolist()
        for layer, place in self._called:
            momentum = self._layers[layer][1].momentum
            kept[place] = (1.0 - (momentum or 0.0)) ** calls[layer]

    @contextmanager
    def local_steps(self) -> Iterator[Callable[[], None]]:
        """Within it, what it yields lets the next gradient begin where the last one ended; it is called after each.
        Afterwards `moved` is what all of them have made of the `values` of before; `values` stay where the last ended.
        """
        began = self.values.clone()
        product = torch.ones_like(began)

        def follow() -> None:
            after, _, kept = self.moved
            product.mul_(kept)
            self.values.copy_(after)

        yield follow
        self.moved[1].copy_(began)
        self.moved[2].copy_(product)

    def move(self, moved: Tensor) -> None:
        """Let `values` follow a gradient that is used; at the server.

        Args:
            moved: that of the gradient, `(3, S)`.
        """
        self._become(self.followed(self.values, moved))

    def followed(self, values: Tensor, moved: Tensor) -> Tensor:
        """Statistics of a model, `(S,)`, after a gradient that made `moved`, `(3, S)`, of those that it read; new."""
        after, before, kept = moved
        now = after + kept * (values - before)
        for place, counter in self._means:
            count = self._slices[counter]
            here = values[count]
            read = before[count]
            calls = after[count] - read
            apart = here * (values[place] - after[place]) - read * (before[place] - after[place])
            now[place] = after[place] + apart / (here + calls).clamp(min=1.0)
        # As the buffers hold them, or what the next gradient reads would not be what the server has.
        return torch.where(self._is_counter, now, now.float().double())

    def mixed(self, values: Tensor, others: Tensor, share: float | Tensor) -> Tensor:
        """Statistics of a model, `(S,)`, that goes a share of the way to another with `others`; new."""
        mean = values + share * (others - values)
        return torch.where(self._is_averaged, mean.float().double(), values)

    def pull(self, moved: Tensor, rate: float) -> Tensor:
        """Let `values` and those of the model that a worker keeps go a share of the way to each other.

        Args:
            moved: what its local steps have made of its own, `(3, S)`.
            rate: the share.

        Returns:
            Where those of the worker are now, `(S,)`, new.
        """
        replica = moved[0]
        centre = self.values.clone()
        followed = self.followed(centre, moved)
        self._become(torch.where(self._is_averaged, self.mixed(centre, replica, rate), followed))
        return self.mixed(replica, centre, rate)

    def become_mean(self, values: Tensor, weights: Tensor) -> None:
        """Take the mean of several models' averages; at none of their gradients.

        Args:
            values: of each model, `(N, S)`.
            weights: `(N,)`.
        """
        mean = (values * weights[:, None]).sum(0) / weights.sum()
        self.values.copy_(torch.where(self._is_averaged, mean.float().double(), self.values))

    def move_by_mean(self, moved: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Let `values` follow the local steps of several workers that are used together; at the server.

        Args:
            moved: that of each worker, `(3, S)`.
            weights: of their displacements.
        """
        now = self.values
        mean = torch.zeros_like(now)
        for each, weight in zip(moved, weights, strict=True):
            mean.add_(self.followed(self.values, each), alpha=weight / sum(weights))
            now = self.followed(now, each)
        for _, place in self._called:
            now[place] = mean[place].float().double()
        self._become(now)

    def _become(self, values: Tensor) -> None:
        self.reestimated = None
        self.values.copy_(values)

    def lie_in(self, values: Tensor, moved: Tensor | None = None) -> None:
        """Use these for `values`, which become the ones of now, and for `moved`, from here on."""
        values.copy_(self.values)
        self.values = values
        if moved is not None:
            self.moved = moved

    def restored(self) -> None:
        self.put(self.values)

    @contextmanager
    def estimating(self) -> Iterator[None]:
        """Within it, forward passes in training mode make cumulative means of the statistics of their batches, as
        `torch.optim.swa_utils.update_bn` does. They become `reestimated`; every other buffer is put back.
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


def statistics_of(model: nn.Module, also: Collection[str] = ()) -> RunningStatistics | None:
    """The running statistics of a model; None: it has none."""
    statistics = RunningStatistics(model, also)
    return statistics if statistics.names else None


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def _count(calls: Tensor, module: nn.Module, inputs: object, outputs: object) -> None:
    """A forward hook: a call of a layer that tracks moves its statistics."""
    if module.training:
        calls.add_(1.0)


def _weigh_alike(calls: Tensor, module: _NormBase, inputs: object) -> None:
    """A forward hook: the average becomes the mean over all calls, of which this is the next."""
    module.momentum = 1.0 / (float(calls) + 1.0)


class StillBuffers:
    """The buffers that a dry run saw still, and that have to stay so.

    Args:
        model: whose buffers they are.
        moving: those that may change.
    """

    def __init__(self, model: nn.Module, moving: Collection[str]) -> None:
        self._modules = [(name, module, set(module._buffers)) for name, module in model.named_modules()]
        self._still = {
            f"{prefix}.{name}".lstrip("."): (module, name)
            for prefix, module, names in self._modules
            for name in sorted(names)
            if f"{prefix}.{name}".lstrip(".") not in moving and module._buffers[name] is not None
        }
        self._seen = {name: self._version(name) for name in self._still}
        self._digests = {name: _digest(tensor) for name, (tensor, _) in self._seen.items()}

    def check(self) -> None:
        """Look whether a forward pass has changed one, or made another.

        Raises:
            RunError: with the buffer by name.
        """
        for prefix, module, names in self._modules:
            for name in module._buffers.keys() - names:
                raise _changes(f"{prefix}.{name}".lstrip("."), module)
        for name, (module, _) in self._still.items():
            tensor, version = self._version(name)
            before, version_before = self._seen[name]
            if tensor is before and version == version_before:
                continue
            if _digest(tensor) != self._digests[name]:
                raise _changes(name, module)
            self._seen[name] = (tensor, version)

    def _version(self, name: str) -> tuple[Tensor | None, int]:
        module, local_name = self._still[name]
        tensor = module._buffers.get(local_name)
        return tensor, 0 if tensor is None or tensor.is_inference() else tensor._version


def _digest(tensor: Tensor | None) -> tuple[object, ...]:
    if tensor is None:
        return ()
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return tensor.shape, tensor.dtype, zlib.crc32(content.data)


def _changes(name: str, module: nn.Module) -> RunError:
    return RunError(
        f"the forward pass changes the buffer {name!r} of {type(module).__name__}, which it left alone in the pass "
        f"before training, so no other process follows it; let the first forward pass in training mode change it too, "
        f"or compute it from the parameters and the batch"
    )
