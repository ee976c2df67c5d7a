"""Where a curve of losses crosses a target, and the loss at a position. Positions are seconds or samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy
from numpy.typing import ArrayLike, NDArray


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Where a curve first is at or below a target, and stays there for another evaluation."""

    at: float
    """Position; inf where it never is."""
    spacing: float | None
    """Gap between the two evaluations around it, the resolution of `at`; 0 at the first evaluation, None for never."""


NEVER = Crossing(math.inf, None)


def crossing(positions: ArrayLike, losses: ArrayLike, target: float) -> Crossing:
    """The first evaluation at or below `target` that holds, interpolated linearly from the evaluation before it.

    It holds where the next evaluation is at or below the target too, or there is none. A dip for one evaluation is no
    crossing.

    Args:
        positions: of the evaluations (E), in order, finite.
        losses: at them (E). A loss that is not finite never crosses; an evaluation after one crosses where it stands.
        target: finite.
    Raises:
        ValueError: for unequal lengths, positions that go back or are not finite, or a target that is not finite.

    >>> crossing([0, 10, 20], [6.0, 5.0, 4.0], 4.5)
    Crossing(at=15.0, spacing=10.0)
    """
    x, y = _curve(positions, losses)
    if not math.isfinite(target):
        raise ValueError(f"the target must be a finite loss, got {target}")
    below = numpy.isfinite(y) & (y <= target)
    reached = numpy.flatnonzero(below & numpy.append(below[1:], True))
    if not reached.size:
        return NEVER
    index = int(reached[0])
    if index == 0:
        return Crossing(float(x[0]), 0.0)
    spacing = float(x[index] - x[index - 1])
    if not math.isfinite(y[index - 1]):
        return Crossing(float(x[index]), spacing)
    share = (float(y[index - 1]) - target) / (float(y[index - 1]) - float(y[index]))
    return Crossing(min(float(x[index - 1]) + share * spacing, float(x[index])), spacing)


def lowest_held(losses: ArrayLike) -> float:
    """The lowest target that a curve crosses: of two evaluations in a row the higher one, or the last.

    Args:
        losses: of the evaluations (E), in order, finite, at least one.

    >>> lowest_held([6.0, 4.0, 5.0, 5.5]), lowest_held([6.0, 4.0])
    (5.0, 4.0)
    """
    y = numpy.asarray(losses, dtype=numpy.float64)
    return float(numpy.append(numpy.maximum(y[:-1], y[1:]), y[-1]).min())


LossCurve = tuple[NDArray[numpy.float64], NDArray[numpy.float64]]
"""Positions of evaluations, strictly increasing, and the losses there."""


def on_common_looks(curves: Sequence[LossCurve]) -> list[LossCurve]:
    """The evaluations of curves that are compared with one another, none of them looked at more often than another.

    Whoever looks more often sees a low loss sooner. So the curve with the fewest evaluations up to where the first one
    ends keeps all of them, and so does each that has no more. Of any other, those nearest to them are kept, each once,
    and its last. Beyond the end of the sparsest curve its mean spacing goes on. No loss is averaged or interpolated.

    Args:
        curves: each with an evaluation at least.

    >>> sparse, dense = [0, 10, 20], [0, 4, 8, 12, 16, 20]
    >>> found = on_common_looks([(numpy.array(x), numpy.array(x)) for x in (sparse, dense)])
    >>> [positions.tolist() for positions, _ in found]
    [[0, 10, 20], [0, 8, 20]]
    """
    if not curves:
        return []
    shortest = min(float(x[-1]) for x, _ in curves)
    counts = [int((x <= shortest).sum()) for x, _ in curves]
    fewest = min(counts)
    sparsest, _ = curves[counts.index(fewest)]
    found = []
    for (x, y), count in zip(curves, counts, strict=True):
        kept = _nearest(x, sparsest) if count > fewest else slice(None)
        found.append((x[kept], y[kept]))
    return found


def _nearest(x: NDArray[numpy.float64], sparse: NDArray[numpy.float64]) -> list[int]:
    """The indices of `x` next to the positions of `sparse`, none twice, and the last."""
    if len(sparse) > 1:
        step = float(sparse[-1] - sparse[0]) / (len(sparse) - 1)
        further = round(max(0.0, float(x[-1] - sparse[-1])) / step)
        sparse = numpy.append(sparse, sparse[-1] + step * numpy.arange(1, further + 1))
    wanted = numpy.unique(numpy.minimum(sparse, x[-1]))
    wanted[-1] = x[-1]
    spare = len(x) - len(wanted)
    if spare <= 0:
        return list(range(len(x)))
    right = numpy.clip(numpy.searchsorted(x, wanted), 1, len(x) - 1)
    nearest = right - (wanted - x[right - 1] <= x[right] - wanted)
    kept: list[int] = []
    for number, index in enumerate(nearest):
        first = kept[-1] + 1 if kept else 0
        kept.append(min(max(int(index), first), spare + number))  # as many are left as are still wanted
    return kept


def loss_at(positions: ArrayLike, losses: ArrayLike, position: float) -> float:
    """The loss at `position`, linear between the evaluations around it; nan beyond the curve and beside a loss that is
    not finite.

    >>> loss_at([0, 10], [6.0, 5.0], 2.5), loss_at([0, 10], [6.0, 5.0], 11)
    (5.75, nan)
    """
    x, y = _curve(positions, losses)
    if not math.isfinite(position):
        raise ValueError(f"the position must be finite, got {position}")
    if not x[0] <= position <= x[-1]:
        return math.nan
    right = int(numpy.searchsorted(x, position, side="left"))
    if x[right] == position:  # of several evaluations at one position the last
        right = int(numpy.searchsorted(x, position, side="right")) - 1
        return float(y[right]) if math.isfinite(y[right]) else math.nan
    before, after = float(y[right - 1]), float(y[right])
    if not (math.isfinite(before) and math.isfinite(after)):
        return math.nan
    return before + (after - before) * (position - float(x[right - 1])) / float(x[right] - x[right - 1])


def _curve(positions: ArrayLike, losses: ArrayLike) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
    x, y = numpy.asarray(positions, dtype=numpy.float64), numpy.asarray(losses, dtype=numpy.float64)
    if x.ndim != 1 or x.shape != y.shape or not x.size:
        raise ValueError(f"a curve needs as many losses as positions, at least one; got {y.shape} and {x.shape}")
    if not numpy.isfinite(x).all() or (numpy.diff(x) < 0).any():
        raise ValueError("the positions of a curve must be finite and must not go back")
    return x, y


def target_grid(
    first_loss: float, best_loss: float, shares: Sequence[float] = (0.25, 0.5, 0.8, 0.9, 0.95, 0.98)
) -> dict[float, float]:
    """Targets at `shares` of an improvement, first - share (first - best), by share.

    Args:
        first_loss: the reference's at step 0.
        best_loss: the best that its pilot runs reached.
    Raises:
        ValueError: if there was no improvement, or a share is not in (0, 1].

    >>> target_grid(6.0, 4.0, shares=(0.5, 0.75))
    {0.5: 5.0, 0.75: 4.5}
    """
    if not (math.isfinite(first_loss) and math.isfinite(best_loss) and best_loss < first_loss):
        raise ValueError(f"targets need an improvement from first_loss to best_loss; got {first_loss} and {best_loss}")
    for share in shares:
        if not 0 < share <= 1:
            raise ValueError(f"a share of the improvement lies in (0, 1], got {share}")
    return {share: first_loss - share * (first_loss - best_loss) for share in shares}
