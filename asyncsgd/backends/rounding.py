"""How far rounding reaches: whether a log that another processor wrote is the run that is computed here.

Two processors round sums in other places. In a training such differences grow: two honest runs of one recipe are alike
to seven digits at first and have nothing in common some hundreds of updates later. So how much rounding explains is
measured. The replay is made again from parameters that differ from the initial ones x0 by some last bits each:

    x0' = x0 + s BITS ulp(x0),    s = +1 or -1 by a fixed draw

Where the run's data have other bits here as well, those of the new replay are moved alike. With the losses l_k of the
replay, l'_k of one from moved parameters and L_k of the log, in the order of arrivals,

    r_k = max over j <= k of |l_j - l'_j| / max(|l_j|, |l'_j|)

is how far rounding had parted the two up to arrival k. While r_k is at most `LARGEST`, the log has to agree:

    |l_k - L_k| / max(|l_k|, |L_k|) <= FACTOR r_k + FLOOR

From the first arrival with a larger r_k on, rounding alone parts two runs, and nothing is claimed. The largest distance
so far is taken, and not that of arrival k, since distances are 0 by chance.

Differences do not grow evenly. They jump where rounding decides on which side of 0 a number lies: the input of a ReLU,
the larger of two pooled values, or a gradient of about 0, by whose sign Adam takes a whole step. Whether moved
parameters meet the same jump is a matter of chance, about one half for each draw. So where the log does not agree,
another draw is made, up to `DRAWS` of them, and r_k is the largest of all. An honest log that meets a jump is so called
different in about 1 of 2^DRAWS cases. With one draw of one last bit 6 of 19 honest logs were."""

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
"""By how many last bits of that format parameters are moved. The rounding of float32 adds up over many sums."""
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
        """Whether both are equal; JSON has neither infinity nor NaN, so two that are not finite are."""
        if math.isfinite(self.here) or math.isfinite(self.logged):
            return self.here == self.logged
        return True

    @property
    def difference(self) -> str:
        what = f"the loss of dispatch {self.dispatch} at version {self.read_version} is {self.here!r}"
        return f"{what}, the log has {self.logged!r}"


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What the losses of a log say."""

    equal_up_to: int
    """The update up to which they were compared and agree."""
    whole: bool
    """Whether that is the last one."""
    difference: str
    """Where they first disagree; empty if they do not."""


def move_last_bits(parameters: Tensor, precision: torch.dtype, draw: int) -> None:
    """Change every parameter, `(P,)`, by the last bits of `precision` that `BITS` says, up or down.

    Zero has no last bit and stays; where all are zero, they are moved by those of 1.

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
    """The data of a task as another processor may have made them: every floating-point number is one last bit of the
    largest one of its tensor away. Sines and logarithms differ by so much between instruction sets.

    Args:
        data: of the task.
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
        return tensor + _signs(tensor, self._draw) * (torch.finfo(tensor.dtype).eps * tensor.abs().max())


def _signs(tensor: Tensor, draw: int) -> Tensor:
    """Of the shape of `tensor`: +1 or -1."""
    drawn = torch.randint(0, 2, tensor.shape, generator=torch.Generator().manual_seed(draw))
    return (2 * drawn - 1).to(tensor)


def distance(here: float, other: float) -> float:
    """The relative distance of two losses; of one that is finite and one that is not it is infinite.

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
        losses: of all arrivals, in order.
        moved: those of replays from moved parameters, in order. Where one ended sooner, rounding has ended it.

    >>> pairs = [LossPair(update, update, update, 1.0, 1.0 + 5e-6) for update in range(3)]
    >>> agreement(pairs, [[1.0, 1.0, 1.0]], torch.float32).difference.partition(": ")[2]
    'they are 5.0e-06 apart, and rounding explains 1.0e-06'
    >>> agreement(pairs, [[1.0, 1.0, 1.0], [1.000001, 1.000001, 1.01]], torch.float32)
    Agreement(equal_up_to=1, whole=False, difference='')
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
        here, moved, recorded: x of the replay, each x' of the ones from moved parameters, X of the run; `(P,)` each.
    """
    reach = max(float(torch.dist(here, other)) for other in moved)
    return float(torch.dist(here, recorded)) <= FACTOR * reach + FLOOR * float(here.norm())
