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
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asyncsgd.errors import UsageError
from asyncsgd.evaluation import evaluating
from asyncsgd.tasks.base import Batch, Task


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

    @property
    def num_blocks(self) -> int:
        return len(self.costs) - 2

    def cut(self, num_stages: int) -> tuple[range, ...]:
        """The blocks of each stage, at least one, in order: the costliest stage costs as little as possible. Of equal
        cuts it is the one whose last stages are the shortest.

        >>> Anatomy("layers", (), costs=(0, 4, 4, 4, 4, 8), width=16).cut(2)
        (range(0, 3), range(3, 4))

        Raises:
            UsageError: if there are fewer blocks than stages.
        """
        if self.num_blocks < num_stages:
            raise UsageError(
                f"the model has {self.num_blocks} blocks ({self.blocks}), which cannot be cut into {num_stages} "
                f"stages; type --stages {self.num_blocks} or less, or take a deeper model"
            )
        before, *blocks, after = self.costs
        # best[end]: the smallest largest cost of cutting the first `end` blocks, and where these cuts are.
        best: dict[int, tuple[int, tuple[int, ...]]]
        best = {end: (before + sum(blocks[:end]), (0, end)) for end in range(1, self.num_blocks + 1)}
        for stage in range(2, num_stages + 1):
            best = {
                end: min(
                    (
                        (max(cost, sum(blocks[at:end]) + (after if stage == num_stages else 0)), (*cuts, end))
                        for at, (cost, cuts) in best.items()
                        if at < end
                    ),
                    key=lambda each: (each[0], [-cut for cut in each[1]]),
                )
                for end in range(stage, self.num_blocks + 1)
            }
        return tuple(range(first, end) for first, end in itertools.pairwise(best[self.num_blocks][1]))

    def describe(self, num_stages: int) -> str:
        """Say how the model is cut.

        >>> Anatomy("layers", (), costs=(0, 4, 4, 4, 4, 8), width=16).describe(2)
        '2 stages of layers: 0-2, 3 and what follows; 50 % and 50 % of the operations'
        """
        cut = self.cut(num_stages)
        shares = [sum(self.costs[blocks.start + 1 : blocks.stop + 1]) for blocks in cut]
        shares[0] += self.costs[0]
        shares[-1] += self.costs[-1]
        whole = sum(shares) or 1
        parts = [str(r.start) if len(r) == 1 else f"{r.start}-{r.stop - 1}" for r in cut]
        return (
            f"{num_stages} stages of {self.blocks}: {', '.join(parts)} and what follows; "
            f"{' and '.join(f'{share / whole:.0%}'.replace('%', ' %') for share in shares)} of the operations"
        )


def anatomy(task: Task, model: nn.Module, batch: Batch) -> Anatomy:
    """Find the parts of `model` in one forward pass on `batch`, without gradients.

    Raises:
        UsageError: if the model has no row of blocks that each take hidden states and give them on.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    name, blocks = max(lists, key=lambda each: len(each[1]), default=("", nn.ModuleList()))
    if len(blocks) < 2:
        raise UsageError(
            f"{type(model).__name__} has no list of two or more blocks (torch.nn.ModuleList), so it cannot be cut into "
            f"stages; type --mode sync, or take another model"
        )
    counter = FlopCounterMode(display=False)
    finished: list[str] = []
    entered: list[nn.Module] = []
    edges: list[int] = []
    widths: list[int] = []
    handles = []

    def enters(module: nn.Module, inputs: Any) -> None:
        entered.append(module)
        edges.append(counter.get_total_flops())

    def leaves(module: nn.Module, inputs: Any, output: Any) -> None:
        edges.append(counter.get_total_flops())
        if not (inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor)):
            raise UsageError(
                f"a block of {name} does not take hidden states as its first argument and give one tensor on, so "
                f"{type(model).__name__} cannot be cut into stages; type --mode sync"
            )
        widths.append(output.shape[-1])

    try:
        for path, module in model.named_modules():
            if not path.startswith(name):
                handles.append(
                    module.register_forward_hook(
                        lambda module, inputs, output, path=path: None if edges else finished.append(path)
                    )
                )
        for block in blocks:
            handles += [block.register_forward_pre_hook(enters), block.register_forward_hook(leaves)]
        # Attention as plain products: the counter does not know every fused kernel.
        with evaluating(model), sdpa_kernel(SDPBackend.MATH), counter:
            task.loss(task.outputs(model, batch), batch)
    finally:
        for handle in handles:
            handle.remove()
    if entered != list(blocks):
        raise UsageError(
            f"a forward pass does not go through the blocks of {name} one after the other, each once, so "
            f"{type(model).__name__} cannot be cut into stages; type --mode sync"
        )
    before = [path for path in finished if not any(_within(path, other) for other in finished)]
    costs = (edges[0], *(end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True)))
    return Anatomy(name, tuple(before), (*costs, counter.get_total_flops() - edges[-1]), widths[0])


def _within(path: str, other: str) -> bool:
    return path.startswith(f"{other}.")


class _End(Exception):
    """Ends a forward pass where a stage ends."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


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
        return torch.zeros((), device=first.device).expand(*first.shape, self._width)


class Stage(nn.Module):
    """One stage of a task's model.

    Args:
        model: the whole model, of which the stage keeps its own parameters; owned from here on.
        anatomy: of the model.
        num_stages, number: of the stages, and which it is, from 0.
    """

    def __init__(self, task: Task, model: nn.Module, anatomy: Anatomy, *, num_stages: int, number: int) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.task, self.model = task, model
        self.number, self.num_stages = number, num_stages
        self._received: Tensor | None = None
        self._only_shape = False
        own = anatomy.cut(num_stages)[number]
        blocks = model.get_submodule(anatomy.blocks)
        assert isinstance(blocks, nn.ModuleList)
        everywhere = _parameters_between(model, [*anatomy.before, anatomy.blocks])
        in_blocks = {parameter for block in blocks for parameter in block.parameters()}
        early = {parameter for name in anatomy.before for parameter in model.get_submodule(name).parameters()}
        late = set(model.parameters()) - in_blocks - (early - _of_others(model, anatomy.before)) - everywhere
        kept = everywhere | {parameter for number in own for parameter in blocks[number].parameters()}
        if self.is_first:
            kept |= early
        if self.is_last:
            kept |= late
        for name in anatomy.before if not self.is_first else ():
            _replace(model, name, _Placeholder(anatomy.width))
        for index in range(len(blocks)):
            if index not in own:
                blocks[index] = _PassedBy()
        blocks[own.start].register_forward_pre_hook(self._begin)
        if not self.is_last:
            blocks[own.stop - 1].register_forward_hook(self._end)
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter not in kept:
                    module._parameters[key] = None  # of another stage, and no pass of this one comes to it

    def names_in_model(self) -> dict[str, str]:
        """The name of each parameter of the stage -> its name in the whole model."""
        return {name: self._names[id(parameter)] for name, parameter in self.named_parameters()}

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_stages - 1

    def _begin(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._only_shape:
            raise _End(inputs[0])
        return None if self._received is None else (self._received, *inputs[1:])

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
            return end.hidden.float()
        finally:
            self._received = None

    def shape(self, batch: Batch) -> torch.Size:
        """The shape of the hidden states of `batch`. Nothing but what stands before the blocks is computed."""
        self._only_shape = True
        try:
            with torch.no_grad():
                self.task.outputs(self.model, batch)
        except _End as end:
            return end.hidden.shape
        finally:
            self._only_shape = False
        raise AssertionError("a forward pass has come to no block")


def _of_others(model: nn.Module, names: Iterable[str]) -> set[nn.Parameter]:
    """The parameters of all modules outside those of `names`, tied ones too."""
    return {
        parameter
        for path, module in model.named_modules()
        if not any(path == name or _within(path, name) for name in names)
        for parameter in module._parameters.values()
        if parameter is not None
    }


def _parameters_between(model: nn.Module, names: Sequence[str]) -> set[nn.Parameter]:
    """The parameters that stand in a module around those of `names`. Nobody can tell when they are used, so every stage
    has them.
    """
    around = {path for path, _ in model.named_modules() if any(path == "" or _within(name, path) for name in names)}
    modules = dict(model.named_modules())
    return {p for path in around for p in modules[path]._parameters.values() if p is not None}


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
