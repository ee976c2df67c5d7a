"""Finders: what they find in a text, and what they refuse."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    XLNetConfig,
    XLNetForTokenClassification,
)

from asyncsgd.data.tokenizer import train_wordpiece
from asyncsgd.domain_masking.finders import FINDERS, Lexicon, log_likelihood_ratio
from asyncsgd.domain_masking.tagger import LONGEST_WINDOW, load, windows
from asyncsgd.errors import UsageError

WORDS = ["the", "film", "of", "zirconia", "grows", "on", "nickel", "oxide", "at", "once"]
TEXTS = [f"{a} {b} {c}, {d}!" for a, b, c, d in zip(WORDS, WORDS[1:], WORDS[2:], WORDS[3:], strict=False)] * 3


def found(finder, texts, tmp_path, corpus=()):
    spans = FINDERS.read(finder).prepare(corpus, tmp_path).spans(texts, "cpu")
    return [[text[start:end] for start, end in of] for text, of in zip(texts, spans, strict=True)]


def test_the_longest_term_is_found_at_the_borders_of_words_and_case_matters_where_the_term_has_it(tmp_path):
    (tmp_path / "terms.txt").write_text("fuel cell\n\nsolid oxide fuel cell\nCo\nH₂O\noxide\n  Fe2O3  \n")
    texts = [
        "Solid  oxide\nfuel cell; Fuel Cells; a FUEL CELL.",
        "Co, CO and co in H₂O; H2O",
        "dioxide, oxide-based, Fe2O3-oxide",
        "",
        "solid oxide fuel",
    ]
    assert found(f"terms:{tmp_path}/terms.txt", texts, tmp_path) == [
        ["Solid  oxide\nfuel cell", "FUEL CELL"],
        ["Co", "H₂O"],
        ["oxide", "Fe2O3", "oxide"],
        [],
        ["oxide"],
    ]


@given(text=st.text("ab C-,", max_size=40), terms=st.sets(st.text("ab C-", min_size=1, max_size=6), min_size=1))
@settings(deadline=None)
def test_spans_are_in_order_without_overlap_and_inside_the_text(text, terms):
    (spans,) = Lexicon(tuple(sorted(terms))).spans([text], "cpu")
    places = [place for span in spans for place in span]
    assert places == sorted(places)
    for start, end in spans:
        assert 0 <= start < end <= len(text)
    wanted = {"".join(term.lower().split()) for term in terms}
    for start, end in spans:
        assert "".join(text[start:end].lower().split()) in wanted


def test_g2_is_that_of_the_contingency_table():
    from scipy.stats import chi2_contingency

    table = [[30, 4], [1000 - 30, 3000 - 4]]
    whole = chi2_contingency(table, correction=False, lambda_="log-likelihood").statistic
    # Dunning's own has the other two cells too, Rayson's form only those of the word.
    others = 2 * (970 * np.log(970 / (1000 * 3966 / 4000)) + 2996 * np.log(2996 / (3000 * 3966 / 4000)))
    assert log_likelihood_ratio(30, 4, 1000, 3000) == pytest.approx(whole - others)


def test_key_words_are_common_here_rare_there_and_seen_often_enough(tmp_path):
    (tmp_path / "reference").mkdir()
    lines = [f"{number} the house was on the hill" for number in range(50)]
    (tmp_path / "reference" / "text.txt").write_text("\n".join([*lines, "zirconia", "the end of it"]))
    corpus = ["The zirconia film was on the nickel"] * 20 + ["a rare word", "x2 12 the"]
    finder = f"keyness:{tmp_path}/reference"
    assert found(finder, ["A Zirconia film on the rare nickel was"], tmp_path, corpus) == [
        ["Zirconia", "film", "nickel"]
    ]
    assert found(f"{finder},ratio=30", ["zirconia film"], tmp_path, corpus) == [["zirconia", "film"]]
    assert found(f"{finder},ratio=60", ["zirconia film"], tmp_path, corpus) == [["film"]]
    text = ["a rare film"]
    assert found(f"{finder},threshold=1,min_count=1", text, tmp_path, corpus) == [["rare", "film"]]
    assert found(f"{finder},threshold=1,min_count=2", text, tmp_path, corpus) == [["film"]]
    with pytest.raises(UsageError, match="no word of the training text is key"):
        found(f"{finder},threshold=1000", [], tmp_path, corpus)


def saved_tagger(folder, labels):
    """A model that says of a piece what its id says: id modulo the number of labels."""
    tokenizer = train_wordpiece(TEXTS * 5, 128)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        num_hidden_layers=0,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=64,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )
    model = BertForTokenClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.bert.embeddings.LayerNorm.weight.fill_(1)
        for number in range(len(tokenizer)):
            model.bert.embeddings.word_embeddings.weight[number, number % len(labels)] = 1
        model.classifier.weight[:, : len(labels)] = torch.eye(len(labels))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_with_relative_positions_has_the_longest_windows(tmp_path):
    tokenizer = train_wordpiece(TEXTS * 5, 128)
    labels = {0: "O", 1: "B-MAT"}
    config = XLNetConfig(vocab_size=len(tokenizer), d_model=8, n_layer=1, n_head=1, d_inner=8, id2label=labels)
    assert config.max_position_embeddings == -1
    XLNetForTokenClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load(str(tmp_path), "cpu").size == LONGEST_WINDOW - 2  # [CLS] and [SEP]


def expected(folder, text, labels):
    """Word by word, without windows and batches."""
    backend = load(str(folder), "cpu").backend
    spans = []
    before = ""
    for word in re.findall(r"\w+|[,!]", text):
        label = labels[backend.encode(word, add_special_tokens=False).ids[0] % len(labels)]
        prefix, _, kind = label.rpartition("-") if label != "O" else ("", "", "")
        if kind and kind == before and prefix != "B":
            spans[-1].append(word)
        elif kind:
            spans.append([word])
        before = kind
    return spans


LABELS = ["O", "B-MAT", "I-MAT", "B-DEV", "O2"]


def test_a_word_has_the_tag_of_its_first_piece_whatever_else_is_in_the_batch(tmp_path):
    folder = saved_tagger(tmp_path / "run" / "model", LABELS)
    texts = ["", *TEXTS[:7], " ".join(WORDS * 40), " ", "the film, of !"]
    batch = found(f"ner:{tmp_path}/run", texts, tmp_path)
    assert batch == [found(f"ner:{folder}", [text], tmp_path)[0] for text in texts]
    words = [[re.findall(r"\w+|[,!]", span) for span in of] for of in batch]
    assert words == [expected(folder, text, LABELS) for text in texts]
    assert len(batch[8]) > 40  # behind the first window of 64 too
    (only,) = found(f"ner:{folder},types=DEV", [texts[8]], tmp_path)
    assert 0 < len(only) < len(batch[8])
    keys = {FINDERS.read(f"ner:{folder}{types}").prepare([], tmp_path).key for types in ("", ",types=DEV")}
    assert len(keys) == 2


@given(length=st.integers(0, 3000), size=st.integers(4, LONGEST_WINDOW))
def test_windows_fit_and_decide_on_every_piece_once_far_from_their_edges(length, size):
    decided = []
    for start, end, first, last in windows(length, size):
        assert 0 <= start <= first < last <= end <= min(start + size, length)
        assert start == first == 0 or first - start >= size // 4 // 2
        assert end == last == length or end - last >= size // 4 // 2
        decided += range(first, last)
    assert decided == list(range(length))


@pytest.mark.parametrize(
    ("finder", "message"),
    [
        ("ner:no_o", "no_o has no label O, so every word would be found: LABEL_0, LABEL_1"),
        ("ner:tagger,types=DVE", "has no type 'DVE'; it has DEV, MAT, O2"),
        ("ner:masked_lm", r"is no token-classification model \(it has no classifier\."),
        ("ner:./nothing", r"'\./nothing' is no folder, and cannot be had from the Hub"),
        ("terms:empty.txt", "holds no term"),
        ("keyness:pydocs,ratio=0", "ratio must be more than 0"),
    ],
)
def test_finders_that_cannot_be_meant_say_why(tmp_path, monkeypatch, finder, message):
    monkeypatch.chdir(tmp_path)
    saved_tagger("no_o", ["LABEL_0", "LABEL_1"])
    saved_tagger("tagger", LABELS)
    masked_lm = BertForMaskedLM(BertConfig(vocab_size=128, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    masked_lm.save_pretrained("masked_lm")
    train_wordpiece(TEXTS, 128).save_pretrained("masked_lm")
    Path("empty.txt").write_text("\n \n")
    with pytest.raises(UsageError, match=message):
        found(finder, [], tmp_path)
