"""A model as two contiguous vectors, one of parameters and one of gradients, with the modules' tensors as views.

One vector means one message, one fused optimizer call and one shared segment. Tied weights stand in it once; frozen
parameters do not stand in it. Decayed parameters come before undecayed ones, so that weight decay is a slice.

Every tensor starts at a multiple of `ALIGNMENT` elements (a cache line), because matrix products on the CPU may round
differently at other addresses. The gaps hold zeros and stay zero under every optimizer. P counts them too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Collection

import torch
from torch import Tensor, nn

from asyncsgd.core.running_statistics import statistics_of
from asyncsgd.errors import RunError, UsageError

ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each trainable parameter of a model lies in its flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    num_decayed: int
    """The number of elements, from the beginning of the vector, that weight decay acts on."""
    size: int
    """P, the number of elements of the vector, gaps included."""

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Lay out `model`'s trainable parameters: matrices (decayed) first, then biases and norms (undecayed).

        Raises:
            UsageError: if a parameter is not float32 (a server adds up float32 steps, other types would lose small
            ones), has no shape yet, or shares memory with another tensor (the parameter moves to the flat vector, and
            the other tensor would keep the old memory).
        """
        for name, parameter in model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise UsageError(
                    f"parameter {name!r} has no shape before the first batch; give its layer all sizes, or let model() "
                    f"compute one batch"
                )
        memory_error = _memory_sharing_error(model)
        if memory_error is not None:
            raise UsageError(memory_error)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                raise UsageError(
                    f"parameter {name!r} is {parameter.dtype}; load the model in float32 and use --precision instead"
                )
        named.sort(key=lambda pair: pair[1].ndim < 2)  # stable: matrices first, in the model's order
        offsets = []
        end = 0
        num_decayed = 0
        for _, parameter in named:
            offsets.append(end)
            end += math.ceil(parameter.numel() / ALIGNMENT) * ALIGNMENT
            if parameter.ndim >= 2:
                num_decayed = end
        shapes = tuple(tuple(parameter.shape) for _, parameter in named)
        return cls(tuple(name for name, _ in named), shapes, tuple(offsets), num_decayed, end)

    @classmethod
    def of_vector(cls, size: int) -> Layout:
        """The layout of a vector that belongs to no model: one tensor, all of it decayed."""
        return cls(("vector",), ((size,),), (0,), size, size)

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, gaps not counted, tied weights once."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that two processes compare before they exchange vectors."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:8]

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return name -> view of `vector`, `(P,)`, in the parameter's shape."""
        views = {}
        for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True):
            end = offset + math.prod(shape)
            views[name] = vector[offset:end].view(shape)
        return views


def _memory_sharing_error(model: nn.Module) -> str | None:
    """A message if a parameter shares memory with another parameter, a buffer or a tensor that a module keeps. The
    parameter is moved to the flat vector, and the other would stay as it is. None: no parameter does.
    """
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        kept = {**vars(module), **dict(module.named_buffers(recurse=False))}
        for name, value in kept.items():
            if isinstance(value, Tensor) and id(value) not in parameters:
                tensors[f"{prefix}.{name}".removeprefix(".")] = value
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for names in by_storage.values():
        # In each pair a parameter comes first, since `tensors` begins with the parameters.
        for one, other in itertools.combinations(names, 2):
            if one not in parameters.values() or not _overlap(tensors[one], tensors[other]):
                continue
            if other not in parameters.values():
                return (
                    f"{other!r} shares memory with the parameter {one!r} and would keep its first values; compute it "
                    f"in the forward pass, from {_as_code(one)}"
                )
            fix = "keep one of them, and compute the other from it in the forward pass"
            if tensors[one].shape == tensors[other].shape:
                fix = f"share the parameter itself: {_as_code(other)} = {_as_code(one)}"
            return (
                f"parameters {one!r} and {other!r} share memory but are two parameters, and each would be trained for "
                f"itself; {fix}"
            )
    return None


def _as_code(name: str) -> str:
    """How a model's own code writes a parameter.

    >>> _as_code("blocks.0.weight")
    'self.blocks[0].weight'
    """
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f"self.{name}")


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common; slices side by side, as cuDNN's LSTM has, have none."""
    ranges = []
    for tensor in (one, other):
        first = tensor.storage_offset() * tensor.element_size()
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        ranges.append((first, first + (last + 1) * tensor.element_size()))
    begin = max(first for first, _ in ranges)
    end = min(end for _, end in ranges)
    if begin >= end:
        return False
    marks = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)

    def bytes_of(tensor: Tensor) -> Tensor:
        """The marks of the bytes of `tensor`, a view."""
        size = tensor.element_size()
        strides = (*(size * stride for stride in tensor.stride()), 1)
        return marks.as_strided((*tensor.shape, size), strides, size * tensor.storage_offset())

    bytes_of(one).fill_(True)  # mark each byte of `one` in a mask of the storage, then look under `other`
    return bool(bytes_of(other).any())


class FlatModel:
    """Binds a model's parameters and gradients to flat vectors.

    The model's tensors become views. Code that later rebinds ``.data`` or ``.grad`` would detach them silently, so
    `check` compares every pointer.

    Args:
        model: its trainable parameters are moved into `parameters`; must not be bound already.
        parameters: float32 `(P,)` to bind to, on the model's device; its content is overwritten with the model's values
            unless `keep_parameters`. A new vector by default. Borrowed, for as long as this object lives.
        gradients: float32 `(P,)` to bind ``.grad`` to; zeroed. A new vector by default.
        keep_parameters: take the values from `parameters` instead of the model (a vector that others own already).
        changing_buffers: names of buffers that forward passes change, beside those that `RunningStatistics` finds.

    >>> flat = FlatModel(nn.Linear(2, 1))
    >>> flat.layout.names, flat.layout.size, flat.layout.num_parameters
    (('weight', 'bias'), 32, 3)
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Tensor | None = None,
        gradients: Tensor | None = None,
        *,
        keep_parameters: bool = False,
        changing_buffers: Collection[str] = (),
    ) -> None:
        self.model = model
        self.layout = Layout.of(model)
        self.statistics = statistics_of(model, changing_buffers)
        """The running statistics of the model; None: it has none."""
        device = next(model.parameters()).device
        size = self.layout.size
        self.parameters = _zeros(size, device) if parameters is None else parameters
        self.gradients = _zeros(size, device) if gradients is None else gradients
        for vector in (self.parameters, self.gradients):
            if vector.shape != (self.layout.size,) or vector.dtype != torch.float32 or not vector.is_contiguous():
                raise ValueError(
                    f"a flat vector is contiguous float32 ({self.layout.size},): {vector.dtype} {tuple(vector.shape)}"
                )
        if not keep_parameters:
            self.parameters.zero_()
        self.gradients.zero_()
        named = dict(model.named_parameters())
        self._tensors = [named[name] for name in self.layout.names]
        self._never_trained = [(name, parameter) for name, parameter in named.items() if not parameter.requires_grad]
        self._gradient_views = list(self.layout.views(self.gradients).values())
        self.may_freeze = False
        """Whether parameters may be frozen in the middle of a run, and thawed again. They may if all gradients of an
        update are sure to lack the same ones: if one process computes them, or if synchronous ranks do."""
        self.frozen: tuple[str, ...] = ()
        """The names of the parameters that were frozen in all forward passes since `release_gradients`, which
        fills it with all names."""
        with torch.no_grad():
            for tensor, view in zip(self._tensors, self.layout.views(self.parameters).values(), strict=True):
                if not keep_parameters:
                    view.copy_(tensor)
                tensor.data = view
        self.gather_gradients()
        self.check()

    @property
    def fingerprint(self) -> str:
        """Hex digits of the layout and the running statistics, which two processes compare before they exchange
        vectors.
        """
        behind = "" if self.statistics is None else self.statistics.fingerprint
        return self.layout.fingerprint + behind

    def release_gradients(self) -> None:
        """Set every ``.grad`` to None before a backward pass, which then keeps the tensors it computes.

        Adding to zeroed views instead would write the vector twice and read it twice more.
        """
        for tensor in self._tensors:
            tensor.grad = None
        self.frozen = self.layout.names

    def gather_gradients(self) -> None:
        """Copy every ``.grad`` into the flat vector, zeros where there is none, and bind it there again."""
        with torch.no_grad():
            for tensor, view in zip(self._tensors, self._gradient_views, strict=True):
                if tensor.grad is None:
                    view.zero_()
                elif tensor.grad is not view:
                    gradient = tensor.grad
                    view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                tensor.grad = view

    def before_forward(self) -> list[tuple[int, bool]]:
        """Return how often each parameter was changed in place, as torch counts it, and whether it is trained."""
        return [(tensor._version, tensor.requires_grad) for tensor in self._tensors]

    def check_forward(self, before: list[tuple[int, bool]]) -> None:
        """Refuse a forward pass that has changed the values of a parameter, or its requires_grad if `may_freeze` is
        False. Note in `frozen` what it left out.

        A change that a forward pass made would be seen by no other process, since the server alone changes parameters.

        Args:
            before: what `before_forward` said before the pass.

        Raises:
            RunError: with the parameter by name.
        """
        frozen = []
        for name, tensor, (version, trained) in zip(self.layout.names, self._tensors, before, strict=True):
            if tensor._version != version:
                raise RunError(
                    f"the forward pass changes the parameter {name!r}, which the server alone may change; compute what "
                    f"it needs from the parameter, and leave the parameter as it is (nn.Embedding: no max_norm)"
                )
            if not (trained and tensor.requires_grad):  # it was frozen before the pass, or is after it
                frozen.append(name)
                if not self.may_freeze:
                    raise cannot_freeze(name)
        for name, parameter in self._never_trained:
            if parameter.requires_grad:
                raise RunError(
                    f"the parameter {name!r} was frozen when model() returned it, and is trained now (requires_grad), "
                    f"which the server does not know; return it trainable from model(), and freeze it in the first "
                    f"forward pass"
                )
        self.frozen = tuple(name for name in frozen if name in self.frozen)  # in this pass and all before it

    def unfreeze_used(self) -> None:
        """Remove from `frozen` the parameters that got a gradient: a forward pass has thawed and used them.

        It is called after the backward passes.
        """
        if self.frozen:
            tensors = dict(zip(self.layout.names, self._tensors, strict=True))
            self.frozen = tuple(name for name in self.frozen if tensors[name].grad is None)

    def check(self) -> None:
        """Assert that every parameter and gradient of the model still is the view it should be.

        Raises:
            RuntimeError: naming the first tensor that has been rebound.
        """
        parameter_views = self.layout.views(self.parameters)
        gradient_views = self.layout.views(self.gradients)
        tensors = dict(self.model.named_parameters())
        for name in self.layout.names:
            tensor = tensors[name]
            if tensor.data_ptr() != parameter_views[name].data_ptr():
                raise RuntimeError(f"parameter {name!r} was rebound and no longer lies in the flat vector")
            if tensor.grad is None or tensor.grad.data_ptr() != gradient_views[name].data_ptr():
                raise RuntimeError(f"the gradient of {name!r} was rebound; use zero_grad(set_to_none=False)")


def cannot_freeze(name: str) -> RunError:
    """The error for a parameter that was frozen or thawed in the middle of a run that cannot follow it."""
    return RunError(
        f"the parameter {name!r} was frozen (requires_grad) in the middle of the run. Only a single process, sync, and "
        f"one worker whose rule has no momentum or steps of its own can follow that; train so, or freeze it in "
        f"model(), and continue from this run's model with another run"
    )


def _zeros(size: int, device: torch.device) -> Tensor:
    """Zeros, `(size,)`, float32 whatever a user's script has made torch's default."""
    return torch.zeros(size, device=device, dtype=torch.float32)


def parameters_sha256(layout: Layout, parameters: Tensor) -> str:
    """Return the sha256 of the parameters' bytes in layout order, gaps left out: equal exactly when all bits are
    equal.
    """
    digest = hashlib.sha256()
    for view in layout.views(parameters.detach().cpu()).values():
        digest.update(view.contiguous().numpy().tobytes())
    return digest.hexdigest()
