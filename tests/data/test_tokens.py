"""Tokenizers and rows of ids: rows tile the documents, caches are shared, and nothing is lost silently."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CanineTokenizer

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.documents import Documents
from asyncsgd.data.tokenizer import load_tokenizer, train_byte_bpe, train_wordpiece
from asyncsgd.data.tokens import Samples, cached, encodings_of, first_pieces, pair_rows, rows_of
from asyncsgd.errors import UsageError


def text_of(i):
    text = f"Gradients of worker {i} arrive at the server, which applies update number {i * i}; an unusually long "
    text += f"explanation of asynchronous optimisation (see section {i % 7}) follows."
    return text + " More words." * (i % 5)


TEXTS = tuple(map(text_of, range(60)))
CORPUS = Corpus("texts", Documents(TEXTS[:50]), Documents(TEXTS[50:]), "0123456789abcdef")


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece(TEXTS, 256)


@pytest.fixture(scope="module")
def bpe():
    return train_byte_bpe(TEXTS, 300)


def word_tokenizer(*words):
    """A tokenizer whose vocabulary is given, so that ids can be written down in a test."""
    from transformers import BertTokenizer

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    return BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)})


def inner(tokens, name="ids"):
    """The rows without the special tokens of BERT."""
    return [row.tolist()[1:-1] for row in tokens.rows(name, range(len(tokens)))]


def test_rows_are_cut_at_the_sequence_length_less_the_special_tokens_and_begin_words():
    tokenizer = word_tokenizer("a", "b", "##c", ",")
    tokens = rows_of(["A bc,b a bcc", "a b a b a", "a b a", ""], tokenizer, seq_len=6)
    assert inner(tokens) == [[5, 6, 7, 8], [6, 5, 6, 7], [5, 6, 5, 6]]
    assert tokens.row("ids", 0).tolist() == [2, 5, 6, 7, 8, 3]
    starts = [[True, True, False, True], [True, True, True, False], [True, True, True, True]]
    assert inner(tokens, "word_starts") == starts
    assert tokens.values["ids"].dtype == np.int32
    assert tokens.values["word_starts"].dtype == bool
    blocks = rows_of(["a b", "bc", "acccc"], tokenizer, seq_len=7, blocks=True)
    assert inner(blocks) == [[5, 6, 6, 7, 5], [7, 7, 7, 7]]
    assert inner(blocks, "word_starts") == [[True, True, True, False, True], [True, False, False, False]]


def test_a_special_token_that_is_spelled_out_in_a_text_is_ordinary_characters():
    tokenizer = word_tokenizer("[", "mask", "]", "sep", "a")
    assert inner(rows_of(["a [MASK] a [SEP]"], tokenizer, seq_len=16)) == [[9, 5, 6, 7, 9, 5, 8, 7]]


@settings(deadline=None, max_examples=25)
@given(texts=st.lists(st.text(max_size=60), max_size=6))
def test_ids_and_word_starts_are_those_of_the_tokenizer_itself_for_any_text(tokenizer, texts):
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    tokens = rows_of(texts, tokenizer, seq_len=512)
    expected_ids = []
    expected_starts = []
    for text in texts:
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        if len(encoding.ids) >= 4:
            words = encoding.word_ids
            expected_ids.append(encoding.ids)
            expected_starts.append([i == 0 or words[i] != words[i - 1] for i in range(len(words))])
    assert inner(tokens) == expected_ids
    assert inner(tokens, "word_starts") == expected_starts


@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(0, 40), max_size=12), seq_len=st.integers(6, 20), end_id=st.sampled_from([None, 3]))
def test_blocks_tile_all_documents_together_and_none_is_lost_for_being_short(lengths, seq_len, end_id):
    words = [chr(ord("a") + i) for i in range(20)]
    texts = []
    for i, length in enumerate(lengths):
        texts.append(" ".join(words[(i + j) % 20] for j in range(length)))
    tokens = rows_of(texts, word_tokenizer(*words), seq_len=seq_len, end_id=end_id, blocks=True)
    joined = []
    for i, length in enumerate(lengths):
        for j in range(length):
            joined.append(5 + (i + j) % 20)
        if end_id is not None:
            joined.append(end_id)
    blocks = []
    for first in range(0, len(joined), seq_len - 2):
        block = joined[first : first + seq_len - 2]
        if len(block) >= 4:
            blocks.append(block)
    assert inner(tokens) == blocks
    assert tokens.values["word_starts"].all()


def test_a_truncation_stored_with_the_tokenizer_loses_no_text_and_stays_as_it_was(tokenizer):
    cutting = train_wordpiece(TEXTS, 256)
    cutting.backend_tokenizer.enable_truncation(8)
    cutting.backend_tokenizer.enable_padding(length=100)
    stored = cutting.backend_tokenizer.to_str()
    rows = rows_of(TEXTS, cutting, seq_len=32)
    expected = rows_of(TEXTS, tokenizer, seq_len=32)
    assert inner(rows) == inner(expected)
    beginnings = [encoding.ids for encoding in encodings_of(TEXTS, cutting, 32)]
    assert beginnings == tokenizer(list(TEXTS), truncation=True, max_length=32)["input_ids"]
    assert cutting.backend_tokenizer.to_str() == stored


def test_saved_rows_are_mapped_back_read_only(tmp_path, tokenizer):
    tokens = rows_of(TEXTS, tokenizer, seq_len=32)
    kept = Samples({**tokens.values, "label": np.arange(len(tokens))}, tokens.starts)
    kept.save(tmp_path / "tokens")
    loaded = Samples.load(tmp_path / "tokens")
    assert loaded.values.keys() == kept.values.keys()
    assert loaded.starts.keys() == kept.starts.keys()
    for name, array in loaded.values.items():
        assert isinstance(array.base, np.memmap)
        assert array.dtype == kept.values[name].dtype
        np.testing.assert_array_equal(array, kept.values[name])
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    chosen = loaded.select(np.arange(len(loaded)) % 2 == 0)
    assert chosen.values["label"].tolist() == list(range(0, len(kept), 2))
    assert inner(chosen) == inner(kept)[::2]


TRAIN_AND_PRINT = """
import hashlib
import sys
from asyncsgd.data import tokenizer
train = getattr(tokenizer, sys.argv[1])
texts = [f"{chr(97 + i % 26)}{chr(97 + i * 7 % 26)}{chr(97 + i * i % 26)} été{i}" for i in range(500)]
print(hashlib.sha256(train(texts, int(sys.argv[2])).backend_tokenizer.to_str().encode()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("train", "vocab_size"), [("train_wordpiece", 200), ("train_byte_bpe", 400)])
def test_training_gives_the_same_vocabulary_in_every_process(train, vocab_size):
    # Many pairs are equally frequent here: without a fixed numbering of the characters nearly every run differs.
    command = [sys.executable, "-c", TRAIN_AND_PRINT, train, str(vocab_size)]
    runs = [subprocess.run(command, capture_output=True, text=True) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout


@settings(max_examples=25)
@given(text=st.text())
def test_a_byte_level_tokenizer_gives_every_text_back_and_finds_no_end_in_it(bpe, text):
    # Without 4 ids a document is dropped.
    whole = text + "....<|endoftext|>...."
    ids = rows_of([whole], bpe, seq_len=10_000, end_id=bpe.eos_token_id).row("ids", 0)
    assert ids[-1] == bpe.eos_token_id
    assert bpe.eos_token_id not in ids[:-1]
    assert bpe.decode(ids[:-1], clean_up_tokenization_spaces=False) == whole


@pytest.mark.parametrize("vocab_size", [64, 65, 69, 100])
def test_the_most_frequent_characters_take_up_to_half_of_a_vocabulary(vocab_size):
    """Each is an entry at the beginning of a word and another one within; the five special tokens come on top."""
    most_frequent_first = "kzeqaxwbyfcgtdhsirjolupmvn"
    texts = [f"{character} " * (100 - place) for place, character in enumerate(most_frequent_first)]
    vocabulary = train_wordpiece(texts, vocab_size).get_vocab()
    known = {entry for entry in vocabulary if len(entry) == 1}
    number = max(count for count in range(vocab_size) if 2 * count <= (vocab_size - 5) / 2)
    assert known == set(most_frequent_first[:number])


def test_of_a_word_without_end_the_beginning_is_trained_on_and_other_words_as_ever():
    whole = "gradient, " * 50 + "ab" * 150_000 + ".worker"
    cut = "gradient, " * 50 + "ab" * 500 + ".worker"
    for train, size in ((train_wordpiece, 128), (train_byte_bpe, 300)):
        vocabularies = []
        for text in (whole, cut):
            vocabularies.append(train([*TEXTS, text], size).get_vocab())
        assert train is train_byte_bpe or vocabularies[0] == vocabularies[1]


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (lambda folder: None, r"no tokenizer can be read there.*--model tiny"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'), "it has no vocabulary"),
        (lambda folder: train_byte_bpe(TEXTS, 300).save_pretrained(folder), "no mask token.*--model tiny"),
        (lambda folder: CanineTokenizer().save_pretrained(folder), "no fast implementation"),
    ],
    ids=["none", "empty", "mask", "slow"],
)
def test_a_folder_without_a_fast_tokenizer_with_a_mask_is_refused(saved, said, tmp_path):
    saved(tmp_path)
    with pytest.raises(UsageError, match=said):
        load_tokenizer(str(tmp_path), CORPUS, vocab_size=256, cache_dir=tmp_path / "cache")


def test_a_folder_is_made_once_whole_or_not_at_all_and_is_read_by_its_key(tmp_path):
    made = []

    def make(folder):
        made.append(folder)
        (folder / "text").write_text("x")

    folders = []
    for key in (("a", 1), ("a", 1), ("a", 2)):
        folders.append(cached(tmp_path / "new", "rows", key, make))
    assert folders[0] == folders[1]
    assert folders[1] != folders[2]
    assert len(made) == 2
    assert all((folder / "text").is_file() for folder in folders)
    with pytest.raises(ZeroDivisionError):
        cached(tmp_path / "new", "rows", ("b",), lambda folder: 1 // 0)
    assert len(list((tmp_path / "new").iterdir())) == 2
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"cannot be written \(.*\); type --cache-dir FOLDER"):
        cached(tmp_path / "file" / "cache", "rows", (), make)


SENTENCES = ["the unbelievable low-temperature fuel-cell (YSZ) ran at 650 °C", "Ärger mit naïve 2nd-order don't"]
TOKENIZERS = {"wordpiece": train_wordpiece(SENTENCES, 128), "byte_level": train_byte_bpe(SENTENCES, 300)}


def pieces_of(sentence, tokenizer, seq_len=64):
    """The row of a sentence without its special tokens, and where its words begin in it."""
    (encoding,) = encodings_of([" ".join(sentence)], tokenizer, seq_len)
    spans = []
    start = 0
    for word in sentence:
        end = start + len(word)
        spans.append((start, end))
        start = end + 1
    special = tokenizer.num_special_tokens_to_add() // 2
    begins = []
    for place in first_pieces(spans, encoding):
        if place >= 0:
            begins.append(int(place) - special)
        else:
            begins.append(-1)
    ids = encoding.ids[special : len(encoding.ids) - special]
    return ids, begins


words = st.text("abcdehtr-°ÄÄ.'", min_size=1, max_size=6)


@given(st.lists(words, min_size=1, max_size=5))
def test_the_first_piece_of_a_word_is_that_of_the_word_tokenized_by_itself(sentence):
    tokenizer = TOKENIZERS["wordpiece"]
    ids, firsts = pieces_of(sentence, tokenizer)
    expected_ids = []
    expected_firsts = []
    for word in sentence:
        expected_firsts.append(len(expected_ids))
        expected_ids += tokenizer(word, add_special_tokens=False)["input_ids"]
    assert ids == expected_ids
    assert firsts == expected_firsts


@given(st.lists(words, min_size=1, max_size=5))
def test_of_a_tokenizer_whose_pieces_begin_with_a_space_the_pieces_of_a_word_spell_it(sentence):
    tokenizer = TOKENIZERS["byte_level"]
    ids, firsts = pieces_of(sentence, tokenizer)
    spelled = []
    for a, b in itertools.pairwise([*firsts, len(ids)]):
        spelled.append(tokenizer.decode(ids[a:b]))
    assert [text.strip() for text in spelled] == sentence


def test_words_behind_the_cut_and_words_without_pieces_have_none():
    tokenizer = TOKENIZERS["wordpiece"]
    sentence = ["ran", "\u200b\ufffd", "", "at", "the", "unbelievable", "ran", "the"]
    whole, first = pieces_of(sentence, tokenizer)
    assert first[:4] == [0, -1, -1, 1]
    seq_len = first[6] + 2  # with [CLS] and [SEP]
    assert pieces_of(sentence, tokenizer, seq_len) == (whole[: first[6]], [*first[:6], -1, -1])


@pytest.mark.parametrize("seq_len", [8, 9, 14])
def test_a_pair_is_cut_as_its_tokenizer_cuts_it_whatever_the_lengths(seq_len):
    tokenizer = word_tokenizer("a", "b")
    firsts = []
    seconds = []
    for first, second in itertools.product(range(16), repeat=2):
        firsts.append("a " * first)
        seconds.append("b " * second)
    encoded = tokenizer(firsts, seconds, truncation=True, max_length=seq_len)
    pairs = list(zip(firsts, seconds, strict=True))
    rows = list(pair_rows(pairs, tokenizer, seq_len))
    assert [ids.tolist() for ids, _ in rows] == encoded["input_ids"]
    assert [types.tolist() for _, types in rows] == encoded["token_type_ids"]
