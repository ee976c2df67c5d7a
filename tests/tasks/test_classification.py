"""The loss of a classifier: torch's own without weights, its formula with them, and exact sums."""

import copy
import json
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from asyncsgd.tasks.classification import Classification, inverse_frequency
from asyncsgd.worker.evaluation import evaluate_sets

CLASSES = 3
TOKENS = 11
COUNTS = (1, 4, 2)
WEIGHTS = inverse_frequency(COUNTS)
KNOWN = json.dumps({"counts": COUNTS})
PLAIN = Classification(prepared=KNOWN)
WEIGHTED = Classification(prepared=KNOWN, class_weights=True)


def loss_of(task, model, some):
    return task.loss(task.outputs(model, some), some)


class Bag(nn.Module):
    """The smallest model with the call of a transformers classifier: mean of embeddings, dropout, a linear layer."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 5)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return types.SimpleNamespace(logits=self.head(self.dropout(mean)))


def bag(dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Bag(dropout).train()


def batch(size, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(TOKENS, (size, 7), generator=draw)
    lengths = torch.randint(1, 8, (size, 1), generator=draw)
    labels = torch.randint(CLASSES, (size,), generator=draw)
    return {"input_ids": ids, "attention_mask": (torch.arange(7) < lengths).long(), "labels": labels}


def test_without_weights_the_loss_is_torch_s_mean_cross_entropy():
    model = bag()
    some = batch(8)
    logits = model(some["input_ids"], some["attention_mask"]).logits
    assert torch.equal(loss_of(PLAIN, model, some), functional.cross_entropy(logits, some["labels"]))


def test_a_weight_multiplies_the_loss_of_its_texts_and_the_divisor_stays_the_number_of_texts():
    model = bag()
    some = batch(8)
    logits = model(some["input_ids"], some["attention_mask"]).logits.detach().double()
    expected = sum(
        WEIGHTS[label] * -functional.log_softmax(logits[row], 0)[label] for row, label in enumerate(some["labels"])
    )
    assert float(loss_of(WEIGHTED, model, some).detach()) == pytest.approx(float(expected) / 8, rel=1e-6)


@given(st.lists(st.integers(0, 10**6), min_size=1).filter(any))
def test_the_weights_have_mean_1_over_the_samples_whatever_the_counts(counts):
    weights = inverse_frequency(counts)
    assert np.dot(weights, counts) / sum(counts) == pytest.approx(1.0)
    for weight, count in zip(weights, counts, strict=True):
        assert (weight == 0) == (count == 0)


def test_sums_are_without_dropout_and_without_weights_and_leave_the_model_in_training():
    model = bag(dropout=0.5)
    some = batch(40)
    sums = evaluate_sets(WEIGHTED, model, {"main": [some]}, 0, 1, torch.device("cpu"))
    assert model.training
    calm = copy.deepcopy(model).eval()
    logits = calm(some["input_ids"], some["attention_mask"]).logits.detach()
    expected = float(functional.cross_entropy(logits, some["labels"], reduction="sum"))
    assert sums["loss"] == pytest.approx(expected, rel=1e-6)
    assert sums["weight"] == 40
    predicted = logits.argmax(-1)
    for true in range(CLASSES):
        for said in range(CLASSES):
            assert sums["confusion"][true, said] == int(((some["labels"] == true) & (predicted == said)).sum())
