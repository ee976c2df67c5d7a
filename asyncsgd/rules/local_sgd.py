"""Local SGD and post-local SGD: every worker takes H steps of its own, then all move to the mean.

    y_i <- H inner steps from x_t,    x_{t+1} = x_t - sum_i w_i (x_t - y_i) / sum w_i

Stich: Local SGD Converges Fast and Communicates Little, ICLR 2019. Post-local SGD takes one step per round until
version `post`, and H from there: Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020.
Inner optimizer states stay with their workers. With H = 1 and inner plain SGD it is synchronous SGD. Deviation: w_i is
the number of worker i's loss terms, as in every mean of this library; the papers take w_i = 1. The two agree where all
workers have as many.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Collecting, Held, Reply, Start, View


@dataclasses.dataclass(frozen=True)
class LocalSGD(Collecting):
    """Rounds of local steps by everybody, then the weighted mean of where they ended.

    Args:
        num_local_steps: H.
        post: one step per round before this version (post-local SGD); 0: H from the beginning.
    """

    local_steps: ClassVar[bool] = True
    in_rounds: ClassVar[bool] = True

    num_local_steps: int = parameter(4, at_least=1)
    post: int = parameter(0, at_least=0)

    def join(self, state: Held, worker: int, view: View) -> Reply:
        return Reply(start=(Start(worker, self._steps(view.version)),))

    def fire(self, state: Held, view: View) -> Reply:
        if view.in_flight or not len(state):
            return Reply()
        mean, uses = state.take()
        return Reply(mean, uses=uses, start=tuple([Start(w, self._steps(view.version + 1)) for w in view.workers]))

    def _steps(self, version: int) -> int:
        return 1 if version < self.post else self.num_local_steps
