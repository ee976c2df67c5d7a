"""How far rounding reaches: whether a log that another processor wrote is the run that is computed here.

Two processors round sums in other places. In a training such differences grow: two honest runs of one recipe are alike
to seven digits at first and have nothing in common some hundreds of updates later. So how much rounding explains is
measured. The replay is made again from parameters that differ from the initial ones x0 by some last bits each:

    x0' = x0 + s BITS ulp(x0),    s = +1 or -1 by a fixed draw

If the data themselves have other bits here, the data of the new replay are moved by last bits too. Let l_k be the
losses of the replay, l'_k those of one from moved parameters and L_k those of the log, in the order of arrivals. Then

    r_k = max over j <= k of |l_j - l'_j| / max(|l_j|, |l'_j|)

is how far rounding had parted the two up to arrival k. While r_k is at most `LARGEST`, the log has to agree:

    |l_k - L_k| / max(|l_k|, |L_k|) <= FACTOR r_k + FLOOR

From the first arrival with a larger r_k on, rounding alone explains any difference, and nothing is claimed. The largest
distance so far is taken, and not that of arrival k, since a distance may be 0 by chance.

Differences do not grow evenly. They jump where rounding decides on which side of 0 a number lies: the input of a ReLU,
the larger of two pooled values, or a gradient of about 0, by whose sign Adam takes a whole step. Whether moved
parameters meet the same jump is a matter of chance, about one half for each draw. So if the log does not agree, another
draw is made, up to `DRAWS` of them, and r_k is the largest of all. So an honest log that meets a jump is called
different in about 1 of 2^DRAWS cases. With one draw of one last bit, 6 of 19 honest logs were called different."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asyncsgd.tasks.base import Batch, Data, map_tensors

FACTOR = 10.0
FLOOR = 1e-6
LARGEST = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""The largest r at which a log is still compared, by the number format of the forward pass."""
BITS = {torch.float64: 8, torch.float32: 8, torch.bfloat16: 1, torch.float16: 1}
"""Parameters are moved by so many last bits of that format. The rounding of float32 adds up over many sums."""
DRAWS = 8


class LossPair(NamedTuple):
    """A loss of a replay beside that of the log."""

    update: int
    """The updates that the server had made when the gradient arrived."""
    dispatch: int
    read_version: int
    here: float
    logged: float

    @property
    def same_bits(self) -> bool:
        """Whether both are equal. JSON has neither infinity nor NaN, so two losses that are not finite count as
        equal."""
        if math.isfinite(self.here) or math.isfinite(self.logged):
            return self.here == self.logged
        return True

    @property
    def difference(self) -> str:
        what = f"the loss of dispatch {self.dispatch} at version {self.read_version} is {self.here!r}"
        return f"{what}, the log has {self.logged!r}"


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Whether the losses of a log agree with those of its replay."""

    equal_up_to: int
    """The update up to which they were compared and agree."""
    to_the_end: bool
    """Whether this is the last update of the log."""
    difference: str
    """The first loss in which they disagree, in words; empty if there is none."""


def move_last_bits(parameters: Tensor, precision: torch.dtype, draw: int) -> None:
    """Change every parameter, `(P,)`, by the last bits of `precision` that `BITS` says, up or down.

    Zero has no last bit and stays. If all parameters are zero, they are moved by the last bits of 1.

    Args:
        draw: another number gives other signs.

    >>> x = torch.tensor([1.0, -2.0, 0.0])
    >>> move_last_bits(x, torch.float32, draw=0)
    >>> (x - torch.tensor([1.0, -2.0, 0.0])).abs().mul(2**23).tolist()
    [8.0, 16.0, 0.0]
    """
    last_bit = torch.finfo(precision).eps
    _, exponents = torch.frexp(parameters)
    last_bits = torch.ldexp(torch.full_like(parameters, last_bit), exponents - 1)
    if bool(parameters.any()):
        last_bits[parameters == 0] = 0.0
    else:
        last_bits.fill_(last_bit)
    parameters += _signs(parameters, draw) * last_bits * BITS[precision]


class DataWithOtherBits:
    """The data of a task as another processor may have made them: every finite floating-point number is one last bit of
    the largest one of its tensor away. Sines and logarithms differ by so much between instruction sets.

    Args:
        data: the data of the task.
        draw: another number gives other signs.
    """

    def __init__(self, data: Data, draw: int) -> None:
        self._data = data
        self._draw = draw
        self.evaluation = data.evaluation

    def batch(self, stream: int, index: int) -> Batch:
        return map_tensors(self._moved, self._data.batch(stream, index))

    def _moved(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        is_finite = torch.isfinite(tensor)
        largest = tensor.where(is_finite, torch.zeros_like(tensor)).abs().max()
        moved = tensor + _signs(tensor, self._draw) * (torch.finfo(tensor.dtype).eps * largest)
        return moved.where(is_finite, tensor)


def _signs(tensor: Tensor, draw: int) -> Tensor:
    """A tensor like `tensor`, of numbers that are +1 or -1."""
    drawn = torch.randint(0, 2, tensor.shape, generator=torch.Generator().manual_seed(draw))
    return (2 * drawn - 1).to(tensor)


def distance(here: float, other: float) -> float:
    """The relative distance of two losses. It is infinite if only one of them is finite.

    >>> distance(2.0, 1.0), distance(0.0, 0.0), distance(1.0, float("nan")), distance(float("inf"), float("nan"))
    (0.5, 0.0, inf, 0.0)
    """
    if not (math.isfinite(here) and math.isfinite(other)):
        return 0.0 if math.isfinite(here) == math.isfinite(other) else math.inf
    largest = max(abs(here), abs(other))
    return abs(here - other) / largest if largest else 0.0


def agreement(losses: Sequence[LossPair], moved: Sequence[Sequence[float]], precision: torch.dtype) -> Agreement:
    """Compare a log with its replay as far as rounding allows it; see the equations above.

    Args:
        losses: the losses of all arrivals, in order.
        moved: the losses of replays from moved parameters, in order. A replay that ended early differs by rounding. The
            losses that it lacks count as nan.

    >>> pairs = [LossPair(update, update, update, 1.0, 1.0 + 5e-6) for update in range(3)]
    >>> agreement(pairs, [[1.0, 1.0, 1.0]], torch.float32).difference.partition(": ")[2]
    'they are 5.0e-06 apart, and rounding explains 1.0e-06'
    >>> agreement(pairs, [[1.0, 1.0, 1.0], [1.000001, 1.000001, 1.01]], torch.float32)
    Agreement(equal_up_to=1, to_the_end=False, difference='')
    """
    reach = 0.0
    last = 0
    for number, pair in enumerate(losses):
        for others in moved:
            other = others[number] if number < len(others) else math.nan
            reach = max(reach, distance(pair.here, other))
        if reach > LARGEST[precision]:
            return Agreement(last, False, "")
        explained = FACTOR * reach + FLOOR
        apart = distance(pair.here, pair.logged)
        if apart > explained:
            what = f"{pair.difference}: they are {apart:.1e} apart, and rounding explains {explained:.1e}"
            return Agreement(last, False, what)
        last = pair.update
    return Agreement(last, True, "")


def parameters_agree(here: Tensor, moved: Sequence[Tensor], recorded: Tensor) -> bool:
    """Whether the parameters that a run ended with are those of its replay, as far as rounding allows it:

        |x - X| <= FACTOR max |x - x'| + FLOOR |x|

    Args:
        here: `(P,)`, x of the replay.
        moved: `(P,)` each, x' of the replays from moved parameters.
        recorded: `(P,)`, X of the run.
    """
    reach = max(float(torch.dist(here, other)) for other in moved)
    return float(torch.dist(here, recorded)) <= FACTOR * reach + FLOOR * float(here.norm())
