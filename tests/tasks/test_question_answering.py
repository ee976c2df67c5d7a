"""Question answering on small made texts: the loss, the scores, and that planted answers are found."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from gallery import shaken, write_tables
from torch import Tensor
from torch_alone import train_alone
from transformers import AutoTokenizer

import asyncsgd
from asyncsgd.errors import UsageError
from asyncsgd.tasks.answers import exact_match
from asyncsgd.tasks.question_answering import QuestionAnswering
from asyncsgd.worker.evaluation import evaluate_sets

SEED = 3
SEQ_LEN = 24
STRIDE = 7
BATCH_SIZE = 4
CPU = torch.device("cpu")
WORDS = [first + second for first in "bdfgkl" for second in "aeiou"]
MARKER = "key"
QUESTION = "what comes behind key"

Row = dict[str, Any]


def rows(number, seed, longest=40):
    """Texts of some words; the answer is the word behind the marker, and a text without the marker has none."""
    draw = random.Random(seed)
    made = []
    for index in range(number):
        words = draw.choices(WORDS, k=draw.randint(6, longest))
        answers = {"text": [], "answer_start": []}
        if draw.random() < 0.7:
            marked = draw.randrange(len(words) - 1)
            words[marked] = MARKER
            start = len(" ".join(words[: marked + 1])) + 1
            answers = {"text": [words[marked + 1]], "answer_start": [start]}
        made.append({"id": f"{seed}-{index}", "context": " ".join(words), "question": QUESTION, "answers": answers})
    return made


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("answering")
    write_tables(root / "planted", train=rows(60, 0), dev=rows(37, 1))
    small = {"vocab_size": 128, "seq_len": SEQ_LEN, "stride": STRIDE, "batch_size": BATCH_SIZE}

    def prepare(**values):
        values = {"data_name": str(root / "planted"), **small} | values
        return QuestionAnswering(**values).prepare(SEED, root / "cache")

    return prepare


@pytest.fixture(scope="module")
def task(prepared):
    return prepared()


def tensors(batch):
    return [value for value in batch.values() if isinstance(value, Tensor)]


def plain_loss(model, batch):
    """The sum over windows, one by one and without padding."""
    total = torch.zeros(())
    for ids, mask, types, allowed, targets in zip(*tensors(batch)[:5], strict=True):
        rest = mask == 1
        said = model(input_ids=ids[rest][None], token_type_ids=types[rest][None])
        for logits, target in zip((said.start_logits[0], said.end_logits[0]), targets, strict=True):
            inside = logits[allowed[rest]]
            total = total - (logits[target] - inside.logsumexp(0)) / 2
    return total


def test_loss_and_gradient_are_those_of_single_windows(task):
    model = shaken(task, SEED)
    batch = task.data(SEED).batch(0, 2)
    losses = task.loss(task.outputs(model, batch), batch), plain_loss(model, batch) / BATCH_SIZE
    torch.testing.assert_close(*losses)
    ours, theirs = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_row_is_what_the_tokenizer_makes_of_question_and_window(task):
    tokenizer = AutoTokenizer.from_pretrained(task.known["tokenizer"])
    texts = rows(37, 1)
    windows = task.samples("eval")
    batches = task.data(SEED).evaluation["main"]
    for batch in (batches[index] for index in range(len(batches))):
        for row_, number in enumerate(batch["rows"].tolist()):
            given = texts[windows.row("question", number)]
            offsets = windows.row("offsets", number)
            text = given["context"][offsets[0, 0] : offsets[-1, 1]]
            encoded = tokenizer(given["question"], text)
            length = len(encoded["input_ids"])
            assert batch["input_ids"][row_, :length].tolist() == encoded["input_ids"]
            assert batch["token_type_ids"][row_, :length].tolist() == encoded["token_type_ids"]
            assert int(batch["attention_mask"][row_].sum()) == length
            start, last = (batch["targets"][row_] - int(windows.row("begin", number))).tolist()
            if start >= 0:
                assert [given["context"][offsets[start, 0] : offsets[last, 1]]] == given["answers"]["text"]
            elif given["answers"]["text"]:
                assert MARKER not in text or text.endswith(MARKER)


def test_every_window_is_evaluated_once(task):
    batches = task.data(SEED).evaluation["main"]
    asked = [number for index in range(len(batches)) for number in batches[index]["rows"].tolist()]
    assert sorted(asked) == list(range(len(task.samples("eval"))))
    assert len(batches) > 2


def test_a_question_is_answered_by_its_best_window_and_unanswered_by_its_most_certain(task):
    batches = task.data(SEED).evaluation["main"]
    batch = batches[len(batches) - 1]
    windows = task.samples("eval")
    question = windows.row("question", batch["rows"][-1])
    places = [place for place, row in enumerate(batch["rows"]) if windows.row("question", row) == question]
    assert len(places) > 1
    logits = torch.full((*batch["input_ids"].shape, 2), -9.0).transpose(1, 2)
    for number, place in enumerate(places):
        begin = windows.row("begin", batch["rows"][place])
        logits[place, :, 0] = 1.0 + number
        logits[place, 0, begin + 1] = logits[place, 1, begin + 2] = 2.0 - number
    assert task.sums(logits, batch)["difference"][question] == 2.0 - 4.0


def test_metrics_count_answers_that_are_given_and_details_part_the_questions(task):
    sums = {
        "difference": np.array([-1.0, 1.0, -2.0, 0.0]),  # answered, not, answered, answered
        "exact": np.array([1, 1, 0, 0]),
        "f1": np.array([1.0, 1.0, 0.0, 0.5]),
        "answerable": np.array([1, 1, 0, 1]),
    }
    assert task.metrics(sums) == {"exact_match": 1 / 4, "f1": 1.5 / 4}
    details = task.details(sums)
    assert details["has_answer"] == {"exact_match": 1 / 3, "f1": 0.5, "num_questions": 3}
    assert details["no_answer"] == {"exact_match": 0.0, "f1": 0.0, "num_questions": 1}
    assert details["best_exact_match"] == {"score": 0.5, "threshold": 1.0}
    assert details["best_f1"] == {"score": 2.5 / 4, "threshold": 1.0}
    none = task.details({**sums, "answerable": np.ones(4, dtype=np.int64)})
    assert none["no_answer"] == {"exact_match": None, "f1": None, "num_questions": 0}


def test_planted_answers_are_found_and_the_files_say_so(prepared, tmp_path):
    write_tables(tmp_path / "data", train=rows(2000, 5, longest=12), dev=rows(100, 6, longest=12))
    task = prepared(data_name=str(tmp_path / "data"), dropout=0.0, batch_size=32)
    model = task.model(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_alone(task, model, optimizer, 100, seed=SEED)
    sums = evaluate_sets(task, model, task.data(SEED).evaluation, 0, 1, CPU)
    metrics = task.metrics(sums)
    details = task.details(sums)
    assert metrics["exact_match"] > 0.9
    assert details["has_answer"]["exact_match"] > 0.9
    assert details["no_answer"]["exact_match"] > 0.9
    with torch.no_grad():
        task.write_predictions(model.eval(), tmp_path / "said")
    said, odds, nbest = (
        json.loads((tmp_path / "said" / f"{name}.json").read_text()) for name in ("predictions", "null_odds", "nbest")
    )
    dev = {}
    for each in rows(100, 6, longest=12):
        dev[each["id"]] = each["answers"]["text"]
    assert said.keys() == odds.keys() == nbest.keys() == dev.keys()
    assert np.mean([exact_match(said[key], dev[key]) for key in dev]) == metrics["exact_match"]
    for key in dev:
        assert (odds[key] <= 0) == bool(said[key])
        assert said[key] in ("", nbest[key][0]["text"])


def test_one_run_at_a_time_writes_predictions_into_a_folder_and_the_earlier_ones_are_kept(prepared, tmp_path):
    link = tmp_path / "link"
    messages = []
    link.symlink_to(tmp_path / "said")

    def train(name, into, samples=8, **options):
        task = prepared(predictions=str(into), eval_samples=4)
        asyncsgd.train(task, samples=samples, evaluations=1, folder=tmp_path / name, quiet=True, seed=SEED, **options)

    def begin_another(record):
        with pytest.raises(UsageError) as refused:
            train("second", link)
        messages.append(str(refused.value))

    (tmp_path / "said").mkdir()
    train("first", tmp_path / "said", checkpoint_every=4, report=begin_another)
    assert set(messages) == {f"another run writes into {link}; wait for it, or name another folder with --predictions"}
    first = {path.name: path.read_bytes() for path in (tmp_path / "said").iterdir()}
    assert first.keys() == {"predictions.json", "null_odds.json", "nbest.json"}
    train("first", tmp_path / "said", 16, resume=True)
    kept = {name.replace(".json", ".before-1.json"): content for name, content in first.items()}
    later = {path.name: path.read_bytes() for path in (tmp_path / "said").iterdir()}
    assert kept.items() <= later.items()
    assert later.keys() == kept.keys() | first.keys()
    assert later["null_odds.json"] != first["null_odds.json"]
