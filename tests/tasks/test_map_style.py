"""A torch Dataset as the data of a task: every batch is a function of its number, random transforms included."""

import dataclasses
import multiprocessing
import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from doors import DatasetData, Processes, RunError, Task, UsageError, asyncsgd
from hypothesis import assume, given
from hypothesis import strategies as st
from tasks import Plane, points
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler


class Numbers(Dataset):
    """The numbers from 0 on, each with a draw from every default generator beside it."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        if not 0 <= row < self.size:
            raise IndexError(row)
        return row, torch.rand(()), np.random.random(), random.random()  # noqa: NPY002 - as transforms of others do


def of(size, batch_size=4, seed=0, **named):
    return DatasetData(Numbers(size), Numbers(size), batch_size, seed, **named)


def listed(batch):
    return [part.tolist() for part in batch]


@given(st.integers(1, 20), st.integers(1, 7), st.booleans(), st.integers(0, 2**32 - 1))
def test_every_epoch_has_every_item_once_and_with_drop_last_whole_batches(size, batch_size, drop_last, seed):
    assume(size >= batch_size or not drop_last)
    loader = DataLoader(Numbers(size), batch_size, shuffle=True, drop_last=drop_last)
    data = DatasetData(loader, Numbers(size), batch_size, seed)
    length = size
    if drop_last:
        length -= size % batch_size
    assert data.num_train_samples == length
    batches = [data.batch(0, index)[0] for index in range(2 * length)]
    assert {len(batch) for batch in batches} == {batch_size}
    rows = torch.cat(batches).tolist()
    for first in range(0, len(rows), length):
        epoch = rows[first : first + length]
        assert len(set(epoch)) == length
        assert set(epoch) <= set(range(size))


def test_what_an_item_draws_is_a_function_of_seed_stream_and_position_and_leaves_the_generators_alone():
    torch.manual_seed(5)
    random.seed(5)
    data = of(6)
    forwards = [listed(data.batch(0, index)) for index in range(5)]
    drawn = (torch.rand(()).item(), random.random())
    torch.manual_seed(5)
    random.seed(5)
    again = of(6)
    assert [listed(again.batch(0, index)) for index in reversed(range(5))] == forwards[::-1]
    assert (torch.rand(()).item(), random.random()) == drawn
    for kind in (1, 2, 3):
        draws = []
        for batch in forwards:
            draws += batch[kind]
        assert len(set(draws)) == len(draws)  # an item that comes again is drawn for again
    assert listed(of(6, seed=1).batch(0, 0)) != forwards[0]
    assert listed(data.batch(1, 0)) != forwards[0]


def test_an_evaluation_is_of_the_items_in_their_order_and_the_same_for_every_seed():
    found = []
    for seed in (0, 3):
        main = of(10, seed=seed).evaluation["main"]
        batches = [listed(main[index]) for index in range(len(main))]
        assert [batch[0] for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        found.append(batches)
    assert found[0] == found[1]


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [3, 3, 3, 1]), (True, [3, 3, 3])])
def test_an_evaluation_by_a_loader_has_that_loaders_batches(drop_last, sizes):
    loader = DataLoader(Numbers(10), 3, drop_last=drop_last)
    main = DatasetData(Numbers(10), loader, 4, 0).evaluation["main"]
    theirs = [rows.tolist() for rows, *_ in loader]
    ours = []
    for index in range(len(main)):
        rows, *_ = main[index]
        ours.append(rows.tolist())
    assert ours == theirs
    assert [len(rows) for rows in ours] == sizes


def test_a_loader_that_does_not_shuffle_gives_its_items_in_their_order():
    data = DatasetData(DataLoader(Numbers(5), 4), Numbers(5), 4, seed=0)
    assert [data.batch(0, index)[0].tolist() for index in range(3)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]


def test_collate_fn_is_the_loaders_unless_another_is_given():
    loader = DataLoader(Numbers(5), 4, shuffle=True, collate_fn=lambda items: {"n": torch.tensor(len(items))})
    assert DatasetData(loader, Numbers(5), 4, 0).batch(0, 0)["n"] == 4
    given_too = DatasetData(loader, Numbers(5), 4, 0, collate_fn=lambda items: [torch.tensor(2 * len(items))])
    assert given_too.batch(0, 0)[0] == 8
    assert given_too.evaluation["main"][1][0] == 2


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class TenTimes(RandomSampler):
    pass


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Endless(), "Endless, which gives no item by its number"),
        (DataLoader(Endless(), 4), "Endless, which gives no item by its number"),
        (iter([1]), "which gives no item by its number"),
        ([], "has no items"),
        (DataLoader(Numbers(8), 4, sampler=WeightedRandomSampler([1.0] * 8, 8)), "sampler of its own, WeightedRandom"),
        (DataLoader(Numbers(8), 4, sampler=RandomSampler(Numbers(8), replacement=True)), "a sampler of its own"),
        (DataLoader(Numbers(8), 4, sampler=RandomSampler(Numbers(8), num_samples=5)), "a sampler of its own"),
        (DataLoader(Numbers(8), 4, sampler=TenTimes(Numbers(8))), "a sampler of its own, TenTimes"),
        (DataLoader(Numbers(8), batch_sampler=[[0, 1], [2]]), "has no batch_size of its own"),
        (DataLoader(Numbers(8), batch_size=None), "has no batch_size of its own"),
    ],
    ids=range(10),
)
@pytest.mark.parametrize("where", ["train", "evaluation"])
def test_data_whose_batch_is_no_function_of_its_number_are_refused_by_name(source, said, where):
    sources = {"train": Numbers(8), "evaluation": Numbers(8), where: source}
    with pytest.raises(UsageError, match=f"{where}.*{said}"):
        DatasetData(sources["train"], sources["evaluation"], 4, 0)


def test_a_loader_of_another_batch_size_than_the_tasks_is_refused():
    with pytest.raises(UsageError, match="batch_size=8, and the task has 4"):
        DatasetData(DataLoader(Numbers(8), 8, shuffle=True), Numbers(8), 4, 0)
    with pytest.raises(UsageError, match="train has 3 items, fewer than a batch of 4"):
        DatasetData(DataLoader(Numbers(3), 4, shuffle=True, drop_last=True), Numbers(8), 4, 0)
    with pytest.raises(UsageError, match="evaluation has 3 items, fewer than a batch of 4"):
        DatasetData(Numbers(8), DataLoader(Numbers(3), 4, drop_last=True), 4, 0)


@dataclasses.dataclass(frozen=True)
class PlaneOfItems(Plane):
    """`tasks.Plane`, whose points are the items of a dataset."""

    name: ClassVar[str] = "plane_of_items"

    def data(self, seed):
        return DatasetData(TensorDataset(*points(100, 1)), TensorDataset(*points(30, 2)), self.batch_size, seed)


class Jittered(TensorDataset):
    """Points with noise that is drawn when they are read."""

    def __getitem__(self, row):
        x, y = super().__getitem__(row)
        return x + 0.1 * torch.randn(16), y + 0.1 * random.random()


@dataclasses.dataclass(frozen=True)
class JitteredPlane(Plane):
    name: ClassVar[str] = "jittered_plane"

    def data(self, seed):
        return DatasetData(Jittered(*points(100, 1)), TensorDataset(*points(30, 2)), self.batch_size, seed)


@dataclasses.dataclass(frozen=True)
class TornPlane(Plane):
    """One of its points cannot be read."""

    name: ClassVar[str] = "torn_plane"

    def data(self, seed):
        class Torn(TensorDataset):
            def __getitem__(self, row):
                if row == 77 and multiprocessing.parent_process() is not None:
                    raise OSError("truncated image")
                return super().__getitem__(row)

        return DatasetData(Torn(*points(100, 1)), TensorDataset(*points(30, 2)), self.batch_size, seed)


def sha(task: Task, **named):
    run = asyncsgd.train(task, samples=240, learning_rate=0.01, quiet=True, **named)
    return run.summary["parameters_sha256"]


def test_the_items_of_a_dataset_train_the_model_that_their_tensors_train():
    assert sha(PlaneOfItems()) == sha(Plane())


def test_the_fingerprint_is_that_of_the_items_and_not_of_the_seed():
    fingerprints = []
    for task in (PlaneOfItems(), JitteredPlane()):
        of_task = set()
        for seed in (0, 1):
            run = asyncsgd.train(task, samples=16, seed=seed, quiet=True)
            of_task.add(run.summary["train_fingerprint"])
        (fingerprint,) = of_task
        fingerprints.append(fingerprint)
    assert fingerprints[0] != fingerprints[1]


def test_the_fingerprint_of_items_that_are_collated_with_one_another_is_that_of_the_items():
    def mixed(items):
        first, second, *_ = items
        return first[0] + second[0]

    fingerprints = []
    for value in (0.0, 1.0):
        rows = torch.zeros(6, 2)
        rows[3, 1] = value
        data = DatasetData(TensorDataset(rows), TensorDataset(rows), 2, 0, collate_fn=mixed)
        fingerprints.append(data.fingerprint())
    first, second = fingerprints
    assert first != second


@pytest.mark.processes
def test_random_transforms_on_real_workers_replay_bit_for_bit(tmp_path):
    sha(JitteredPlane(), runtime=Processes(2), folder=tmp_path / "run")
    assert asyncsgd.replay(tmp_path / "run", JitteredPlane()).identical


@pytest.mark.processes
def test_an_item_that_cannot_be_read_ends_the_run_and_is_named():
    with pytest.raises(RunError, match="item 77 of train cannot be read: OSError: truncated image"):
        sha(TornPlane(), runtime=Processes(2))


def test_prefetching_of_items_is_refused():
    with pytest.raises(UsageError, match="drop --prefetch"):
        sha(PlaneOfItems(), prefetch=2)
