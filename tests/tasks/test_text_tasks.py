"""Every task on texts: batches that are functions of (seed, stream, index), one evaluation, a model that is saved."""

import dataclasses
import json
import pickle
import random

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gallery import write_tables
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncsgd
from asyncsgd.errors import UsageError
from asyncsgd.tasks.base import add_sums, decode_sums, encode_sums
from asyncsgd.tasks.causal_lm import CausalLM
from asyncsgd.tasks.classification import Classification
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.tasks.question_answering import QuestionAnswering
from asyncsgd.tasks.token_classification import TokenClassification
from asyncsgd.worker.evaluation import evaluate_sets, measured

WORDS = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay"]
EVERY_TASK = {
    MaskedLM: {"vocab_size": 128},
    CausalLM: {"vocab_size": 300},
    Classification: {},
    TokenClassification: {"vocab_size": 64},
    QuestionAnswering: {"vocab_size": 128, "stride": 8},
}


def write(folder, number, name):
    """Texts of 4 to 60 words, in the forms that the tasks read."""
    draw = random.Random(name)
    rows = []
    for index in range(number):
        words = draw.choices(WORDS, k=draw.randint(4, 60))
        text = " ".join(words)
        tags = ["O"] * len(words)
        tags[0] = "B-X"
        answers = {"text": [words[0]], "answer_start": [0]}
        row = {"text": text, "label": "AB"[index % 2], "tokens": words, "ner_tags": tags}
        row |= {"id": f"{name}{index}", "context": text, "question": "which ant", "answers": answers}
        rows.append(row)
    write_tables(folder, **{name: rows})


def rows_of(folder, name):
    """The rows of a file that `write` has written."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def prepared(kind, folder, cache="cache", **changed):
    values = {"seq_len": 64, "batch_size": 4, "data_name": str(folder), **EVERY_TASK[kind]}
    if kind in (MaskedLM, CausalLM):
        values |= {"data_name": str(folder / "train.jsonl"), "eval_data": str(folder / "test.jsonl")}
    return kind(**values | changed).prepare(0, folder / cache)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write(folder, 320, "train")
    write(folder, 90, "test")
    write(folder, 60, "dev")
    return folder


@pytest.fixture(scope="module", params=EVERY_TASK, ids=lambda kind: kind.__name__)
def task(request, folder):
    return prepared(request.param, folder)


def shared_sums(task, model, sets, number):
    """The sums of an evaluation that is shared out to so many processes, as they are sent."""
    device = torch.device("cpu")
    sums = []
    for shard in range(number):
        own = evaluate_sets(task, model, sets, shard, number, device)
        sums.append(decode_sums(encode_sums(own)))
    return add_sums(sums)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@given(stream=st.integers(0, 3), index=st.integers(0, 200), before=st.integers(0, 200), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=10)
def test_a_batch_is_the_same_whoever_makes_it_and_whatever_was_made_before(task, stream, index, before, seed):
    busy = task.data(seed)
    for other in (before, index + 1):
        busy.batch(stream, other)
        busy.batch(stream + 1, other)
    batch = pickle.loads(pickle.dumps(task)).data(seed).batch(stream, index)
    assert same(busy.batch(stream, index), batch)
    assert len(batch["input_ids"]) == task.batch_size
    assert task.weight(batch) > 0
    of_another_stream = task.data(seed).batch(stream + 1, index)
    of_another_seed = task.data(seed + 1).batch(stream, index)
    assert not same(batch, of_another_stream)
    assert not same(batch, of_another_seed)


def test_the_evaluation_is_the_same_for_every_seed_and_its_sums_for_any_number_of_shards(task):
    model = task.model(0)
    batches = task.data(0).evaluation["main"]
    others = task.data(1).evaluation["main"]
    assert len(batches) == len(others)
    assert len(others) > 1
    for index in range(len(batches)):
        assert same(batches[index], others[index])
    with pytest.raises(IndexError):
        batches[len(batches)]
    whole = shared_sums(task, model, {"main": batches}, 1)
    for number in (2, 3):
        sums = shared_sums(task, model, {"main": batches}, number)
        assert sums["loss"] == pytest.approx(whole["loss"], rel=1e-12)
        for name in whole:
            if name != "loss":
                assert np.array_equal(sums[name], whole[name])
        assert list(task.metrics(sums)) == list(task.scored_by())


def test_prepared_again_it_is_the_same_from_the_cache_and_its_folder_is_loaded_by_transformers(task, folder, tmp_path):
    made = {}
    for path in (folder / "cache").rglob("*"):
        made[path] = path.stat().st_mtime_ns
    assert task.prepare(0, folder / "cache") == task
    assert {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*")} == made
    assert asyncsgd.check(task).notes == ()
    model = task.model(3)
    assert model.training
    task.save(model, tmp_path / "model")
    loaded = getattr(transformers, task.auto_class).from_pretrained(tmp_path / "model")
    for one, two in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("the ant").input_ids
    unprepared = dataclasses.replace(task, prepared=None)
    assert unprepared.facts() == {}
    with pytest.raises(ValueError, match=r"call prepare\(seed, cache\)"):
        unprepared.model(0)


def test_the_samples_of_a_batch_are_of_similar_or_of_any_lengths(task):
    padding = []
    for sampling in ("group_by_length", "random"):
        data = dataclasses.replace(task, sampling=sampling).data(0)
        num_tokens = 0
        num_places = 0
        for index in range(16):
            batch = data.batch(0, index)
            num_tokens += task.count_tokens(batch)
            num_places += batch["input_ids"].numel()
        padding.append(1 - num_tokens / num_places)
    with pytest.raises(UsageError, match="--sampling takes group_by_length or random, got 'lengths'"):
        dataclasses.replace(task, sampling="lengths").data(0)
    similar, mixed = padding
    if isinstance(task, CausalLM):  # it packs texts into rows that are nearly full
        assert similar != mixed
    else:
        assert similar < 0.6 * mixed


@pytest.mark.parametrize("kind", [MaskedLM, CausalLM])
def test_blocks_are_another_task_of_full_rows_the_same_in_every_process(kind, folder):
    texts = prepared(kind, folder, "cache", eval_samples=0, blocks=False)
    blocks = prepared(kind, folder, "cache", eval_samples=0, blocks=True)
    again = prepared(kind, folder, "another", eval_samples=0, blocks=True)
    assert texts.facts()["data_fingerprint"] != blocks.facts()["data_fingerprint"]
    assert again.facts() == blocks.facts()
    for index in range(8):
        one = blocks.data(0).batch(0, index)["input_ids"]
        other = again.data(0).batch(0, index)["input_ids"]
        assert one.shape == (4, 64)
        assert one.tolist() == other.tolist()
    lengths = sorted(blocks.samples("eval").lengths.tolist())
    assert set(lengths[1:]) == {64}


def without_pad_token(folder):
    """A masked language model whose tokenizer has a mask token and no pad token."""
    words = {}
    for number, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]):
        words[word] = number
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rust.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    special = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=rust, **special).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=14, max_position_embeddings=64, pad_token_id=None, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(folder)


def test_a_tokenizer_without_a_pad_token_gives_the_logits_of_single_rows(folder, tmp_path):
    without_pad_token(tmp_path / "model")
    task = MaskedLM(
        model_name=str(tmp_path / "model"),
        data_name=str(folder / "train.jsonl"),
        eval_data=str(folder / "test.jsonl"),
        seq_len=64,
        sampling="random",
        batch_size=4,
    ).prepare(0, tmp_path / "cache")
    batch = task.data(0).batch(0, 0)
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "model").eval()
    whole = task.outputs(task.model(0).eval(), batch)
    alone = []
    lengths = batch["attention_mask"].sum(1).tolist()
    for ids, labels, length in zip(batch["input_ids"], batch["labels"], lengths, strict=True):
        logits = model(input_ids=ids[None, :length]).logits[0]
        is_masked = labels[:length] != -100
        alone.append(logits[is_masked])
    assert len(set(lengths)) > 1
    torch.testing.assert_close(whole, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_an_evaluation_set_may_have_any_name(task):
    names = ["domain:news", "a/b", "set:loss", "", '"', "ü"]
    first = [task.data(0).evaluation["main"][0]]
    sets = dict.fromkeys(["main", *names], first)
    said = measured(task, shared_sums(task, task.model(0), sets, 1))
    assert list(said.details["evaluations"]) == sorted(names)
    for other in said.details["evaluations"].values():
        assert other["loss"] == said.loss
        assert other["weight"] == said.weight
        assert other["metrics"] == said.metrics


@pytest.mark.parametrize("kind", EVERY_TASK, ids=lambda kind: kind.__name__)
def test_every_set_has_the_scores_that_it_has_alone_for_any_number_of_shards_and_none_is_trained_on(kind, folder):
    places = {name: str(folder / f"{name}.jsonl") for name in ("test", "dev")}
    task = prepared(kind, folder, data_name=str(folder / "train.jsonl"), eval_data=tuple(places.values()))
    sets = task.data(0).evaluation
    model = task.model(0)
    assert list(sets) == ["main", "dev"]
    assert [one["name"] for one in task.facts()["evaluation_sets"]] == ["test", "dev"]
    whole = measured(task, shared_sums(task, model, sets, 1))
    for number in (2, 3):
        said = measured(task, shared_sums(task, model, sets, number))
        assert said.metrics == whole.metrics or kind in (MaskedLM, CausalLM)  # a perplexity is a function of the loss
        for name, one in said.details["evaluations"].items():
            other = whole.details["evaluations"][name]
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)
            assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-12)
    for name, said in (("test", vars(whole)), ("dev", whole.details["evaluations"]["dev"])):
        alone = prepared(kind, folder, data_name=str(folder / "train.jsonl"), eval_data=f"{name}={places[name]}")
        expected = measured(alone, shared_sums(alone, model, alone.data(0).evaluation, 1))
        assert said["loss"] == expected.loss
        assert said["metrics"] == expected.metrics


def test_a_text_of_any_set_is_not_trained_on_whatever_names_the_set(folder, tmp_path):
    rows = rows_of(folder, "train")
    unlabelled = [{"text": row["text"]} for row in rows[20:30]]
    write_tables(tmp_path, one=rows[:10], two=rows[10:20], three=unlabelled)
    sets = tuple(f"{name} of 3={tmp_path / name}.jsonl" for name in ("one", "two", "three"))
    task = prepared(Classification, folder, data_name=str(folder / "train.jsonl"), eval_data=sets)
    facts = task.facts()
    assert facts["num_train_samples"] == 290
    scored = {one["name"]: one["scored"] for one in facts["evaluation_sets"]}
    assert list(scored.items()) == [("one of 3", True), ("two of 3", True), ("three of 3", False)]
    assert list(task.data(0).evaluation) == ["main", "two of 3"]
    assert sum("texts too are left out" in note for note in facts["notes"]) == 3


def _labels_of(row, names):
    return json.dumps([name for name, logit in zip(names, row, strict=True) if logit > 0])


SAID = {
    "single": ("label", lambda row, names: names[row.argmax()]),
    "number": ("number", lambda row, names: str(row[0].numpy())),
    "multi": ("labels", _labels_of),
}


@pytest.mark.parametrize("labels", SAID)
def test_predictions_of_a_set_without_labels_are_those_of_the_saved_model_row_by_row(labels, folder, tmp_path):
    column, words = SAID[labels]
    rows = rows_of(folder, "train")
    for number, row in enumerate(rows):
        row["number"] = number / 7
        row["labels"] = ["A", "B", "C"][: number % 4]
    asked = [row["text"] for row in rows[240:300]]
    asked[7] = " "  # of no text nothing is said
    write_tables(tmp_path, train=rows[:200], dev=rows[200:240], test=[{"text": text} for text in asked])
    said_folder = str(tmp_path / "said")
    given = {"labels": labels, "label_column": column, "eval_split": "validation,test", "batch_size": 8}
    task = prepared(Classification, tmp_path, **given, predictions=said_folder)
    model = task.model(0).eval()
    with torch.no_grad():
        assert task.final(model) == {"hatecheck": None, "predictions": said_folder}
    task.save(model, tmp_path / "model")
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    lines = (tmp_path / "said" / "test.tsv").read_text().splitlines()
    assert lines.pop(0) == "index\tprediction"
    assert [int(line.split("\t")[0]) for line in lines] == [number for number in range(60) if number != 7]
    names = task.known["labels"]
    for line in lines:
        index, said = line.split("\t")
        with torch.no_grad():
            inputs = tokenizer(asked[int(index)], truncation=True, max_length=64, return_tensors="pt")
            logits = plain(**inputs).logits[0]
        expected = words(logits, names)
        if labels == "number":
            assert float(said) == pytest.approx(float(expected), rel=1e-4)
        else:
            assert said == expected
    validation = (tmp_path / "said" / "validation.tsv").read_text().splitlines()
    assert len(validation) == 41


def test_predictions_have_the_indices_of_the_file_as_it_is_now(folder, tmp_path):
    rows = rows_of(folder, "train")
    empty = {"text": " ", "label": "A"}
    for num_empty in (0, 2, 0):
        write_tables(tmp_path, train=rows[:40], test=[*[empty] * num_empty, *rows[40:42]])
        task = prepared(Classification, tmp_path, predictions=str(tmp_path / "said"))
        task.final(task.model(0).eval())
        lines = (tmp_path / "said" / "test.tsv").read_text().splitlines()
        assert [line.split("\t")[0] for line in lines] == ["index", f"{num_empty}", f"{num_empty + 1}"]


def test_tags_are_predicted_of_sentences_without_tags(folder, tmp_path):
    (tmp_path / "test.jsonl").write_text('{"tokens": ["ant", "bee", "\\u200b"]}\n{"tokens": ["cat"]}\n')
    sets = (f"dev={folder / 'dev.jsonl'}", str(tmp_path / "test.jsonl"))
    task = prepared(TokenClassification, folder, data_name=str(folder / "train.jsonl"), eval_data=sets, predictions="x")
    with torch.no_grad():
        predicted = task.predicted(task.model(0).eval(), 1)
    first, second = [tags.split(" ") for tags in predicted]
    assert len(first) == 3
    assert first[2] == "O"
    assert len(second) == 1
    assert {*first, *second} <= {"B-X", "O"}
