"""The outer Nesterov step of the local-update methods, in torch's form."""

from __future__ import annotations

from torch import Tensor


class Nesterov:
    """m <- beta m + g, then g + beta m.

    >>> import torch
    >>> outer = Nesterov(torch.zeros(1))
    >>> [outer.step(torch.ones(1), 0.5).item() for _ in range(2)]
    [1.5, 1.75]
    """

    def __init__(self, like: Tensor) -> None:
        self.momentum = like.new_zeros(like.shape)
        self._direction = like.new_zeros(like.shape)

    def step(self, gradient: Tensor, beta: float, scale: float = 1.0) -> Tensor:
        """`scale` times the Nesterov direction, `(P,)`; valid until the next call."""
        self.momentum.mul_(beta).add_(gradient)
        self._direction.copy_(gradient).add_(self.momentum, alpha=beta)
        return self._direction if scale == 1.0 else self._direction.mul_(scale)
