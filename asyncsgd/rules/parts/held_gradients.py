"""Gradients that a rule holds until their step, shared by the rules that collect a quorum."""

from __future__ import annotations

from torch import Tensor

from asyncsgd.rules.base import Arrival, WeightedMean


class Held:
    """Copies of gradients that have arrived and wait, with their weights.

    >>> import torch
    >>> held = Held(torch.zeros(1))
    >>> held.add(Arrival(1, 7, 0, torch.tensor([4.0]), weight=1.0, num_samples=1, seconds=0.0))
    >>> held.add(Arrival(0, 9, 0, torch.tensor([1.0]), weight=3.0, num_samples=1, seconds=0.0))
    >>> held.dispatches, held.mean().item(), len(held)
    ((9, 7), 1.75, 2)
    """

    def __init__(self, like: Tensor) -> None:
        self._mean = WeightedMean(like)
        self._gradients: dict[tuple[int, int], tuple[Tensor, float]] = {}

    def add(self, arrival: Arrival, factor: float = 1.0) -> None:
        """Copy the arriving gradient, times `factor`."""
        gradient = arrival.gradient.clone() if factor == 1.0 else arrival.gradient * factor
        self._gradients[arrival.worker, arrival.dispatch] = (gradient, arrival.weight)

    def __len__(self) -> int:
        return len(self._gradients)

    @property
    def dispatches(self) -> tuple[int, ...]:
        """In the order of (worker, dispatch), which is the order of summation."""
        return tuple(dispatch for _, dispatch in sorted(self._gradients))

    def mean(self) -> Tensor:
        """sum_i w_i g_i / sum_i w_i, `(P,)`; valid until the next call."""
        self._mean.clear()
        for key in sorted(self._gradients):
            self._mean.add(*self._gradients[key])
        return self._mean.value()

    def clear(self) -> None:
        """Forget all gradients."""
        self._gradients.clear()
