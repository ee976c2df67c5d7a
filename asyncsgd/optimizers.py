"""torch's optimizers on a flat vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from asyncsgd.packing import Plain

BuildOptimizer = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class SGD:
    """Builds a fused `torch.optim.SGD`."""

    momentum: float = 0.0

    def __call__(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, momentum=self.momentum, fused=True)


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Builds a fused `torch.optim.AdamW` (on a CPU about 7 times faster than the default one, and other last bits)."""

    betas: tuple[float, float] = (0.9, 0.999)

    def __call__(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, betas=self.betas, fused=True)


class Optimizer:
    """A torch optimizer on a flat vector: weight decay on its first `num_decayed` elements, clipping, one fused call.

    Args:
        parameters: `(P,)`, changed in place by `step`; borrowed.
        num_decayed: elements from the beginning that `weight_decay` acts on.
        build: makes the torch optimizer from parameter groups, see `SGD` and `AdamW`.
        weight_decay: as in the torch optimizer.
        clip_norm: largest Euclidean norm of a direction, 0 for no clipping; a longer one is scaled down to it
            (as `torch.nn.utils.clip_grad_norm_` does), in a copy.
    """

    def __init__(
        self,
        parameters: Tensor,
        num_decayed: int,
        build: BuildOptimizer,
        *,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
    ) -> None:
        # Two leaf parameters that share the vector's memory, so that torch's optimizer steps the vector itself.
        self._slices = [
            nn.Parameter(part, requires_grad=True)
            for part in parameters.split([num_decayed, len(parameters) - num_decayed])
        ]
        self._num_decayed = num_decayed
        self._clip_norm = clip_norm
        self._clipped: Tensor | None = None
        self.norm: float | None = None
        """Of the last direction, before it was clipped; None where nothing is clipped."""
        groups = [
            {"params": [part], "weight_decay": decay, "lr": 0.0}
            for part, decay in zip(self._slices, (weight_decay, 0.0), strict=True)
            if len(part) or not len(parameters)  # an optimizer must have something, even of no length
        ]
        self._optimizer = build(groups)
        self.plain = (
            isinstance(self._optimizer, torch.optim.SGD)
            and weight_decay == clip_norm == 0
            and all(group["momentum"] == 0 for group in self._optimizer.param_groups)
        )
        """Whether a step is x <- x - eta d and nothing else."""

    def step(self, direction: Tensor, learning_rate: float, norm: float | None = None) -> None:
        """Take one step along `direction`, `(P,)`, which is read and not changed.

        Args:
            norm: that it is clipped by, where it is a part of a longer direction; None: its own.
        """
        if self._clip_norm > 0:
            direction = self._clip(direction, norm)
        decayed, undecayed = self._slices
        decayed.grad = direction[: self._num_decayed]
        undecayed.grad = direction[self._num_decayed :]
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        decayed.grad = undecayed.grad = None  # the direction is borrowed for this call only

    def _clip(self, direction: Tensor, norm: float | None) -> Tensor:
        self.norm = float(torch.linalg.vector_norm(direction)) if norm is None else norm
        factor = self._clip_norm / (self.norm + 1e-6)
        if factor >= 1.0:
            return direction
        if self._clipped is None:
            self._clipped = torch.empty_like(direction)
        return torch.mul(direction, factor, out=self._clipped)

    @property
    def state_size(self) -> int:
        """Elements of the optimizer's state, known after one step; see `share_state`."""
        states = self._optimizer.state.values()
        return sum(value.numel() for state in states for value in state.values() if isinstance(value, Tensor))

    def share_state(self, vector: Tensor) -> None:
        """Move the optimizer's state, zeroed, to `vector`, which other processes may step with too (Hogwild).

        Args:
            vector: float32, at least `state_size` elements and all zeros; borrowed.
        """
        self.create_state()
        for state in self._optimizer.state.values():
            for key in sorted(key for key, value in state.items() if isinstance(value, Tensor)):
                size = state[key].numel()
                state[key] = vector[:size].view(state[key].shape)
                vector = vector[size:]

    def state_dict(self) -> Plain:
        """The torch optimizer's state; see `asyncsgd.packing`."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Plain) -> None:
        """Go on from `state`, of an optimizer that was built in the same way on a vector of the same size."""
        self._optimizer.load_state_dict(state)

    def move(self, parameters: Tensor) -> None:
        """Step another vector of the same size from now on, with the same state; borrowed."""
        for own, part in zip(self._slices, parameters.split([len(own) for own in self._slices]), strict=True):
            own.data = part

    def create_state(self) -> None:
        """Make the optimizer create its state, which torch does in the first step: one at learning rate 0."""
        self.step(torch.zeros(sum(len(part) for part in self._slices)), 0.0)


@dataclasses.dataclass(frozen=True)
class OptimizerRecipe:
    """An optimizer before there is a vector to step; can be sent to another process."""

    build: BuildOptimizer
    weight_decay: float = 0.0
    clip_norm: float = 0.0

    def __str__(self) -> str:
        return type(self.build).__name__.lower()

    def on(self, parameters: Tensor, num_decayed: int) -> Optimizer:
        """Return the optimizer of `parameters`, `(P,)`."""
        return Optimizer(parameters, num_decayed, self.build, weight_decay=self.weight_decay, clip_norm=self.clip_norm)


class PlainSGD:
    """Plain SGD straight on a vector of any floating type, without torch.optim's bookkeeping: x <- x - eta d.

    Bit for bit what `torch.optim.SGD` does; for the virtual clock, where a step costs less than that bookkeeping.
    """

    plain = True
    norm = None

    def __init__(self, parameters: Tensor) -> None:
        self._parameters = parameters

    def step(self, direction: Tensor, learning_rate: float) -> None:
        """Take one step along `direction`, `(P,)`."""
        self._parameters.add_(direction, alpha=-learning_rate)

    def state_dict(self) -> Plain:
        """Nothing: it has no state."""
        return {}

    def load_state_dict(self, state: Plain) -> None:
        """Nothing to load."""


class StepTakenByWorker:
    """Takes the place of an `Optimizer` under Hogwild, where workers have already stepped: the server only counts."""

    plain = False
    norm = None

    def step(self, direction: Tensor, learning_rate: float) -> None:
        return

    def state_dict(self) -> Plain:
        """Nothing: the workers' own optimizers have it."""
        return {}

    def load_state_dict(self, state: Plain) -> None:
        """Nothing to load."""
