"""torch's optimizers on a flat vector.

SGD and AdamW work element by element, so they step the vector in one fused call. Any other torch optimizer may look at
a whole tensor, so it is given views of the vector in the shapes of the model's tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from asyncsgd.core.flat import Layout
from asyncsgd.errors import UsageError, is_out_of_memory, nearest

ParameterGroup = dict[str, Any]
"""A parameter group of a torch optimizer: tensors and their settings, by torch's names."""
BuildOptimizer = Callable[[Iterable[ParameterGroup]], TorchOptimizer]
"""Makes a torch optimizer from parameter groups, each with ``params``, ``weight_decay`` and ``lr``, the peak learning
rate. If the optimizer steps tensor by tensor, a group also has the tensors' names, ``param_names``."""


@dataclasses.dataclass(frozen=True)
class SGD:
    """Builds a fused `torch.optim.SGD`."""

    momentum: float = 0.0
    """The momentum mu of v <- mu v + g, x <- x - eta v; 0: none."""

    def __call__(self, groups: Iterable[ParameterGroup]) -> TorchOptimizer:
        return torch.optim.SGD(groups, momentum=self.momentum, fused=True)


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Builds a fused `torch.optim.AdamW` (on a CPU about 7 times faster than the default one; results differ in the
    last bits)."""

    betas: tuple[float, float] = (0.9, 0.999)
    """The rates at which the means of gradients and of their squares forget, each in [0, 1)."""

    def __call__(self, groups: Iterable[ParameterGroup]) -> TorchOptimizer:
        return torch.optim.AdamW(groups, betas=self.betas, fused=True)


OPTIMIZERS: Mapping[str, Callable[..., BuildOptimizer]] = {"sgd": SGD, "adamw": AdamW}
"""The optimizers that settings name."""


class Optimizer:
    """A torch optimizer on a flat vector: weight decay on its first `num_decayed` elements, and clipping.

    Every parameter group g steps at its own share of the learning rate, eta_g = (lr_g / peak) eta. `build` gets every
    group with lr = peak and may change it; lr_g is what it leaves there. A group with lr_g = 0 is frozen.

    Args:
        parameters: `(P,)`, changed in place by `step`; borrowed.
        num_decayed: how many elements of the vector, from its beginning, `weight_decay` acts on.
        build: makes the torch optimizer from parameter groups, see `SGD` and `AdamW`.
        layout: where the tensors lie in the vector, whose `num_decayed` must be the same; None: the vector is one
            tensor.
        tensor_by_tensor: whether the torch optimizer steps the tensors one by one, and not the vector as a whole. After
            a step that leaves one of them out, it steps them one by one whatever was given.
        weight_decay: as in the torch optimizer.
        clip_norm: largest Euclidean norm of a direction, 0 for no clipping; a longer one is scaled down to it
            (as `torch.nn.utils.clip_grad_norm_` does), in a copy.
        peak: the largest learning rate of the run, which `build` gets as the ``lr`` of each group.

    Raises:
        UsageError: if a group's learning rate is below 0 or ambiguous.
    """

    KEPT = ("_optimizer",)

    def __init__(
        self,
        parameters: Tensor,
        num_decayed: int,
        build: BuildOptimizer,
        *,
        layout: Layout | None = None,
        tensor_by_tensor: bool = False,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        peak: float = 1.0,
    ) -> None:
        self._vector = parameters
        self._num_decayed = num_decayed
        self._layout = layout or Layout.of_vector(len(parameters))
        self._tensor_by_tensor = tensor_by_tensor
        # Leaf parameters that share the vector's memory, so that torch's optimizer steps the vector itself.
        decayed_views, undecayed_views = self._cut(parameters)
        decayed = list(map(nn.Parameter, decayed_views))
        undecayed = list(map(nn.Parameter, undecayed_views))
        self._tensors = [*decayed, *undecayed]
        self._clip_norm = clip_norm
        self._clipped: Tensor | None = None
        self.norm: float | None = None
        """The Euclidean norm of the last direction, before it was clipped, also if it was short enough. None before the
        first step, and in an optimizer whose `clip_norm` is 0."""
        groups: list[ParameterGroup] = []
        for tensors, decay, first in ((decayed, weight_decay, 0), (undecayed, 0.0, len(decayed))):
            group: ParameterGroup = {"params": tensors, "weight_decay": decay, "lr": peak}
            if tensor_by_tensor:
                group["param_names"] = list(self._layout.names[first : first + len(tensors)])
            if tensors:
                groups.append(group)
        # torch refuses an empty list of groups, so a vector without elements gets a group that is never stepped.
        with _groups_without_rate() as without_rate:
            self._optimizer = build(
                groups or [{"params": [nn.Parameter(torch.zeros(0, 0))], "weight_decay": 0.0, "lr": peak}]
            )
        if not isinstance(self._optimizer, TorchOptimizer):
            raise TypeError("it makes no torch optimizer from parameter groups")
        self._optimizer.register_load_state_dict_pre_hook(self._split_as_saved)
        self._ratios = _ratios(self._optimizer, without_rate, peak)
        self.decays = "weight_decay" in self._optimizer.defaults
        """Whether the torch optimizer knows what weight decay is."""
        self.plain = (
            isinstance(self._optimizer, torch.optim.SGD)
            and weight_decay == clip_norm == 0
            and all(group["momentum"] == 0 for group in self._optimizer.param_groups)
            and all(ratio == 1.0 for ratio in self._ratios)
        )
        """Whether a step is x <- x - eta d and nothing else."""

    def step(
        self,
        direction: Tensor,
        learning_rate: float,
        norm: float | None = None,
        *,
        frozen: Collection[str] = (),
    ) -> None:
        """Take one step along `direction`, `(P,)`, which is read and not changed.

        Args:
            norm: the norm to clip by if `direction` is a part of a longer one, as that of a pipeline's stage is. None:
                its own norm.
            frozen: names of tensors that are not stepped, as torch leaves out what has no gradient: no weight decay,
                no moment, no count.
        """
        if frozen and not self._tensor_by_tensor:
            self._split_into_tensors()
        if self._clip_norm > 0:
            direction = self._clip(direction, norm)
        for tensor, gradient in zip(self._tensors, itertools.chain(*self._cut(direction)), strict=True):
            tensor.grad = gradient
        if frozen:
            for name, tensor in zip(self._layout.names, self._tensors, strict=True):
                if name in frozen:
                    tensor.grad = None
        for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = ratio * learning_rate
            if ratio == 0.0:
                for tensor in group["params"]:
                    tensor.grad = None  # not all of torch's optimizers stand still at learning rate 0
        self._optimizer.step()
        for tensor in self._tensors:
            tensor.grad = None  # the direction is borrowed for this call only

    def _split_into_tensors(self) -> None:
        """Step tensor by tensor from here on, since one that has been frozen has taken fewer steps than the others.

        Each tensor is a group, because torch's fused SGD cannot step one that has no momentum yet beside others that
        have. The state of the vector's two parts, decayed and undecayed, is cut into that of their tensors.
        """
        optimizer = self._optimizer
        parts = self._tensors
        groups = optimizer.param_groups
        ratios = self._ratios
        self._tensors = []
        optimizer.param_groups = []
        self._ratios = []
        self._tensor_by_tensor = True  # so `_cut` gives tensors from here on
        views_by_part = filter(None, self._cut(self._vector))  # a part without tensors has no group
        for part, group, ratio, views in zip(parts, groups, ratios, views_by_part, strict=True):
            state = optimizer.state.pop(part, {})
            for view in views:
                tensor = nn.Parameter(view)
                self._tensors.append(tensor)
                self._ratios.append(ratio)
                # "apart" tells `_split_as_saved`, since torch saves the entries of groups.
                optimizer.param_groups.append({**group, "params": [tensor], "apart": True})
                begin = view.storage_offset() - part.storage_offset()
                for key, value in state.items():
                    if value.shape == part.shape:
                        optimizer.state[tensor][key] = value[begin : begin + view.numel()].view(view.shape)
                    else:  # how many steps it has taken
                        optimizer.state[tensor][key] = value.clone()

    def _split_as_saved(self, optimizer: TorchOptimizer, state: dict[str, Any]) -> None:
        """Step tensor by tensor if the optimizer did whose `state` is loaded next; torch calls it."""
        if "apart" in state["param_groups"][0] and not self._tensor_by_tensor:
            self._split_into_tensors()

    def _cut(self, vector: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of `vector`, those that weight decay acts on and the others: one of each, or one of each tensor."""
        if not self._tensor_by_tensor:
            decayed, undecayed = vector.split([self._num_decayed, len(vector) - self._num_decayed])
            decayed_parts = [decayed] if len(decayed) else []
            undecayed_parts = [undecayed] if len(undecayed) else []
            return decayed_parts, undecayed_parts
        views = list(self._layout.views(vector).values())
        number = sum(offset < self._num_decayed for offset in self._layout.offsets)
        return views[:number], views[number:]

    def _clip(self, direction: Tensor, norm: float | None) -> Tensor:
        """Return `direction`, or a copy that is scaled down if its norm is too large. It notes the norm."""
        self.norm = float(torch.linalg.vector_norm(direction)) if norm is None else norm
        factor = self._clip_norm / (self.norm + 1e-6)
        if factor >= 1.0:
            return direction
        if self._clipped is None:
            self._clipped = torch.empty_like(direction)
        return torch.mul(direction, factor, out=self._clipped)

    @property
    def state_size(self) -> int:
        """How many elements the optimizer's state has, which is known after one step; see `share_state`."""
        states = self._optimizer.state.values()
        return sum(value.numel() for state in states for value in state.values() if isinstance(value, Tensor))

    def share_state(self, vector: Tensor) -> None:
        """Move the optimizer's state, zeroed, to `vector`, which other processes may step with too (Hogwild).

        Args:
            vector: float32, at least `state_size` elements and all zeros; borrowed.
        """
        self.create_state()
        for state in self._optimizer.state.values():
            for key in sorted(key for key, value in state.items() if isinstance(value, Tensor)):
                size = state[key].numel()
                state[key] = vector[:size].view(state[key].shape)
                vector = vector[size:]

    def rebind(self, parameters: Tensor) -> None:
        """Step another vector of the same size from now on, with the same state; borrowed."""
        self._vector = parameters
        for tensor, part in zip(self._tensors, itertools.chain(*self._cut(parameters)), strict=True):
            tensor.data = part

    def create_state(self) -> None:
        """Make the optimizer create its state, which torch does in the first step: one at learning rate 0."""
        self.step(torch.zeros(len(self._vector), dtype=torch.float32), 0.0)


@contextlib.contextmanager
def _groups_without_rate() -> Iterator[list[ParameterGroup]]:
    """A context that collects the parameter groups which torch optimizers are given without a learning rate.

    Torch gives those the default of their class, and afterwards nobody can tell that number from one that was written.
    So a method of `torch.optim.Optimizer` is replaced within the context.
    """
    without_rate: list[ParameterGroup] = []
    add = TorchOptimizer.add_param_group

    def noting(optimizer: TorchOptimizer, group: ParameterGroup) -> None:
        if "lr" not in group:
            without_rate.append(group)
        add(optimizer, group)

    TorchOptimizer.add_param_group = noting  # type: ignore[assignment, method-assign]
    try:
        yield without_rate
    finally:
        TorchOptimizer.add_param_group = add  # type: ignore[method-assign]


def _ratios(optimizer: TorchOptimizer, without_rate: Iterable[ParameterGroup], peak: float) -> list[float]:
    """The share of the learning rate at which each group steps. It is 1 for a group that was given no rate of its own,
    which then has the default of the optimizer's class.

    Args:
        without_rate: the groups that were given no learning rate.

    Raises:
        UsageError: if a rate is below 0, or if it cannot be told from the default of the class.
    """
    parameter = inspect.signature(type(optimizer)).parameters.get("lr")
    own_rate = None if parameter is None else parameter.default
    unset = {id(group) for group in without_rate if group.get("lr") == own_rate}
    ratios = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if rate is None or id(group) in unset:
            ratios.append(1.0)
            continue
        is_ambiguous = unset and rate == own_rate and rate != peak
        if is_ambiguous:
            raise UsageError(
                f"one parameter group was given lr={rate:g}, and another none, for which {type(optimizer).__name__} "
                f"has the same number, so it cannot be told which rates are meant; write the first as a ratio of the "
                f"peak, {{'lr': {rate / peak:g} * groups[0]['lr'], ...}}"
            )
        ratio = float(rate) / peak
        if not 0.0 <= ratio < math.inf:
            raise UsageError(f"a parameter group has lr={rate:g}; give it a number from 0 up, 0 to freeze the group")
        ratios.append(ratio)
    return ratios


@dataclasses.dataclass(frozen=True)
class OptimizerRecipe:
    """An optimizer before there is a vector to step; can be sent to another process."""

    build: BuildOptimizer
    """Makes the torch optimizer from parameter groups, such as `SGD` and `AdamW`."""
    weight_decay: float = 0.0
    """The weight decay of matrices, as the torch optimizer defines it; other parameters have none."""
    clip_norm: float = 0.0
    """The largest Euclidean norm of a direction; 0: no clipping."""
    peak: float = dataclasses.field(default=1.0, compare=False)
    """The largest learning rate of the run. The rate of a parameter group is a share of it."""

    def __str__(self) -> str:
        return type(self.build).__name__.lower() if self.is_elementwise else self.name

    @property
    def name(self) -> str:
        """The name of what builds the optimizer, e.g. ``Adagrad``."""
        build = getattr(self.build, "func", self.build)  # of functools.partial
        return str(getattr(build, "__name__", type(build).__name__))

    @property
    def known_name(self) -> str | None:
        """What settings call it; None for an optimizer of the user's own."""
        return next((name for name, kind in OPTIMIZERS.items() if type(self.build) is kind), None)

    @property
    def is_elementwise(self) -> bool:
        """Whether an element's step depends on no other element; torch's classes do not say, so others are taken not
        to be.
        """
        return isinstance(self.build, SGD | AdamW)

    @property
    def options(self) -> dict[str, Any]:
        """What the optimizer is built with, as far as it is known, by name."""
        if dataclasses.is_dataclass(self.build) and not isinstance(self.build, type):
            return dataclasses.asdict(self.build)
        return dict(getattr(self.build, "keywords", {}))

    def on(self, parameters: Tensor, layout: Layout) -> Optimizer:
        """Return the optimizer of `parameters`, `(P,)`, which lie as `layout` says.

        Raises:
            UsageError: if the torch optimizer does not take these parameters.
        """
        try:
            return Optimizer(
                parameters,
                layout.num_decayed,
                self.build,
                layout=layout,
                tensor_by_tensor=not self.is_elementwise,
                weight_decay=self.weight_decay,
                clip_norm=self.clip_norm,
                peak=self.peak,
            )
        except Exception as error:
            if isinstance(error, UsageError) or is_out_of_memory(error):
                raise
            raise self._refused(error) from error

    def check(self, layout: Layout | None = None, device: str = "cpu") -> None:
        """Refuse what could not train, before anything runs.

        Args:
            layout: the layout of the model, whose tensors the optimizer has to take; None: it has to step a small
                matrix.

        Raises:
            UsageError: naming the optimizer, and what is wrong with it.
        """
        if self.is_elementwise:
            return
        if not callable(self.build):
            given = str(self.build).partition("\n")[0]
            raise UsageError(
                f"optimizer={given!r} is no function from parameter groups to an optimizer; give asyncsgd.AdamW(), "
                f"asyncsgd.SGD(), or a class of torch.optim{nearest(given, dir(torch.optim))}"
            )
        for option, argument in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
            if option in self.options:
                raise UsageError(
                    f"{option}={self.options[option]} of optimizer {self.name} would do nothing; give "
                    f"{argument}={self.options[option]} to train"
                )
        if layout is not None:
            self.on(
                torch.zeros(1, device=device, dtype=torch.float32).expand(layout.size), layout
            )  # takes next to no memory
            return
        matrix = Layout(("weight",), ((4, 4),), (0,), 16, 16)
        try:
            optimizer = self.on(torch.ones(matrix.size, device=device, dtype=torch.float32), matrix)
        except UsageError:
            if isinstance(getattr(self.build, "func", self.build), type):
                raise
            return  # a function may look for the names of a model, which are known later
        direction = torch.ones(matrix.size, device=device, dtype=torch.float32)
        try:
            optimizer.step(direction, 0.0)
        except Exception as error:
            raise self._refused(error) from error
        if not bool((direction == 1.0).all()):
            raise UsageError(f"optimizer {self.name} changes the gradients that it is given; let it change a copy")
        if self.weight_decay and not optimizer.decays:
            raise UsageError(
                f"optimizer {self.name} has no weight decay, and weight_decay={self.weight_decay:g} would do nothing; "
                f"give 0"
            )

    def _refused(self, error: Exception) -> UsageError:
        return UsageError(f"optimizer {self.name} cannot be used: {str(error).partition(chr(10))[0]}; give another one")


class PlainSGD:
    """Plain SGD straight on a vector of any floating type, without torch.optim's bookkeeping: x <- x - eta d.

    Bit for bit what `torch.optim.SGD` does; for the virtual clock, where a step costs less than that bookkeeping.
    """

    plain = True
    norm = None
    KEPT = ()

    def __init__(self, parameters: Tensor) -> None:
        self._parameters = parameters

    def step(self, direction: Tensor, learning_rate: float) -> None:
        """Take one step along `direction`, `(P,)`."""
        self._parameters.add_(direction, alpha=-learning_rate)


class StepTakenByWorker:
    """Takes the place of an `Optimizer` where workers or ranks have already stepped: the server only counts."""

    plain = False
    KEPT = ()
    norm: float | None = None
    """The Euclidean norm of their last direction; None if it is not known."""

    def step(self, direction: Tensor, learning_rate: float) -> None:
        return
