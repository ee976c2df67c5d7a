"""A stage of a model with its parameters and gradients, as the engines of a pipeline compute it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from asyncsgd.backends.ranks import AllRanks
from asyncsgd.core.flat import FlatModel, Layout
from asyncsgd.pipeline.cut import Stage, anatomy
from asyncsgd.run.run import Run
from asyncsgd.tasks.base import Batch, Data


@dataclasses.dataclass
class Part:
    """A micro-batch of a step, on the device."""

    batch: Batch
    share: float
    """Its share of its batch's loss terms."""
    scale: float
    """Its loss is multiplied by this before the backward pass."""
    seed: int
    """The seed of its dropout on this stage."""
    loss: Tensor | None = None
    """Its loss, not scaled, which the last stage puts here."""


def mean_loss(parts: Sequence[Part]) -> float:
    """The loss of a batch, the mean over all its loss terms; nan on stages that do not know it."""
    terms = []
    for part in parts:
        loss = math.nan if part.loss is None else float(part.loss)
        terms.append(part.share * loss)
    return sum(terms)


class HeldStage(nn.Module):
    """A stage with its parameters and gradients as flat vectors, as engines see it: from the number of a micro-batch,
    one of `parts`, and hidden states to hidden states, or to the scaled loss, `(1,)`. All ranks construct theirs
    together, with the parameters of rank 0.
    """

    def __init__(self, run: Run, data: Data, ranks: AllRanks, num_stages: int, number: int) -> None:
        super().__init__()
        task = run.task
        model = run.task.model(run.seed)
        # Random values have other last bits on other processors.
        for parameter in model.parameters():
            values = parameter.detach().clone(memory_format=torch.contiguous_format)
            ranks.broadcast(values.reshape(-1).view(torch.uint8), 0)  # gloo knows few dtypes
            if not torch.equal(values, parameter):
                parameter.detach().copy_(values)
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        self.layout = Layout.of(model)
        """The layout of the whole model."""
        micro_batch = task.split(data.batch(0, 0), run.micro_batches)[0]
        parts = anatomy(task, model, micro_batch)
        self.stage = Stage(task, model, parts, num_stages, number).to(run.device)
        self.flat = FlatModel(self.stage)
        own = dict(self.stage.named_parameters())
        self.names = tuple(name_of[id(own[name])] for name in self.flat.layout.names)
        """What the whole model calls the stage's parameters, in the order of the flat vector."""
        self.parts: Sequence[Part] = ()
        self._precision = run.precision

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The views of `vector`, which has the stage's layout, by the names of the whole model."""
        return dict(zip(self.names, self.flat.layout.views(vector).values(), strict=True))

    def put(self, whole: Tensor) -> None:
        """Copy the stage's part of the whole model's parameters, `(P,)`, into the stage."""
        views = self.layout.views(whole)
        with torch.no_grad():
            for name, view in self.views(self.flat.parameters).items():
                view.copy_(views[name])

    def forward(self, hidden: Tensor | None = None, *, index: Tensor) -> Tensor:
        part = self.parts[int(index)]
        lower = self._precision != torch.float32
        # The one allowed use of torch's default generator: dropout draws from nothing else.
        torch.manual_seed(part.seed)
        device_type = self.flat.parameters.device.type
        with torch.autocast(device_type, dtype=self._precision if lower else None, enabled=lower):
            before = self.flat.before_forward()
            output = self.stage(part.batch, hidden)
            self.flat.check_forward(before)
            if not self.stage.is_last:
                # Where all before is frozen, nothing needs a gradient, and torch's stage would fail.
                return output if output.requires_grad else output.requires_grad_()
            if part.share:
                loss = self.stage.task.loss(output, part.batch)
            else:  # the mean over no loss term at all may not be a number
                assert hidden is not None
                loss = hidden.sum() * 0.0
        part.loss = loss.detach()
        return (loss.float() * part.scale).reshape(1)
