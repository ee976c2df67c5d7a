"""Questions: their scores, the windows of their texts, and what is read and refused."""

import gzip
import json
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from gallery import write_tables
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused

from asyncsgd.data import files
from asyncsgd.data.tokenizer import train_wordpiece
from asyncsgd.errors import UsageError
from asyncsgd.tasks.answers import at_threshold, best_spans, best_threshold, exact_match, f1
from asyncsgd.tasks.questions import Question, load_questions
from asyncsgd.tasks.windows import windows_of

Row = dict[str, Any]
WORDS = [first + second for first in "bdfgkl" for second in "aeiou"]
QUESTION = "what comes behind ba"
SEQ_LEN = 24


def row(**changes):
    answers = {"text": ["Bern"], "answer_start": [8]}
    return {"id": "1", "context": "Li left Bern .", "question": "What ?", "answers": answers} | changes


@pytest.mark.parametrize(
    ("text", "answers", "exact", "overlap"),
    [
        ("Denver Broncos", ["Denver Broncos", "The Denver Broncos"], 1, 1.0),
        ("the denver  broncos!", ["Denver Broncos"], 1, 1.0),
        ("Broncos", ["Denver Broncos"], 0, 2 / 3),
        ("the big Denver Broncos team", ["Denver Broncos", "team"], 0, 4 / 6),
        ("Carolina", ["Denver"], 0, 0.0),
        ("go go go", ["go go"], 0, 4 / 5),  # a word counts as often as both have it
        ("U.S.A.", ["usa"], 1, 1.0),
        ("a theatre", ["theatre"], 1, 1.0),  # articles are words, not letters
        ("", [], 1, 1.0),
        ("Denver", [], 0, 0.0),
        ("", ["Denver"], 0, 0.0),
        ("the", ["a", "an"], 1, 1.0),  # nothing is left of either
        ("", ["the", "Denver"], 0, 0.0),  # an answer of which nothing is left is none
    ],
)
def test_scores_are_those_of_the_published_definition(text, answers, exact, overlap):
    assert exact_match(text, answers) == exact
    assert f1(text, answers) == pytest.approx(overlap, abs=1e-15)


scored = st.tuples(st.sampled_from([-2.0, -0.5, 0.0, 1.5, 3.0]), st.sampled_from([0.0, 0.4, 1.0]), st.booleans())


@example([(0.0, 1.0, True), (0.0, 0.0, False)])
@example([(0.0, 0.0, False), (0.0, 1.0, True)])
@given(st.lists(scored, min_size=1, max_size=12))
def test_the_best_threshold_is_that_of_trying_them_all(questions):
    differences, answered, answerable = np.array(questions).T
    abstained = 1.0 - answerable

    def mean_score(threshold):
        return at_threshold(differences, answered, abstained, threshold).mean()

    tried = [mean_score(threshold) for threshold in (-5.0, -2.0, -1.0, -0.5, 0.0, 1.0, 1.5, 3.0, 9.0)]
    score, threshold = best_threshold(differences, answered, abstained)
    assert score == pytest.approx(max(tried))
    assert mean_score(threshold) == score
    # The smallest one: with less, there are fewer answers and a lower score, or there were none before.
    lowest = differences.min()
    assert threshold in differences or threshold == np.nextafter(lowest, -np.inf)
    assert threshold < lowest or mean_score(np.nextafter(threshold, -np.inf)) < score


logit = st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0, 4.0])


@given(st.lists(st.tuples(logit, logit), min_size=1, max_size=9), st.integers(1, 4), st.integers(1, 5), st.data())
def test_the_best_spans_are_those_of_trying_them_all(pieces, longest, number, data):
    # Two windows that overlap, with logits of their own.
    cut = data.draw(st.integers(0, len(pieces)))
    logits = np.array(pieces).T
    windows = [(0, logits), (cut, logits[::-1, cut:])]
    best = {}
    for begin, (start, end) in windows:
        for i in range(len(start)):
            behind = min(i + longest, len(end))
            for j in range(i, behind):
                span = (begin + i, begin + j)
                score = start[i] + end[j]
                best[span] = max(best.get(span, -np.inf), score)
    spans = best_spans(windows, number=number, longest=longest)
    highest = sorted(best.values(), reverse=True)
    assert [score for score, *_ in spans] == highest[:number]
    seen = set()
    for score, first, last in spans:
        assert best[first, last] == score
        assert (first, last) not in seen
        seen.add((first, last))


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece([" ".join(WORDS), f"{QUESTION} . , -", "lona kibo dufe"], 400)


some_words = st.lists(
    st.tuples(st.sampled_from([*WORDS, "lona", "kibodufe", "Éa"]), st.sampled_from([" ", " ", ", ", "\t- "])),
    min_size=1,
    max_size=40,
)


@given(some_words, st.data())
@settings(max_examples=60, deadline=None)
def test_windows_hold_every_piece_and_the_answer_reads_as_it_was_written(tokenizer, words, data):
    texts = [word + separator for word, separator in words]
    context = "".join(texts)
    first = data.draw(st.integers(0, len(words) - 1))
    last = first + data.draw(st.integers(1, 6))
    answer = "".join(texts[first:last]).rstrip(" ,\t-")
    start = len("".join(texts[:first]))
    questions = [Question("1", QUESTION, context, (answer,), start), Question("2", "what", context, (), None)]
    stride = data.draw(st.integers(1, 9))
    windows = windows_of(questions, tokenizer, seq_len=SEQ_LEN, stride=stride)
    assert windows.lengths.max() <= SEQ_LEN
    for number in (0, 1):
        rows = np.flatnonzero(windows.values["question"] == number)
        firsts = windows.values["first"][rows].tolist()
        ends = windows.values["end"][rows].tolist()
        pieces = set()
        for first, end in zip(firsts, ends, strict=True):
            pieces.update(range(first, end))
        assert pieces == set(range(ends[-1]))
        covered = set()
        for row in rows:
            for span in windows.row("offsets", row):
                covered.update(range(*span))
        for index, character in enumerate(context):
            assert index in covered or character.isspace()
        assert firsts == [stride * index for index in range(len(rows))]
    assert (windows.values["targets"][windows.values["question"] == 1] == 0).all()
    for row in np.flatnonzero(windows.values["question"] == 0):
        offsets = windows.row("offsets", row)
        begin = windows.row("begin", row)
        starts, ends = offsets.T
        is_held = start in starts and start + len(answer) in ends
        first, last = windows.row("targets", row)
        assert (first > 0) == is_held
        if is_held:
            assert context[starts[first - begin] : ends[last - begin]] == answer


def as_squad(question):
    """A file of SQuAD 2.0 with one question."""
    texts, starts = question["answers"].values()
    answers = []
    for text, start in zip(texts, starts, strict=True):
        answers.append({"text": text, "answer_start": start})
    asked = {"id": question["id"], "question": question["question"], "answers": answers}
    paragraph = {"context": question["context"], "qas": [asked]}
    article = {"title": "T", "paragraphs": [paragraph]}
    return json.dumps({"version": "v2.0", "data": [article]})


def test_every_kind_of_file_gives_the_same_questions(tmp_path):
    dev = row(id="2", context="It is here .", answers={"text": [], "answer_start": []})
    for side, question in {"train": row(), "dev": dev}.items():
        nested = as_squad(question)
        write_tables(tmp_path, **{side: [question]})
        (tmp_path / f"{side}.json").write_text(nested)
        (tmp_path / f"{side}.json.gz").write_bytes(gzip.compress(nested.encode()))
        pd.DataFrame([question]).to_parquet(tmp_path / f"{side}.parquet")
    sides = {
        "train": [Question("1", "What ?", "Li left Bern .", ("Bern",), 8)],
        "eval": [Question("2", "What ?", "It is here .", (), None)],
    }
    for kind in (".jsonl", ".json", ".json.gz", ".parquet"):
        data = load_questions(str(tmp_path / f"train{kind}"), eval_data=str(tmp_path / f"dev{kind}"))
        assert data.name == f"train{kind}"
        assert data.questions == sides
        assert data.notes == ()
    folder = load_questions(str(tmp_path))
    assert folder.questions == sides
    assert folder.fingerprint == data.fingerprint
    assert "3 training questions whose id was there before are left out" in folder.notes
    train = tmp_path / "train.json"
    dev = tmp_path / "dev.json"
    joined = load_questions(f"{train}+{dev}", eval_data=str(dev))
    assert joined.name == "train.json+dev.json"
    assert joined.questions["train"] == sides["train"]
    assert joined.notes == ("1 training questions about contexts of the evaluation are left out",)


def test_a_hub_data_set_without_training_questions_is_scored_on(tmp_path, monkeypatch):
    write_tables(tmp_path, train=[row()])
    scored = datasets.Dataset.from_list([row(context="It is in Bern .")])
    splits = datasets.DatasetDict(validation=scored)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: splits)
    monkeypatch.setattr(files, "hub_is_reachable", lambda: False)
    data = load_questions(f"{tmp_path}/train.jsonl", eval_data="hub:some/questions")
    (question,) = data.questions["eval"]
    assert question.context == "It is in Bern ."
    with refused("hub:some/questions 'train' validation"):
        load_questions("hub:some/questions")


def test_an_answer_is_taken_where_it_stands_and_left_out_where_it_does_not(tmp_path):
    of_another_place = {"text": ["Bern"], "answer_start": [12]}
    thrice = row(id="2", context="Bern is big . Bern is old . Bern", answers=of_another_place)
    nowhere = row(id="3", answers={"text": ["Basel"], "answer_start": [8]})
    write_tables(tmp_path, train=[row(), thrice, nowhere], dev=[row(id="4", context="x")])
    data = load_questions(str(tmp_path))
    assert [question.start for question in data.questions["train"]] == [8, 14]
    assert data.notes[1:] == (
        "1 training answers do not stand at their answer_start; the nearest place is taken",
        "1 training questions whose answer stands nowhere in the context are left out",
    )
    limited = load_questions(str(tmp_path), limits=(1, 0))
    assert [question.id for question in limited.questions["train"]] == ["1"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("train.jsonl", json.dumps(row(question=" ")), "line 1 question empty"),
        ("train.jsonl", json.dumps(row(answers="Bern")), "line 1 answers"),
        ("train.jsonl", json.dumps(row(answers={"text": ["Basel"], "answer_start": [8]})), "no question to learn from"),
        ("train.jsonl", json.dumps({"id": "1", "text": "x"}), "line 1 'context' columns id, text"),
        ("train.json", '{"data": [{}]}', "SQuAD 'paragraphs'"),
        ("train.txt", "x", "train* .jsonl"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, name, content, words):
    write_tables(tmp_path, dev=[row(id="2", context="x")])
    (tmp_path / name).write_text(content + "\n")
    with refused(words):
        load_questions(str(tmp_path))


def test_advice_is_on_the_set_without_questions_and_on_no_column_which_no_flag_chooses(tmp_path):
    write_tables(tmp_path, train=[row()])
    train = f"{tmp_path}/train.jsonl"
    scored = tmp_path / "scored.jsonl"
    scored.write_text("")
    with pytest.raises(UsageError, match=r"^scored.jsonl has no questions to score on"):
        load_questions(train, eval_data=str(scored))
    scored.write_text('{"id": "1", "text": "x"}')
    with pytest.raises(UsageError, match=r"its columns are id, text; did you mean 'text'\?$"):
        load_questions(train, eval_data=str(scored))
