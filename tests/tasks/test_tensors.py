"""Batches of tensors: any mapping is counted and cut alike; of samples in memory they are pure functions."""

import collections
import dataclasses
import hashlib
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding
from transformers.utils import ModelOutput

from asyncsgd.errors import UsageError
from asyncsgd.tasks.base import Task, row_counts, split_rows, tensors_in, to_device
from asyncsgd.tasks.check import _is_same
from asyncsgd.tasks.tensors import TensorData, train_fingerprint

sizes = st.integers(1, 40)


def numbered(num_samples, batch_size=4, seed=0):
    return TensorData(torch.arange(num_samples), torch.arange(num_samples), batch_size, seed)


@given(num_samples=sizes, batch_size=sizes, seed=st.integers(0, 2**32), stream=st.integers(0, 3))
def test_every_epoch_has_every_sample_once(num_samples, batch_size, seed, stream):
    data = numbered(num_samples, batch_size, seed)
    batches = [data.batch(stream, index) for index in range(3 * num_samples // batch_size + 1)]
    assert {len(batch) for batch in batches} == {batch_size}
    drawn = torch.cat(batches)
    for epoch in range(len(drawn) // num_samples):
        samples = drawn[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(samples.tolist()) == list(range(num_samples))


@given(num_samples=sizes, batch_size=sizes, order=st.permutations(range(8)))
def test_a_batch_is_the_same_in_whatever_order_it_is_asked_for(num_samples, batch_size, order):
    data = numbered(num_samples, batch_size)
    for index in order:
        unused = numbered(num_samples, batch_size)
        assert torch.equal(data.batch(0, index), unused.batch(0, index))


def test_another_seed_stream_or_epoch_has_another_order():
    orders = {tuple(range(100))}
    for seed, stream, epoch in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        order = numbered(100, 100, seed).batch(stream, epoch)
        orders.add(tuple(order.tolist()))
    assert len(orders) == 5


@given(num_samples=sizes, batch_size=sizes)
def test_the_evaluation_set_is_all_samples_in_order_for_every_seed(num_samples, batch_size):
    for seed in (0, 1):
        main = numbered(num_samples, batch_size, seed).evaluation["main"]
        batches = [main[index] for index in range(len(main))]
        assert torch.cat(batches).tolist() == list(range(num_samples))
        for batch in batches[:-1]:
            assert len(batch) == batch_size


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_the_rows_of_a_batch_belong_together_in_tuples_dicts_and_arrays():
    x = np.arange(20.0).reshape(10, 2)
    y = x[:, 0]
    pair = Pair(torch.tensor(x), torch.tensor(y))
    for samples in ((x, y), [x, y], {"x": x, "y": y}, pair):
        batch = TensorData(samples, samples, 4, seed=0).batch(0, 1)
        if isinstance(batch, dict):
            first, second = batch.values()
        else:
            first, second = batch
        assert isinstance(batch, Pair) == isinstance(samples, Pair)
        assert first.shape == (4, 2)
        assert torch.equal(first[:, 0], second)


@pytest.mark.parametrize(
    ("train", "evaluation", "batch_size", "message"),
    [
        ((torch.zeros(3), torch.zeros(4)), torch.zeros(1), 2, r"the tensors of train have \[3, 4\] rows"),
        (torch.zeros(3), torch.zeros(0, 2), 2, "evaluation has no samples"),
        ({}, torch.zeros(1), 2, "the tensors of train have"),
        ((torch.zeros(3), [0, 1, 0]), torch.zeros(1), 2, "a list of train has 3 entries, and only tensors and arrays"),
        (torch.zeros(3), [1, 2], 2, "a list of evaluation has 2 entries"),
        (np.array(["a", "b"]), torch.zeros(1), 2, "an array of train cannot be a tensor"),
        (torch.zeros(3), torch.zeros(3), 0, "batch_size must be at least 1, got 0"),
    ],
)
def test_what_is_no_set_of_samples_is_refused(train, evaluation, batch_size, message):
    with pytest.raises(UsageError, match=message):
        TensorData(train, evaluation, batch_size, seed=0)


def default(values):
    return collections.defaultdict(list, values)


KINDS = [dict, collections.OrderedDict, default, collections.UserDict, BatchEncoding, types.MappingProxyType]
KINDS.append(ModelOutput)


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(1, 9), parts=st.integers(1, 9))
def test_a_mapping_is_cut_into_mappings_of_its_kind_and_stays_as_it_was(kind, rows, parts):
    parts = min(rows, parts)
    inner = kind({"y": torch.arange(rows)})
    batch = kind({"x": torch.arange(2 * rows).view(rows, 2), "inner": inner, "name": "a"})
    assert row_counts(batch) == [rows, rows]
    split = split_rows(batch, parts)
    for part in split:
        assert type(part) is type(batch)
        assert part["name"] == "a"
    assert torch.cat([part["x"] for part in split]).tolist() == batch["x"].tolist()
    assert torch.cat([part["inner"]["y"] for part in split]).tolist() == list(range(rows))
    assert [len(tensor) for tensor in tensors_in(batch)] == [rows, rows]


@dataclasses.dataclass
class Counted:
    x: torch.Tensor
    number: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.number = len(self.x)


def test_what_a_dataclass_computes_itself_is_that_of_each_part():
    parts = split_rows(Counted(torch.arange(5)), 2)
    assert [(part.x.tolist(), part.number) for part in parts] == [([0, 1, 2], 3), ([3, 4], 2)]


def test_a_packed_sequence_is_moved_as_torch_moves_it():
    sequences = [torch.arange(2.0), torch.arange(3.0)]
    packed = torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    moved = to_device({"x": packed}, torch.device("meta"))["x"]
    devices = [tensor.device.type for tensor in moved]
    assert devices == ["meta", "cpu", "meta", "meta"]  # the batch sizes stay


def test_the_rows_of_a_short_batch_are_its_weight_also_with_a_tensor_of_one_number_beside_them():
    batch = {"x": torch.zeros(3, 2), "temperature": torch.tensor(2.0)}
    assert Task.weight(types.SimpleNamespace(batch_size=4), batch) == 3.0


@pytest.mark.parametrize(("device", "is_same"), [("cpu", False), ("cuda", True)])
def test_a_loss_may_differ_in_its_last_digits_on_a_gpu_alone(device, is_same):
    assert _is_same(1.0, 1.00001, torch.device(device)) == is_same
    assert not _is_same(1.0, 1.001, torch.device(device))
    assert _is_same(float("nan"), float("nan"), torch.device(device))


class Drawn:
    """Batches made one by one, as of data of one's own; `length` are there."""

    def __init__(self, length=1000, altered=None):
        self.length = length
        self.altered = altered
        self.asked = []

    def batch(self, stream, index):
        if index >= self.length:
            raise IndexError(index)
        self.asked.append((stream, index))
        value = float(index)
        if index == self.altered:
            value += 0.5
        return {"x": torch.full((2,), value), "text": ["a", "b"]}


def test_the_fingerprint_of_training_data_in_memory_is_that_of_their_bytes():
    rows = torch.arange(7)
    expected = hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16]
    for size, seed in ((4, 0), (3, 5)):
        data = TensorData(rows, rows[:2], size, seed)
        assert train_fingerprint(data, size, None) == expected
    assert train_fingerprint(TensorData(rows.flip(0), rows[:2], 4, 0), 4, None) != expected


@pytest.mark.parametrize(
    ("samples", "length", "read", "counted"), [(None, 1000, 64, ""), (9, 1000, 5, "x5"), (None, 3, 3, "x3")]
)
def test_the_fingerprint_of_batches_is_that_of_the_first_64_that_a_run_takes(samples, length, read, counted):
    digest = hashlib.sha256()
    for index in range(read):
        digest.update(torch.full((2,), float(index)).numpy().tobytes())
    if read == length:
        digest.update(b"ended")
    data = Drawn(length)
    assert train_fingerprint(data, 2, samples) == f"{digest.hexdigest()[:16]}/2{counted}"
    assert data.asked == [(0, index) for index in range(read)]
    whole = train_fingerprint(data, 2, samples)
    last_is_altered = train_fingerprint(Drawn(length, read - 1), 2, samples)
    next_is_altered = train_fingerprint(Drawn(length, read), 2, samples)
    assert last_is_altered != whole
    assert next_is_altered == whole


def test_batches_without_tensors_have_no_fingerprint():
    class Texts(Drawn):
        def batch(self, stream, index):
            return ["a", "b"]

    assert train_fingerprint(Texts(), 2, None) is None
