"""A rank of a synchronous run that holds a whole model: torch's DistributedDataParallel exchanges the gradients.

DDP averages gradients over ranks, so each rank's loss is scaled by N times its share of all loss terms before its
backward pass; without that the result would be a mean of means. The replicas take identical steps and stay identical.
Gradients go through gloo on CPU and NCCL on CUDA."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from asyncsgd.optimizers import Optimizer
from asyncsgd.runtime.collective import AllRanks, Replica
from asyncsgd.runtime.worker_process import Straggling
from asyncsgd.schedules import Schedule
from asyncsgd.state import State, restore, state_of
from asyncsgd.tasks.base import Sums
from asyncsgd.worker import Gradient, Worker


class DataParallel(Replica):
    """A replica of one rank. All ranks construct it together.

    Args:
        worker: computes this rank's gradients, through DDP from here on, and evaluates a shard.
        optimizer: on the worker's flat parameters; the same on every rank.
        find_unused: whether DDP looks for parameters without a gradient at every step; rank 0 decides for all.
    """

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        ranks: AllRanks,
        rate: Schedule,
        straggling: Straggling,
        *,
        find_unused: bool,
    ) -> None:
        device = worker.flat.parameters.device
        super().__init__(worker.task, device, ranks, ranks.rank, range(ranks.number), rate, straggling)
        self._worker, self._optimizer, self._flat = worker, optimizer, worker.flat
        (find_unused,) = map(bool, ranks.told(find_unused))
        with warnings.catch_warnings():
            # torch 2.13 has another name for it that older versions do not know; buffers stay as each rank built them.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            # Copies rank 0's parameters to all ranks, in place.
            worker.loss = DistributedDataParallel(
                worker.loss, broadcast_buffers=False, find_unused_parameters=find_unused
            )
        self.check()

    def gradient(self, index: int, weigh: Callable[[float], float]) -> Gradient:
        return self._worker.gradient(index, lambda weight: self.ranks.number * weigh(weight))

    def step(self, learning_rate: float) -> None:
        self._optimizer.step(self._flat.gradients, learning_rate)
        self.norm = self._optimizer.norm

    def sums(self) -> Sums:
        return self._worker.evaluate(self.number, self.ranks.number)

    def parameters(self) -> Tensor:
        return self._flat.parameters

    def check(self) -> None:
        self._flat.check()

    def state_dict(self) -> State:
        return {
            "parameters": self._flat.parameters,
            "optimizer": state_of(self._optimizer),
            "workers": self.ranks.gather_texts(json.dumps(state_of(self._worker))),
        }

    def load_state_dict(self, state: State) -> None:
        """DDP orders its buckets anew after the first backward pass, and the order decides how sums are rounded. So a
        gradient that nobody uses is computed first, where the run before had computed one.
        """
        if state["method"]["view"]["version"] > 0:
            self._worker.gradient(0, lambda weight: 1.0)
        own = state["backend"]["ranks"]
        with torch.no_grad():
            self._flat.parameters.copy_(own["parameters"])
        restore(self._optimizer, own["optimizer"])
        restore(self._worker, json.loads(own["workers"][self.number]))
