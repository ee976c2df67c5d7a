"""Tagging on a small made language: the loss, the scores of whole sentences, and that every runtime can train it."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from gallery import shaken, write_tables
from torch.nn import functional
from transformers import AutoTokenizer

from asyncsgd.errors import UsageError
from asyncsgd.tasks import models
from asyncsgd.tasks.token_classification import TokenClassification

SEED = 3
SEQ_LEN = 16
BATCH_SIZE = 4
OTHERS = ["the", "old", "saw", "and"]
NAMES = {"PER": (["maria", "li"], ["bogdanow", "smith"]), "LOC": (["bern", "new"], ["york", "delhi"])}
CPU = torch.device("cpu")


def sentences(number, seed):
    """Names of one or two words with another word behind each, some sentences too long for the model."""
    draw = random.Random(seed)
    rows = []
    for _ in range(number):
        tokens = []
        tags = []
        for _ in range(draw.randint(1, 8)):
            kind = draw.choice(["O", "PER", "LOC"])
            if kind != "O":
                length = draw.randint(1, 2)
                tokens += [draw.choice(words) for words in NAMES[kind][:length]]
                tags += [f"B-{kind}", f"I-{kind}"][:length]
            tokens.append(draw.choice(OTHERS))
            tags.append("O")
        rows.append({"tokens": tokens, "ner_tags": tags})
    return rows


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("tagging")
    write_tables(root / "names", train=sentences(60, 0), test=sentences(50, 1))
    small = {"vocab_size": 64, "seq_len": SEQ_LEN, "batch_size": BATCH_SIZE}

    def prepare(data="names", **values):
        values = {"data_name": str(root / data)} | values
        return TokenClassification(**small | values).prepare(SEED, root / "cache")

    return prepare


@pytest.fixture(scope="module")
def task(prepared):
    return prepared()


def plain_loss(model, batch):
    """The sum over labelled words, sentence by sentence without padding, and how many there are."""
    total = torch.zeros(())
    number = 0
    for ids, mask, tags, pieces in zip(*batch.values(), strict=True):
        logits = model(input_ids=ids[mask == 1][None]).logits[0]
        for tag, piece in zip(tags.tolist(), pieces.tolist(), strict=True):
            if piece >= 0:
                total = total - functional.log_softmax(logits[piece], -1)[tag]
                number += 1
    return total, number


def gradients(model, loss):
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_loss_and_gradient_are_those_of_single_sentences(task):
    model = shaken(task, SEED)
    batch = task.data(SEED).batch(0, 2)
    loss = task.loss(task.outputs(model, batch), batch)
    total, number = plain_loss(model, batch)
    assert task.weight(batch) == number
    assert number > BATCH_SIZE
    torch.testing.assert_close(loss, total / number)
    for ours, theirs in zip(gradients(model, loss), gradients(model, total / number), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_parts_weighted_by_their_words_are_the_whole_even_where_one_has_no_word(task):
    model = shaken(task, SEED)
    batch = task.data(SEED).batch(0, 0)
    batch["pieces"][0] = -1
    parts = task.split(batch, BATCH_SIZE)
    weights = [task.weight(part) for part in parts]
    assert weights[0] == 0
    assert sum(weights) == task.weight(batch)
    whole = task.loss(task.outputs(model, batch), batch)
    joined = 0.0
    for part, weight in zip(parts, weights, strict=True):
        outputs = task.outputs(model, part)
        joined = joined + task.loss(outputs, part) * weight / sum(weights)
    torch.testing.assert_close(joined, whole)
    for ours, theirs in zip(gradients(model, joined), gradients(model, whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_encoder_is_that_of_the_saved_model(task, prepared, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(task.known["tokenizer"])
    masked_lm = models.build_model("tiny", tokenizer, seq_len=SEQ_LEN, dropout=0.0, seed=99).model
    models.save_pretrained(masked_lm, tokenizer.name_or_path, tmp_path / "base")
    started = prepared(model_name=str(tmp_path / "base"), vocab_size=8192)
    assert started.facts()["from_scratch"] is False
    assert started.facts()["parent"] is None
    model = started.model(SEED)
    for name, parameter in masked_lm.base_model.named_parameters():
        assert torch.equal(model.base_model.get_parameter(name), parameter), name
    assert torch.equal(model.classifier.weight, task.model(SEED).classifier.weight)


def tagging(task, batch, said):
    """The scores if the model said so of the words of `batch`."""
    logits = torch.zeros(*batch["tags"].shape, len(task.known["labels"]))
    for row, tags in enumerate(said):
        for word, tag in enumerate(tags):
            logits[row, word, task.known["labels"].index(tag)] = 1.0
    return task.sums(logits, batch)


def majority_accuracy():
    tags = []
    for row in sentences(50, 1):
        tags += row["ner_tags"]
    return tags.count("O") / len(tags)


def test_words_that_are_cut_off_count_as_outside(task):
    # Sentences as the data has them, the second one cut behind its first word.
    names = [["B-PER", "I-PER", "O"], ["O", "B-LOC", "O"]]
    labels = task.known["labels"]
    tags = [[labels.index(tag) for tag in row] for row in names]
    batch = {"tags": torch.tensor(tags), "pieces": torch.tensor([[1, 2, 3], [1, -1, -1]])}
    sums = tagging(task, batch, names)
    assert sums["words"].tolist() == [6, 5]
    assert sums["spans"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert task.metrics(sums) == {"span_f1": 2 / 3, "span_precision": 1.0, "span_recall": 0.5, "accuracy": 5 / 6}
    details = task.details(sums)
    assert details["per_type"]["LOC"] == {"precision": None, "recall": 0.0, "f1": 0.0, "support": 1}
    assert details["majority"] == {"tag": "O", "span_f1": 0.0, "accuracy": majority_accuracy()}
    loss_of_a_word = np.log(len(labels) - 1 + np.e) - 1
    assert float(sums["loss"]) == pytest.approx(4 * loss_of_a_word, rel=1e-6)


def test_the_facts_count_the_words_that_are_cut_off(task):
    facts = task.facts()
    cut = 0
    num_words = 0
    for batch in task.data(SEED).evaluation["main"]:
        is_word = batch["tags"] >= 0
        is_cut = batch["pieces"] < 0
        num_words += int(is_word.sum())
        cut += int((is_word & is_cut).sum())
    note = f"{cut} of {num_words} test words have no word piece within the 16 tokens of a sentence and count as "
    assert cut > 0
    assert any(line == note + "predicted O" for line in facts["notes"])
    assert facts["split"] == "test"
    assert facts["labels"] == ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
    assert facts["num_train_samples"] == 59  # one is in the evaluation too
    assert facts["num_eval_samples"] == 50
    assert facts["model"] == "tiny"
    assert facts["base_model"] is None
    assert facts["from_scratch"] is True
    assert facts["parent"] is None
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize("words", [["\u200b", "\ufeff"], ["\u00ad"], ["\ue000", "\u200d\u200b"]])
def test_words_that_the_tokenizer_removes_count_as_outside_and_nothing_but_such_words_is_refused(words, tmp_path):
    tags = ["O"] * len(words)
    tags[0] = "B-PER"
    removed = {"tokens": words, "ner_tags": tags}
    beside = {"tokens": [*words, "bern"], "ner_tags": [*tags, "B-LOC"]}
    values = {"data_name": str(tmp_path / "d"), "vocab_size": 64, "seq_len": SEQ_LEN}
    task = TokenClassification(**values)
    write_tables(tmp_path / "d", train=sentences(60, 0), test=[removed])
    with pytest.raises(UsageError, match="the tokenizer makes nothing of the test sentences of d"):
        task.prepare(SEED, tmp_path / "cache")
    write_tables(tmp_path / "d", train=sentences(60, 0), test=[removed, beside])
    data = task.prepare(SEED, tmp_path / "cache").data(SEED)
    pieces = data.evaluation["main"][0]["pieces"]
    assert len(pieces) == 2
    assert (pieces[:, : len(words)] < 0).all()
    assert int((pieces >= 0).sum()) == 1
