"""One label, several or a number: losses as transformers computes them, scores as scikit-learn and scipy do."""

import dataclasses
import json
import random
import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers
from encoders import MODELS, WORDS, save_model
from gallery import write_tables
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics

from asyncsgd.data.tokens import Samples, encodings_of
from asyncsgd.errors import UsageError
from asyncsgd.tasks import scores
from asyncsgd.tasks.base import add_sums, decode_sums, encode_sums
from asyncsgd.tasks.classification import Classification
from asyncsgd.tasks.heads import HEADS, Labels
from asyncsgd.tasks.labelled_rows import LabelledRows
from asyncsgd.tasks.labelled_task import LabelledTask
from asyncsgd.worker.evaluation import evaluate_sets, measured

NAMES = ("ant", "bee", "cat")


def write(folder, number, side):
    draw = random.Random(side)
    rows = []
    for index in range(number):
        first = draw.choices(WORDS, k=draw.randint(1, 30))
        second = draw.choices(WORDS, k=draw.randint(1, 30))
        row = {"first": " ".join(first), "second": "", "label": first[0]}
        if index % 9:
            row["second"] = " ".join(second)
        row["number"] = first.count("ant") - second.count("ant") / 2
        row["several"] = sorted({*first} & {*NAMES})
        rows.append(row)
    write_tables(folder, **{side: rows})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    write(folder, 60, "train")
    write(folder, 37, "test")
    return folder


KINDS = {
    "single": {"label_column": "label", "positive": "ant"},
    "multi": {"label_column": "several"},
    "number": {"label_column": "number"},
}


def prepared(folder, labels, **changed):
    values = {"data_name": str(folder), "text_column": "first", "text_pair_column": "second", "seq_len": 32}
    return Classification(**values | {"labels": labels, "batch_size": 8, "dropout": 0.0} | KINDS[labels] | changed)


@pytest.mark.parametrize("family", MODELS)
def test_pairs_logits_losses_and_gradients_are_those_of_transformers(family, folder, tmp_path):
    tokenizer = save_model(family, tmp_path / "encoder")
    rows = []
    for line in (folder / "train.jsonl").read_text().splitlines():
        rows.append(json.loads(line))
    for labels, head in HEADS.items():
        task = prepared(folder, labels, model_name=str(tmp_path / "encoder")).prepare(0, tmp_path / labels)
        model = task.model(0)
        task.save(model, tmp_path / labels / "saved")
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / labels / "saved")
        assert theirs.config.problem_type == head.problem_type

        numbers = np.arange(len(rows))
        batch = task.collate(task.samples("train"), numbers, None)
        encoded = tokenizer(
            [row["first"] for row in rows],
            [row["second"] for row in rows],
            truncation=True,
            max_length=32,
            padding=True,
            return_tensors="pt",
        )
        assert torch.equal(batch["input_ids"], encoded["input_ids"])
        asked = theirs(**encoded, labels=batch["labels"])
        outputs = task.outputs(model.eval(), batch)
        torch.testing.assert_close(outputs, asked.logits, rtol=1e-6, atol=1e-7)
        loss = task.loss(outputs, batch)
        torch.testing.assert_close(loss, asked.loss, rtol=1e-6, atol=0)
        loss.backward()
        asked.loss.backward()
        for (name, own), (other_name, other) in zip(model.named_parameters(), theirs.named_parameters(), strict=True):
            assert name == other_name
            if other.grad is not None:
                torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7)
        # What halves of the batch say, weighted by their loss terms, is what the whole says.
        halves = task.split(dict(batch), 2)
        total = 0.0
        for half in halves:
            outputs = task.outputs(model, half)
            total += task.loss(outputs, half) * task.weight(half)
        torch.testing.assert_close(total / task.weight(batch), loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("labels", KINDS)
def test_scores_of_the_whole_set_are_scikit_learn_s_and_the_same_for_1_2_and_3_shards(labels, folder, tmp_path):
    task = prepared(folder, labels).prepare(0, tmp_path)
    model = task.model(0)
    data = task.data(0)
    task_batches = data.evaluation["main"]
    found = []
    for number in (1, 2, 3):
        shards = []
        for shard in range(number):
            shards.append(evaluate_sets(task, model, data.evaluation, shard, number, torch.device("cpu")))
        sums = decode_sums(encode_sums(add_sums(shards)))
        found.append(measured(task, sums))
    assert found[0].metrics == found[2].metrics
    assert found[1].metrics == found[2].metrics
    assert found[0].details == found[2].details
    assert found[1].details == found[2].details

    with torch.no_grad():
        batches = [task_batches[index] for index in range(len(task_batches))]
        logits = torch.cat([task.outputs(model.eval(), batch) for batch in batches]).numpy()
    true = torch.cat([batch["labels"] for batch in batches]).numpy()
    if labels == "single":
        said = logits.argmax(1)
        expected = {
            "macro_f1": metrics.f1_score(true, said, average="macro"),
            "accuracy": metrics.accuracy_score(true, said),
            "f1": metrics.f1_score(true == 0, said == 0),
        }
        matthews = scores.matthews(metrics.confusion_matrix(true, said))
        assert matthews == pytest.approx(metrics.matthews_corrcoef(true, said))
    elif labels == "multi":
        said = logits > 0
        expected = {
            "micro_f1": metrics.f1_score(true, said, average="micro", zero_division=0),
            "macro_f1": metrics.f1_score(true, said, average="macro", zero_division=0),
            "exact_match": metrics.accuracy_score(true, said),
        }
    else:
        expected = {
            "pearson": np.corrcoef(logits[:, 0], true)[0, 1],
            "spearman": stats.spearmanr(logits[:, 0], true).statistic,
            "mse": metrics.mean_squared_error(true, logits[:, 0]),
        }
    assert found[0].metrics == pytest.approx(expected, rel=1e-6)
    unit = {"single": "nats", "multi": "nats", "number": "squared error"}
    assert task.loss_unit() == unit[labels]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_matthews_and_f1_are_scikit_learn_s_whatever_is_true_and_predicted(cells):
    true, said = zip(*cells, strict=True)
    confusion = metrics.confusion_matrix(true, said, labels=range(4))
    assert scores.matthews(confusion) == pytest.approx(metrics.matthews_corrcoef(true, said), abs=1e-12)
    for number, own in enumerate(scores.per_class_f1(confusion)):
        is_true = np.array(true) == number
        is_said = np.array(said) == number
        assert (own or 0.0) == pytest.approx(metrics.f1_score(is_true, is_said, zero_division=0))


def numbers(predicted, true):
    return HEADS["number"].metrics({"predicted": np.array(predicted), "true": np.array(true)}, None)


def test_what_labels_or_a_collapsed_model_leave_undefined_is_none_or_0_and_never_nan():
    assert numbers([1.0, 2.0], [3.0, 3.0]) == {"pearson": None, "spearman": None, "mse": 2.5}
    assert numbers([2.0, 2.0], [1.0, 3.0]) == {"pearson": None, "spearman": None, "mse": 1.0}
    assert numbers([np.nan, 2.0], [1.0, 3.0]) == {"pearson": None, "spearman": None, "mse": np.inf}
    one_class = HEADS["single"].metrics({"confusion": np.array([[3, 2], [0, 0]])}, 1)
    collapsed = HEADS["single"].metrics({"confusion": np.array([[3, 0], [2, 0]])}, 1)
    assert one_class["matthews"] is None
    assert one_class["f1"] is None
    assert collapsed["matthews"] == 0.0
    one_of_each = HEADS["single"].metrics({"confusion": np.eye(2, dtype=int)}, None)
    assert one_of_each["matthews"] == 1.0
    assert collapsed["f1"] == 0.0
    for true, expected in ((0, None), (4, 0.0)):
        sums = {"counts": np.array([[0, 0, true], [0, 0, 0]]), "exact": 1, "texts": 5}
        assert HEADS["multi"].metrics(sums, None)["micro_f1"] == expected


def test_a_score_that_the_labels_leave_undefined_is_told_at_the_start_and_refused_as_the_first(folder, tmp_path):
    constant = tmp_path / "constant"
    shutil.copytree(folder, constant)
    rows = []
    for line in (folder / "test.jsonl").read_text().splitlines():
        rows.append(json.loads(line) | {"number": 2.5})
    write_tables(constant, test=rows)
    task = prepared(constant, "number").prepare(0, tmp_path)
    facts = task.facts()
    assert "pearson is not defined: all texts to score on have one number" in facts["notes"]
    assert facts["undefined_scores"].keys() == {"pearson", "spearman"}
    sums = evaluate_sets(task, task.model(0), task.data(0).evaluation, 0, 1, torch.device("cpu"))
    found = measured(task, sums).metrics
    assert found["pearson"] is None
    assert found["spearman"] is None
    assert found["mse"] > 0
    with pytest.raises(UsageError, match=r"--score spearman is not defined: .* choose of mse"):
        prepared(constant, "number", score="spearman").prepare(0, tmp_path)


@dataclasses.dataclass(frozen=True)
class Rated(LabelledTask):
    """A task of one's own on texts with numbers."""

    name: ClassVar[str] = "rated"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    column_fields: ClassVar[tuple[str, ...]] = ("text_column", "label_column")
    labels: Labels = "number"
    text_column: str = "first"
    label_column: str = "number"
    seq_len: int = 16

    def row_kind(self):
        return LabelledRows(False, "number").kind()

    def look(self, corpus, tokenizer, initial):
        return {"labels": ("rating",)}

    def encode(self, corpus, side, tokenizer):
        documents = corpus.train if side == "train" else corpus.eval
        ids = []
        for one in encodings_of(documents.texts, tokenizer, self.seq_len):
            ids.append(np.array(one.ids, np.int32))
        return Samples.of(ids=ids, labels=np.array([float(label) for label in documents.labels], np.float32))

    def collate(self, samples, numbers, draw):
        return self.padded(samples, numbers) | {"labels": torch.from_numpy(samples.values["labels"][numbers])}

    def outputs(self, model, batch):
        return model(**self.model_inputs(model, batch)).logits


def test_a_task_of_one_s_own_gets_loss_scores_and_configuration_by_a_field(folder, tmp_path):
    task = Rated(data_name=str(folder)).prepare(0, tmp_path)
    assert dict(task.scored_by()) == {"pearson": "higher", "spearman": "higher", "mse": "lower"}
    model = task.model(0)
    assert model.config.problem_type == "regression"
    assert model.config.num_labels == 1
    sums = evaluate_sets(task, model, task.data(0).evaluation, 0, 1, torch.device("cpu"))
    found = measured(task, sums)
    assert found.metrics["mse"] == pytest.approx(found.loss, rel=1e-6)
