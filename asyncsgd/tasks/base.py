"""The task contract: what is learned, i.e. model, data, loss and scores. A task knows no rule, no server, no runtime.

A task is a frozen dataclass whose fields are its settings, so it can be pickled and written down. Every process builds
its own model and data from it. The library sets device, autocast, evaluation mode and `no_grad`; a task computes:

    outputs = task.outputs(model, batch)        one forward pass
    loss    = task.loss(outputs, batch)         a scalar, the mean over task.weight(batch) loss terms
    sums    = task.sums(outputs, batch)         numbers that add up over batches; task.metrics(sums) divides, once

so that batches of different weights make one gradient, and shards of an evaluation one number.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from asyncsgd.errors import UsageError
from asyncsgd.settings.choices import name_of_class
from asyncsgd.settings.groups import Defaults

if TYPE_CHECKING:  # a task's settings are flags, and --help is not to wait for torch and numpy
    import numpy as np
    import torch
    from torch import Tensor, nn

Directions = Mapping[str, Literal["higher", "lower"]]
"""Metrics by name, each with the direction that is better."""

Batch = Any
"""A tensor, or a mapping (a dict, BatchEncoding), list, tuple or dataclass of batches. Values of any other type are
passed on unchanged: they are neither moved to a device nor split. A read-only mapping is made again by its type, which
has to take a dict."""

Sums = dict[str, Any]
"""By name, what adds up over batches: numbers, numpy arrays or tensors. Always there are ``loss``, summed over the loss
terms in float64, and ``weight``, how many there are."""


class Batches(Protocol):
    """Batches that are made when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


class Data(Protocol):
    """A task's data in one process.

    A stream is an endless sequence of training batches, in an order of its own. All workers of a run share stream 0:
    each of its batches is handed to one worker. So stream 0 has to go through all samples; what other streams would
    have is never learned.
    """

    def batch(self, stream: int, index: int) -> Batch:
        """Training batch `index` of a stream, on the CPU; a pure function."""

    @property
    def evaluation(self) -> Mapping[str, Batches]:
        """The evaluation sets by name, ``main`` first: batches that are the same for every seed and
        for every way to train.

        The loss and metrics of a run are those of ``main``; the others' go into the details of each evaluation.
        """


def found() -> Any:
    """Declare a field of a task that `Task.prepare` fills in: no setting, and None before.

    Torchrun's other ranks are sent these fields and nothing else, so they hold int, float, str, bool, None, or tuples.
    """
    return dataclasses.field(default=None, repr=False, metadata={"found": True})


class Task(abc.ABC):
    """What is learned. Subclasses are frozen dataclasses.

    Fields name things, e.g. a file. `prepare` runs in one process, reads these things and keeps the results in fields
    declared with `found`. `model` and `data` run in every process and read the results into memory.
    """

    name: ClassVar[str]
    """What records and tables call the task. By default it is the name of the class in small letters, ``two_spirals``
    for `TwoSpirals`. A class that sets `name` passes it on to its subclasses."""
    _says_its_name: ClassVar[bool] = False
    """Whether the class, or one that it inherits from, says a name."""
    better: ClassVar[Directions] = {}
    """Its metrics; the first is the primary one. See `scored_by`, where they follow from the task's settings."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that its workers import; naming them lets workers start sooner."""
    auto_class: ClassVar[str | None] = None
    """The class of transformers that loads what `save` writes, e.g. ``AutoModelForMaskedLM``; None where none does."""
    output_folders: ClassVar[tuple[str, ...]] = ()
    """Fields that name folders which `final` writes into; no other run may name them meanwhile."""
    defaults: ClassVar[Defaults] = Defaults()
    """How it is trained unless somebody says otherwise, by `train` and by a script."""
    batch_size: int
    """Samples of every training batch."""
    sample_order: int | None = None
    """The number of the order of its samples, see `asyncsgd.data.order`; None where it has no such choice."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            cls._says_its_name = True
        elif not cls._says_its_name:
            cls.name = name_of_class(cls)

    def check_names(self) -> None:
        """Refuse mistakes that show before any data are read and a folder is made, e.g. a file that is not there.

        Raises:
            UsageError: if the user must change something; the message says what.
        """
        return

    def prepare(self, seed: int, cache: Path) -> Self:
        """The task with all that is slow to find out: texts read, tokens on disk, names resolved; once per run.

        Args:
            seed: of the run, for what depends on the initial model, e.g. a hash of it.
            cache: a folder to keep prepared data in, from run to run.

        Raises:
            UsageError: as `check_names`.
        """
        return self

    def before_preparing(self, cache: Path) -> str:
        """A line for the user before `prepare`, where that may take long; empty where it does not."""
        return ""

    def folders(self) -> tuple[str, ...]:
        """The folders that a prepared task reads, by their paths; other hosts get copies of them. Where there are none,
        every host prepares the task for itself.
        """
        return ()

    def in_folders(self, places: Mapping[str, str]) -> Self:
        """The prepared task with each path of its `folders` replaced by what `places` has for that path."""
        return self

    def facts(self) -> Mapping[str, Any]:
        """What is known of a prepared task, as JSON, for the summary of its runs: ``data``, ``data_fingerprint``,
        ``num_train_samples``, ``num_eval_samples``, ``from_scratch``, ``notes``, and ``base_model`` (what training
        begins from as the user named it, None for random weights), where it has them.
        """
        return {}

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the trained `model` into `folder`, which is new: all of its state_dict, as ``load_state_dict`` takes
        it.
        """
        import torch
        from safetensors.torch import save_file

        # Copies, since all parameters of a model that is trained lie in one vector, and buffers may share memory.
        tensors = {}
        for name, tensor in model.state_dict().items():
            on_cpu = tensor.detach().cpu()
            tensors[name] = on_cpu.clone(memory_format=torch.contiguous_format)
        save_file(tensors, folder / "model.safetensors")

    @abc.abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A new model with its initial values, on the CPU and in training mode; its parameters are moved into a flat
        vector.

        Every process calls this and must get the same values, so draw them inside ``with asyncsgd.seeded(seed):``.
        """

    @abc.abstractmethod
    def data(self, seed: int) -> Data:
        """The data, read by this process for itself; equal in every process.

        Args:
            seed: of the run; decides the order of the training samples.
        """

    @abc.abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """One forward pass: what `model` says of `batch`, whose tensors are on its device; for `loss` and `sums`."""

    @abc.abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The loss, a scalar: the mean over ``weight(batch)`` loss terms.

        Gradients of several batches are averaged with these weights, so a sum in place of the mean, or a mean over
        another number of terms, trains another model. `asyncsgd.check` looks for such a mistake.
        """

    def weight(self, batch: Batch) -> float:
        """Loss terms behind the batch's loss; 0 where it has none. Read from the batch on the CPU.

        By default the rows of its tensors, which may be fewer in the last batch of an evaluation; a tensor without
        dimensions has none and does not count. Where tensors have different numbers of rows, it is `batch_size`. That
        is too much for a shorter last batch of an evaluation, so such a task needs a `weight` of its own.

        Raises:
            UsageError: if there are no tensors whose rows could be counted.
        """
        rows = {len(tensor) for tensor in tensors_in(batch) if tensor.ndim}
        if not rows:
            raise UsageError(
                f"no tensor with rows is seen in a batch of type {type(batch).__name__}, so its loss terms cannot be "
                f"counted; give the task a method weight(batch), or make the batch a mapping, list, tuple or dataclass"
            )
        return float(rows.pop() if len(rows) == 1 else self.batch_size)

    def count_tokens(self, batch: Batch) -> int | None:
        """Tokens in the batch that are trained on, for the rate; a task says which count, e.g. all that are no padding.
        None: it has none.
        """
        return None

    def split(self, batch: Batch, parts: int) -> Sequence[Batch]:
        """The batch cut into `parts` batches. Their losses, weighted by their loss terms, give the loss of the whole.

        Raises:
            UsageError: if it cannot be split.
        """
        return split_rows(batch, parts)

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        """What `metrics` is computed from, summed over the batch: the same names and shapes for every batch.

        The library adds up all batches and workers, and adds ``loss`` and ``weight`` itself. Give ``loss`` only if the
        summed loss is not `loss` times `weight`.
        """
        return {}

    def scored_by(self) -> Directions:
        """Its metrics, the primary one first, each with the direction that is better: by default `better`."""
        return self.better

    def loss_unit(self) -> str:
        """The unit of `loss`, for axes and sentences: ``nats`` for a cross entropy; by default none is named."""
        return ""

    def metrics(self, sums: Sums) -> dict[str, Any]:
        """A number for each name in `scored_by`, of the sums of a whole evaluation set; None where it is undefined.

        This is the only division, so no mean of means appears.
        """
        return {}

    def details(self, sums: Sums) -> dict[str, Any]:
        """What else a whole evaluation says, as JSON: a confusion matrix, a score per class."""
        return {}

    def final(self, model: nn.Module) -> Mapping[str, Any]:
        """What is found out once, at the end, as JSON for the summary. The model is in evaluation mode."""
        return {}


def to_device(batch: Batch, device: torch.device) -> Batch:
    """`batch` with its tensors on `device`; the tensors themselves where they are there already."""
    from torch.nn.utils.rnn import PackedSequence

    # A packed sequence leaves its batch sizes on the CPU, where torch wants them.
    return map_tensors(lambda value: value.to(device), batch, kinds=(PackedSequence,))


def map_tensors(
    change: Callable[[Any], Any], batch: Batch, kinds: tuple[type, ...] = (), *, columns: bool = False
) -> Batch:
    """`batch` with every tensor in it changed.

    The tensors of dataclasses are changed too; torch's own pytree takes a dataclass for a leaf.

    Args:
        kinds: further types whose values are changed.
        columns: whether lists, tuples and arrays without tensors are changed as a whole, e.g. the texts of the samples.
    """
    import torch

    inner = functools.partial(map_tensors, change, kinds=kinds, columns=columns)
    is_leaf = isinstance(batch, (torch.Tensor, *kinds))
    if is_leaf or (columns and _is_column(batch)):
        return change(batch)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)
        for key, value in batch.items():
            changed[key] = inner(value)  # a ModelOutput of transformers has no update()
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(inner, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(inner, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {}
        for field in dataclasses.fields(batch):
            if field.init:  # the dataclass computes the others itself
                values[field.name] = inner(getattr(batch, field.name))
        return dataclasses.replace(batch, **values)
    if isinstance(batch, Mapping):
        return type(batch)({key: inner(value) for key, value in batch.items()})  # type: ignore[call-arg]
    return batch


def _is_column(value: Any) -> bool:
    """Whether it is a list, tuple or array that holds something and no tensor."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return value.ndim > 0
    is_sequence = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return is_sequence and len(value) > 0 and not tensors_in(value)


def tensors_in(batch: Batch, *, columns: bool = False) -> list[Any]:
    """The tensors of a batch, and with `columns` what `map_tensors` changes beside them."""
    tensors: list[Any] = []

    def keep(tensor: Any) -> Any:
        tensors.append(tensor)
        return tensor

    map_tensors(keep, batch, columns=columns)
    return tensors


def row_counts(batch: Batch) -> list[int]:
    """The length of every tensor's first dimension, 0 for a scalar.

    >>> import torch
    >>> row_counts({"x": torch.zeros(3, 2), "y": torch.zeros(3), "name": "a"})
    [3, 3]
    """
    return [len(tensor) if tensor.ndim else 0 for tensor in tensors_in(batch)]


def split_rows(batch: Batch, parts: int) -> list[Batch]:
    """Split every tensor along its first dimension, which has to be the same for all. Lists, tuples and arrays of that
    length are split alike.

    >>> import torch
    >>> batch = {"x": torch.arange(3), "texts": ["a", "b", "c"]}
    >>> [(part["x"].tolist(), part["texts"]) for part in split_rows(batch, 2)]
    [([0, 1], ['a', 'b']), ([2], ['c'])]

    Raises:
        UsageError: if they have different lengths, or fewer rows than there are parts.
    """
    lengths = row_counts(batch)
    if len(set(lengths)) != 1 or lengths[0] < parts:
        raise UsageError(
            f"a batch whose tensors have {', '.join(map(str, sorted(set(lengths)))) or 'no'} rows cannot be split in "
            f"{parts}; give the task a method split(batch, parts)"
        )
    for column in tensors_in(batch, columns=True):
        if len(column) != lengths[0]:
            raise UsageError(
                f"a batch of {lengths[0]} rows with a {type(column).__name__} of {len(column)} beside its tensors "
                f"cannot be split, since nobody knows which part has what of it; give the task a method "
                f"split(batch, parts)"
            )
    # The sizes of the parts differ by 1 at most.
    bounds = [math.ceil(lengths[0] * part / parts) for part in range(parts + 1)]
    batches = []
    for first, end in itertools.pairwise(bounds):
        rows_of_part = operator.itemgetter(slice(first, end))
        batches.append(map_tensors(rows_of_part, batch, columns=True))
    return batches


def fingerprint(data: Data) -> str:
    """16 hexadecimal digits that change with the bytes of the tensors of the evaluation batches, one behind another.
    They do not change with shapes, with where a batch ends, or with values that are no tensors.
    """
    import hashlib  # takes a tenth of the time of --help

    digest = hashlib.sha256()
    for name, batches in data.evaluation.items():
        digest.update(name.encode())
        for index in range(len(batches)):
            digest_tensors(digest, batches[index])
    return digest.hexdigest()[:16]


def digest_tensors(digest: Any, batch: Batch) -> int:
    """Add the bytes of a batch's tensors to a hash of hashlib, and return how many tensors there are."""
    import torch

    tensors = tensors_in(batch)
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().data)
    return len(tensors)


def add_sums(many: Iterable[Sums]) -> Sums:
    """Add sums up, name by name, in order.

    >>> add_sums([{"loss": 1.5, "weight": 2.0}, {"loss": 0.5, "weight": 1.0}])
    {'loss': 2.0, 'weight': 3.0}
    """
    total: Sums = {}
    for sums in many:
        for name, value in sums.items():
            if name in total:
                value = total[name] + value
            total[name] = value
    return total


def plain_sums(sums: Sums) -> Sums:
    """The sums with tensors as numbers or numpy arrays: one transfer from the device for each."""
    import torch

    plain = {}
    for name, value in sums.items():
        if isinstance(value, torch.Tensor):
            value = value.item() if value.ndim == 0 else value.cpu().numpy()
        plain[name] = value
    return plain


def encode_sums(sums: Sums) -> str:
    """JSON of numbers and arrays, exact to the last bit; see `decode_sums`."""

    def plain(array: np.ndarray) -> dict[str, Any]:
        return {"array": array.tolist(), "dtype": str(array.dtype)}

    return json.dumps(sums, default=plain)


def decode_sums(text: str) -> Sums:
    """The sums behind `encode_sums`.

    >>> import numpy as np
    >>> sums = {"loss": 0.1, "weight": 2.0, "confusion": np.eye(2, dtype=np.int64)}
    >>> decode_sums(encode_sums(sums))["confusion"].tolist()
    [[1, 0], [0, 1]]
    """

    import numpy as np

    def array(value: dict[str, Any]) -> Any:
        if value.keys() != {"array", "dtype"}:
            return value
        return np.array(value["array"], value["dtype"])

    return json.loads(text, object_hook=array)
