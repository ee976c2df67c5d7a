"""Every task with texts of its own lengths: batches of similar lengths by default, any length or blocks on request."""

import json
import random

import pytest

from asyncsgd.errors import UsageError
from asyncsgd.tasks.causal_lm import CausalLM
from asyncsgd.tasks.classification import Classification
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.tasks.question_answering import QuestionAnswering
from asyncsgd.tasks.token_classification import TokenClassification

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
    draw, lines = random.Random(name), []
    for index in range(number):
        words = draw.choices(WORDS, k=draw.randint(4, 60))
        text = " ".join(words)
        answers = {"text": [words[0]], "answer_start": [0]}
        lines.append(
            {"text": text, "label": "AB"[index % 2], "tokens": words, "ner_tags": ["B-X", *["O"] * (len(words) - 1)]}
            | {"id": f"{name}{index}", "context": text, "question": "which ant", "answers": answers}
        )
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("kind", EVERY_TASK)
def test_the_samples_of_a_batch_are_of_similar_or_of_any_lengths(kind, tmp_path):
    write(tmp_path, 320, "train")
    write(tmp_path, 20, "dev" if kind is QuestionAnswering else "test")
    values = {"seq_len": 64, "batch_size": 4, **EVERY_TASK[kind]}
    values["data_name"] = str(tmp_path)
    if kind in (MaskedLM, CausalLM):
        values |= {"data_name": str(tmp_path / "train.jsonl"), "eval_data": str(tmp_path / "test.jsonl")}
    padding = []
    for sampling in ("group_by_length", "random"):
        task = kind(**values, sampling=sampling).prepare(0, tmp_path / "cache")
        batches = [task.data(0).batch(0, index) for index in range(16)]
        padding.append(1 - sum(map(task.count_tokens, batches)) / sum(batch["input_ids"].numel() for batch in batches))
    with pytest.raises(UsageError, match="--sampling takes group_by_length or random, got 'lengths'"):
        kind(**values, sampling="lengths").prepare(0, tmp_path / "cache").data(0)
    similar, mixed = padding
    # CausalLM packs texts into rows that are nearly full.
    assert similar != mixed if kind is CausalLM else similar < 0.6 * mixed, padding


@pytest.mark.parametrize("kind", [MaskedLM, CausalLM])
def test_blocks_are_another_task_of_full_rows_the_same_in_every_process(kind, tmp_path):
    write(tmp_path, 320, "train")
    write(tmp_path, 60, "test")
    values = {"seq_len": 64, "batch_size": 4, "eval_samples": 0, **EVERY_TASK[kind]}
    values |= {"data_name": str(tmp_path / "train.jsonl"), "eval_data": str(tmp_path / "test.jsonl")}
    tasks = [kind(**values, blocks=blocks).prepare(0, tmp_path / "cache") for blocks in (False, True)]
    texts, blocks = tasks
    assert texts.facts()["data_fingerprint"] != blocks.facts()["data_fingerprint"]
    again = kind(**values, blocks=True).prepare(0, tmp_path / "another")
    assert again.facts() == blocks.facts()
    for index in range(8):
        one, other = (task.data(0).batch(0, index)["input_ids"] for task in (blocks, again))
        assert one.shape == (4, 64)
        assert one.tolist() == other.tolist()
    assert sorted(blocks.samples("eval").lengths.tolist())[1:] == [64] * (len(blocks.samples("eval")) - 1)
