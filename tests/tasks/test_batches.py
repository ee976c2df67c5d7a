"""What a batch may be: any mapping, list, tuple or dataclass of tensors is counted, cut and moved alike."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import BatchEncoding

import asyncsgd
from asyncsgd.tasks.base import row_counts, split_rows, tensors_in
from asyncsgd.tasks.tensors import TensorData


def default(values):
    return collections.defaultdict(list, values)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, default, collections.UserDict, BatchEncoding])
@given(rows=st.integers(1, 9), parts=st.integers(1, 9))
def test_a_mapping_is_cut_into_mappings_of_its_kind_and_stays_as_it_was(kind, rows, parts):
    parts = min(rows, parts)
    batch = kind({"x": torch.arange(2 * rows).view(rows, 2), "inner": kind({"y": torch.arange(rows)}), "name": "a"})
    assert row_counts(batch) == [rows, rows]
    split = split_rows(batch, parts)
    assert all(type(part) is type(batch) and part["name"] == "a" for part in split)
    assert torch.cat([part["x"] for part in split]).tolist() == batch["x"].tolist()
    assert torch.cat([part["inner"]["y"] for part in split]).tolist() == list(range(rows))
    assert [len(tensor) for tensor in tensors_in(batch)] == [rows, rows]


X = torch.linspace(-1.0, 1.0, 101).unsqueeze(1)


@dataclasses.dataclass(frozen=True)
class Cubic(asyncsgd.Task):
    """101 points in evaluation batches of 10, so the last has one."""

    kind: type
    """Of batches."""
    batch_size: int = 10
    name = "cubic"

    def model(self, seed):
        with asyncsgd.seeded(seed):
            return nn.Linear(1, 1)

    def data(self, seed):
        samples = self.kind({"x": X, "y": X**3})
        return TensorData(samples, samples, self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch["x"])

    def loss(self, outputs, batch):
        return (outputs - batch["y"]).square().mean()


def test_in_a_tokenizer_s_kind_of_batch_the_run_is_that_of_a_dict():
    given = {"samples": 100, "evaluations": 2, "micro_batches": 3, "quiet": True}
    expected, run = (asyncsgd.train(Cubic(kind), **given) for kind in (dict, BatchEncoding))
    assert [evaluation.loss for evaluation in run.evaluations] == [each.loss for each in expected.evaluations]
    assert [evaluation.weight for evaluation in run.evaluations] == [101.0] * 3
    with torch.no_grad():
        exact = float((run.model()(X) - X**3).square().mean())
    assert run.evaluations[-1].loss == pytest.approx(exact, rel=1e-6)
