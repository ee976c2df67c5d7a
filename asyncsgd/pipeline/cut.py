"""Cut a model into stages, so that several processes hold and compute a part of it each.

A model that can be cut is a row of blocks: the longest `nn.ModuleList` in it, e.g. the layers of BERT, DistilBERT or
GPT-2. What runs before the first block belongs to the first stage, what runs after the last block to the last one.
Blocks go to stages in order, so that the costliest stage costs as little as possible. A cost is counted: the
floating-point operations of a forward pass on one batch (see `torch.utils.flop_counter`).

Only hidden states go from stage to stage. Every stage reads the batch for itself and runs the task's own forward pass
on it. Blocks of other stages are passed by, the first block of a stage is given what the stage before has sent, and
the pass ends with the stage's last block. So a task needs to know nothing of stages, and the last stage computes
whatever the task computes after the blocks.

A parameter that several stages use (the tied embedding of a language model) is held by each of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncsgd.errors import UsageError
from asyncsgd.tasks.base import Batch, Task
from asyncsgd.worker.evaluation import evaluating


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """The parts of a model in the order in which they run."""

    blocks: str
    """The name of the list of blocks."""
    before: tuple[str, ...]
    """The largest modules that have run when the first block begins."""
    costs: tuple[int, ...]
    """Operations of what runs before the blocks, of each block, and of what runs after them."""
    width: int
    """The last dimension of the hidden states."""

    def cut(self, num_stages: int) -> tuple[range, ...]:
        """The blocks of each stage, at least one, in order, under the smallest cost of a stage that is enough for all.

        Of the cuts with this cost it is the one whose first stages are the longest.

        >>> Anatomy("layers", (), costs=(0, 4, 4, 4, 4, 8), width=16).cut(2)
        (range(0, 3), range(3, 4))
        >>> Anatomy("layers", (), costs=(8, 4, 4, 4, 4, 0), width=16).cut(2)
        (range(0, 1), range(1, 4))

        Raises:
            UsageError: if there are fewer blocks than stages.
        """
        num_blocks = len(self.costs) - 2
        if num_blocks < num_stages:
            raise UsageError(
                f"the model has {num_blocks} blocks ({self.blocks}), which cannot be cut into {num_stages} stages; "
                f"type --stages {num_blocks} or less"
            )
        stages = itertools.combinations(range(num_blocks + 1), 2)
        costs = {self._cost(range(start, stop)) for start, stop in stages}
        for cap in sorted(costs):
            cut = self._filled(cap, num_stages)
            if cut is not None:
                return cut
        raise AssertionError("the cost of the whole model is enough for any stage")

    def _cost(self, blocks: range) -> int:
        """The cost of a stage with these blocks, and with what runs before the first block or after the last one."""
        cost = sum(self.costs[blocks.start + 1 : blocks.stop + 1])
        if blocks.start == 0:
            cost += self.costs[0]
        if blocks.stop == len(self.costs) - 2:
            cost += self.costs[-1]
        return cost

    def _filled(self, cap: int, num_stages: int) -> tuple[range, ...] | None:
        """The stages filled one after the other up to a cost of `cap`; None where not all blocks find room."""
        num_blocks = len(self.costs) - 2
        cut: list[range] = []
        start = 0
        for num_later in reversed(range(num_stages)):
            last_stop = num_blocks - num_later  # a block is left for each later stage
            first_stop = start + 1 if num_later else num_blocks
            candidates = [range(start, stop) for stop in range(first_stop, last_stop + 1)]
            fitting = [blocks for blocks in candidates if self._cost(blocks) <= cap]
            if not fitting:
                return None
            cut.append(fitting[-1])
            start = fitting[-1].stop
        return tuple(cut)

    def describe(self, num_stages: int) -> str:
        """Say how the model is cut.

        >>> Anatomy("layers", (), costs=(0, 4, 4, 4, 4, 8), width=16).describe(2)
        '2 stages of layers: 0-2, 3 and what follows; 50 % and 50 % of the operations'
        """
        total = sum(self.costs) or 1
        ranges = []
        percentages = []
        for blocks in self.cut(num_stages):
            ranges.append(f"{blocks.start}" if len(blocks) == 1 else f"{blocks.start}-{blocks.stop - 1}")
            percentages.append(f"{100 * self._cost(blocks) / total:.0f} %")
        return (
            f"{num_stages} stages of {self.blocks}: {', '.join(ranges)} and what follows; "
            f"{' and '.join(percentages)} of the operations"
        )


def anatomy(task: Task, model: nn.Module, batch: Batch) -> Anatomy:
    """Find the parts of `model` in one forward pass on `batch`, without gradients.

    Raises:
        UsageError: if the model has no row of blocks that each take hidden states and give them on.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    name = ""
    blocks = nn.ModuleList()
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(blocks):
            name = path
            blocks = module
    refusal = f"so {type(model).__name__} cannot be cut into stages; type --mode sync"
    if len(blocks) < 2:
        raise UsageError(f"there is no list of two or more blocks (torch.nn.ModuleList), {refusal}")
    paths = [f"{name}.{index}" for index in range(len(blocks))]
    finished: list[str] = []
    before: list[str] = []
    widths: list[int] = []

    def finishes(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        finished.append(path)
        if path in paths and inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            widths.append(output.shape[-1])

    handles = [module.register_forward_hook(partial(finishes, path)) for path, module in model.named_modules()]
    handles.append(blocks[0].register_forward_pre_hook(lambda *_: before.extend(finished)))
    # Attention as plain products: the counter does not know every fused kernel.
    with evaluating(model), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        task.loss(task.outputs(model, batch), batch)
    for handle in handles:
        handle.remove()
    if [path for path in finished if path in paths] != paths or len(widths) < len(paths):
        raise UsageError(
            f"the blocks of {name} do not run one after the other, each once, with one tensor of hidden states from "
            f"each to the next, {refusal}"
        )
    largest = []
    for path in dict.fromkeys(before):
        is_inside = any(path.startswith(f"{other}.") for other in before)
        if not is_inside:
            largest.append(path)
    counts = {}
    for path, operations in counter.get_flop_counts().items():
        _, _, name_in_model = path.partition(".")  # the counter puts the name of a class in front
        counts[name_in_model] = sum(operations.values())
    costs = [sum(counts.get(path, 0) for path in largest)]
    costs += [counts.get(path, 0) for path in paths]
    cost_behind = counter.get_total_flops() - sum(costs)
    return Anatomy(name, tuple(largest), (*costs, cost_behind), widths[0])


class _End(Exception):
    """Ends a forward pass where a stage ends; its argument is the hidden states."""


class _PassedBy(nn.Module):
    """Takes the place of a block of another stage."""

    def forward(self, hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        return hidden


class _Placeholder(nn.Module):
    """Takes the place of a module before the blocks: gives zeros of the shape that the module's output would have.

    They hold one number in memory. A module whose input is whole numbers is an embedding, and adds a dimension.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        first = next(value for value in (*inputs, *named.values()) if isinstance(value, Tensor))
        if first.is_floating_point():
            return first
        zero = torch.zeros((), device=first.device, dtype=torch.float32)
        return zero.expand(*first.shape, self._width)


class Stage(nn.Module):
    """Stage `number`, from 0, of the `num_stages` stages of a task's model. It owns `model`, of which it keeps its own
    parameters.
    """

    def __init__(self, task: Task, model: nn.Module, anatomy: Anatomy, num_stages: int, number: int) -> None:
        super().__init__()
        self.task = task
        self.model = model
        self.is_first = number == 0
        self.is_last = number == num_stages - 1
        self._received: Tensor | None = None
        self._only_shape = False
        own = anatomy.cut(num_stages)[number]
        blocks = model.get_submodule(anatomy.blocks)
        assert isinstance(blocks, nn.ModuleList)
        for index in range(len(blocks)):
            if index not in own:
                blocks[index] = _PassedBy()
        if not self.is_first:
            for name in anatomy.before:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, _Placeholder(anatomy.width))
        blocks[own.start].register_forward_pre_hook(self._begin)
        if not self.is_last:
            blocks[own.stop - 1].register_forward_hook(self._end)
            early = (*anatomy.before, anatomy.blocks)
            for path, module in model.named_modules():
                is_early = any(f"{path}.".startswith(f"{name}.") for name in early)
                # A module around early ones may be used by any stage.
                is_around = not path or any(name.startswith(f"{path}.") for name in early)
                if not is_early and not is_around:
                    # No pass of this stage comes to it.
                    module._parameters.update(dict.fromkeys(module._parameters))

    def _begin(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Give the first block what the stage before has sent."""
        if self._only_shape:
            raise _End(inputs[0])
        if self._received is None:
            return None
        return (self._received, *inputs[1:])

    def _end(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        raise _End(output)

    def forward(self, batch: Batch, hidden: Tensor | None) -> Any:
        """What the task's forward pass gives on the last stage, and the hidden states in float32 on the others.

        Args:
            hidden: what the stage before gave; None on the first.
        """
        self._received = hidden
        try:
            return self.task.outputs(self.model, batch)
        except _End as end:
            return end.args[0].float()
        finally:
            self._received = None

    @torch.no_grad()
    def shape(self, batch: Batch) -> torch.Size:
        """The shape of the hidden states of `batch`. Nothing but what stands before the blocks is computed."""
        self._only_shape = True
        try:
            return torch.Size(self(batch, None).shape)
        finally:
            self._only_shape = False
