"""Tokenizers and token arrays: samples tile the documents, caches are shared, and nothing is lost silently."""

import json
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.documents import Documents
from asyncsgd.data.tokenization import (
    Tokens,
    _with_short_words,
    load_tokenizer,
    tokenize,
    tokenized_folder,
    train_byte_bpe,
    train_wordpiece,
)
from asyncsgd.errors import UsageError

TEXTS = tuple(
    f"Gradients of worker {i} arrive at the server, which applies update number {i * i}; an unusually long explanation "
    f"of asynchronous optimisation (see section {i % 7}) follows." + " More words." * (i % 5)
    for i in range(60)
)
CORPUS = Corpus("texts", Documents(TEXTS[:50], None), Documents(TEXTS[50:], None), "0123456789abcdef")


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


def test_samples_are_the_words_of_a_document_cut_at_the_sequence_length_less_the_special_tokens():
    tokenizer = word_tokenizer("a", "b", "##c", ",")
    tokens = tokenize(["A bc,b a bcc", "a b a b a", "a b a", ""], tokenizer, seq_len=6)
    assert tokens.ids.tolist() == [5, 6, 7, 8, 6, 5, 6, 7, 5, 6, 5, 6]
    assert tokens.starts.tolist() == [0, 4, 8, 12]
    assert tokens.word_starts.tolist() == [True, True, False, True, True, True, True, False, True, True, True, True]
    assert (tokens.ids.dtype, tokens.starts.dtype, tokens.word_starts.dtype) == (np.int32, np.int64, bool)


def test_a_sample_that_starts_inside_a_word_starts_a_word():
    tokens = tokenize(["a b b bcccc"], word_tokenizer("a", "b", "##c"), seq_len=6)
    assert tokens.ids.tolist() == [5, 6, 6, 6, 7, 7, 7, 7]
    assert tokens.word_starts.tolist() == [True] * 5 + [False] * 3


@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(0, 40), max_size=12), seq_len=st.integers(6, 20))
def test_samples_tile_each_document_except_for_a_tail_below_four_ids(lengths, seq_len):
    words = [chr(ord("a") + i) for i in range(20)]
    texts = [" ".join(words[(i + j) % 20] for j in range(length)) for i, length in enumerate(lengths)]
    tokens = tokenize(texts, word_tokenizer(*words), seq_len=seq_len)
    expected = []
    for i, length in enumerate(lengths):
        ids = [5 + (i + j) % 20 for j in range(length)]
        expected += [ids[first : first + seq_len - 2] for first in range(0, length, seq_len - 2)]
    expected = [sample for sample in expected if len(sample) >= 4]
    assert tokens.num_samples == len(expected)
    assert tokens.lengths.tolist() == [len(sample) for sample in expected]
    assert [ids.tolist() for ids in np.split(tokens.ids, tokens.starts[1:-1])] == (expected or [[]])


@settings(deadline=None, max_examples=25)
@given(texts=st.lists(st.text(max_size=60), max_size=6))
def test_ids_and_word_starts_are_those_of_the_tokenizer_itself_for_any_text(tokenizer, texts):
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    tokens = tokenize(texts, tokenizer, seq_len=512)
    expected_ids, expected_starts = [], []
    for text in texts:
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        if len(encoding.ids) >= 4:
            words = encoding.word_ids
            expected_ids += encoding.ids
            expected_starts += [i == 0 or words[i] != words[i - 1] for i in range(len(words))]
    assert tokens.ids.tolist() == expected_ids
    assert tokens.word_starts.tolist() == expected_starts


def test_more_documents_than_one_chunk_give_the_same_samples_as_one_by_one(tokenizer):
    texts = [TEXTS[i % len(TEXTS)] for i in range(2100)]
    tokens = tokenize(texts, tokenizer, seq_len=16)
    singles = [tokenize([text], tokenizer, seq_len=16) for text in TEXTS]
    assert tokens.ids.tolist() == [i for k in range(2100) for i in singles[k % len(TEXTS)].ids.tolist()]
    assert tokens.lengths.tolist() == [i for k in range(2100) for i in singles[k % len(TEXTS)].lengths.tolist()]


@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(0, 40), max_size=12), seq_len=st.integers(6, 20), end_id=st.sampled_from([None, 3]))
def test_blocks_tile_all_documents_together_and_none_is_lost_for_being_short(lengths, seq_len, end_id):
    words = [chr(ord("a") + i) for i in range(20)]
    texts = [" ".join(words[(i + j) % 20] for j in range(length)) for i, length in enumerate(lengths)]
    tokens = tokenize(texts, word_tokenizer(*words), seq_len=seq_len, end_id=end_id, blocks=True)
    end = [] if end_id is None else [end_id]
    joined = [i for k, length in enumerate(lengths) for i in [*(5 + (k + j) % 20 for j in range(length)), *end]]
    blocks = [joined[first : first + seq_len - 2] for first in range(0, len(joined), seq_len - 2)]
    blocks = [block for block in blocks if len(block) >= 4]
    assert tokens.lengths.tolist() == [len(block) for block in blocks]
    assert tokens.ids.tolist() == [i for block in blocks for i in block]
    assert tokens.word_starts.all()


def test_a_word_that_a_block_cuts_begins_again_and_documents_begin_words_within_a_block():
    tokens = tokenize(["a b", "bc", "acc"], word_tokenizer("a", "b", "##c"), seq_len=6, blocks=True)
    assert tokens.ids.tolist() == [5, 6, 6, 7]  # the rest of the last word is too short for a block
    assert tokens.word_starts.tolist() == [True, True, True, False]
    tokens = tokenize(["a b", "bc", "acccc"], word_tokenizer("a", "b", "##c"), seq_len=7, blocks=True)
    assert tokens.ids.tolist() == [5, 6, 6, 7, 5, 7, 7, 7, 7]
    assert tokens.word_starts.tolist() == [True, True, True, False, True, True, False, False, False]


def test_a_special_token_spelled_out_in_a_text_does_not_become_one(tokenizer):
    special = tokenizer.all_special_ids
    tokens = tokenize(["the gradients [MASK] of the [SEP] server [PAD]"], tokenizer, seq_len=64)
    assert tokens.num_samples == 1
    assert not set(tokens.ids.tolist()) & (set(special) - {tokenizer.unk_token_id})


def test_a_truncation_stored_with_the_tokenizer_loses_no_text_and_stays_as_it_was(tokenizer):
    cutting = train_wordpiece(TEXTS, 256)
    cutting.backend_tokenizer.enable_truncation(8)
    cutting.backend_tokenizer.enable_padding(length=100)
    stored = cutting.backend_tokenizer.to_str()
    assert tokenize(TEXTS, cutting, seq_len=32).ids.tolist() == tokenize(TEXTS, tokenizer, seq_len=32).ids.tolist()
    assert cutting.backend_tokenizer.to_str() == stored


def test_a_sequence_length_without_room_for_four_tokens_is_an_error(tokenizer):
    with pytest.raises(UsageError, match=r"length of 5 leaves 3 tokens beside 2 special ones; use at least 6"):
        tokenize(TEXTS, tokenizer, seq_len=5)


def test_saved_tokens_are_mapped_back_read_only(tmp_path, tokenizer):
    tokens = tokenize(TEXTS, tokenizer, seq_len=32)
    tokens.save(tmp_path / "new" / "tokens")
    loaded = Tokens.load(tmp_path / "new" / "tokens")
    for name in ("ids", "starts", "word_starts"):
        array = getattr(loaded, name)
        assert isinstance(array, np.memmap)
        assert array.dtype == getattr(tokens, name).dtype
        np.testing.assert_array_equal(array, getattr(tokens, name))
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_arrays_that_do_not_fit_together_are_refused():
    ids, words = np.zeros(5, dtype=np.int32), np.ones(5, dtype=bool)
    with pytest.raises(ValueError, match="from 0 to the number of ids, 5"):
        Tokens(ids, np.array([0, 4]), words)
    with pytest.raises(ValueError, match="4 word_starts for 5 ids"):
        Tokens(ids, np.array([0, 5]), words[:4])


TRAIN_AND_PRINT = """
import hashlib
import sys
from asyncsgd.data import tokenization
train = getattr(tokenization, sys.argv[1])
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


def test_a_trained_vocabulary_has_the_size_asked_for_and_lower_cases(tokenizer):
    assert len(tokenizer) == 256
    assert tokenizer.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.tokenize("GRADIENTS") == tokenizer.tokenize("gradients")
    assert tokenizer.unk_token_id not in tokenize(TEXTS, tokenizer, seq_len=64).ids


def test_a_trained_tokenizer_is_saved_and_loaded_without_network_as_it_was(tmp_path, tokenizer):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.is_fast
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert loaded("the server").input_ids == tokenizer("the server").input_ids
    assert loaded("the server").input_ids[0] == loaded.cls_token_id
    assert loaded.mask_token_id == 4


@settings(max_examples=25)
@given(text=st.text())
def test_a_byte_level_tokenizer_gives_every_text_back_and_finds_no_end_in_it(bpe, text):
    # Without 4 ids a document is dropped.
    tokens = tokenize([text + "....<|endoftext|>...."], bpe, seq_len=10_000, end_id=bpe.eos_token_id)
    assert tokens.ids[-1] == bpe.eos_token_id
    assert bpe.eos_token_id not in tokens.ids[:-1]
    assert bpe.decode(tokens.ids[:-1], clean_up_tokenization_spaces=False) == text + "....<|endoftext|>...."


def test_a_byte_level_vocabulary_has_the_size_asked_for_and_is_saved_and_loaded_as_it_was(tmp_path, bpe):
    from transformers import AutoTokenizer

    bpe.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert len(bpe) == len(loaded) == 300
    assert loaded.backend_tokenizer.to_str() == bpe.backend_tokenizer.to_str()
    assert (loaded.eos_token, loaded.num_special_tokens_to_add()) == ("<|endoftext|>", 0)
    with pytest.raises(UsageError, match="at least 257"):
        train_byte_bpe(TEXTS, 256)


def test_byte_level_training_takes_seconds_where_a_line_has_no_end():
    # The letters make many merges, each of which looks at the whole word.
    word = "".join(random.Random(0).choices("abcdefghij", k=3_000_000))
    before = time.monotonic()
    assert train_byte_bpe([word], 2000).get_vocab() == train_byte_bpe([word[:1000]], 2000).get_vocab()
    assert time.monotonic() - before < 20


def test_a_document_ends_with_the_token_asked_for_and_is_cut_after_that():
    tokenizer = word_tokenizer("a", "b")
    tokens = tokenize(["a b a b a", "b b b", "a b a b b b b"], tokenizer, seq_len=6, end_id=9)
    assert np.split(tokens.ids, tokens.starts[1:-1])[1].tolist() == [6, 6, 6, 9]
    assert tokens.ids.tolist() == [5, 6, 5, 6, 6, 6, 6, 9, 5, 6, 5, 6, 6, 6, 6, 9]  # less a tail of 2 tokens
    assert tokens.word_starts.all()


def test_rare_characters_leave_room_for_words_in_a_small_vocabulary():
    texts = ["gradient descent " * 50 + "".join(chr(0x4E00 + i) for i in range(2000))]
    small = train_wordpiece(texts, 128)
    assert len(small) <= 128
    assert small.tokenize("gradient") == ["gradient"]


def test_a_vocabulary_that_is_too_small_and_texts_without_a_character_are_errors():
    with pytest.raises(UsageError, match="63 entries is too small; use at least 64"):
        train_wordpiece(TEXTS, 63)
    with pytest.raises(UsageError, match="nothing but spaces"):
        train_wordpiece([" ", ""], 64)


def test_of_a_word_without_end_the_beginning_is_trained_on_in_seconds_and_other_words_as_ever():
    texts = [" ".join(TEXTS), "gradient, " * 50 + "ab" * 150_000 + ".worker"]
    began = time.monotonic()
    trained = train_wordpiece(texts, 128)
    assert time.monotonic() - began < 10
    cut = [texts[0], "gradient, " * 50 + "ab" * 500 + ".worker"]
    assert trained.get_vocab() == train_wordpiece(cut, 128).get_vocab()
    assert len(tokenize([texts[1]], trained, seq_len=128).ids) == len(tokenize([cut[1]], trained, seq_len=128).ids)


def test_only_words_are_cut_not_what_chinese_or_punctuation_holds_together():
    held_together = "更新" * 2000 + "a-b_c." * 2000 + "x" * 1000
    assert _with_short_words(held_together) is not held_together
    assert _with_short_words(held_together) == held_together
    assert _with_short_words("é€" * 2000 + " y") == "é€" * 500 + " y"


def test_the_tokenizer_of_a_tiny_model_is_trained_once_and_then_read_from_the_cache(tmp_path):
    first = load_tokenizer("tiny", CORPUS, vocab_size=256, cache_dir=tmp_path / "new")
    (folder,) = (tmp_path / "new").iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = load_tokenizer("small", CORPUS, vocab_size=256, cache_dir=tmp_path / "new")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert again.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()
    load_tokenizer("tiny", CORPUS, vocab_size=200, cache_dir=tmp_path / "new")
    assert len(list((tmp_path / "new").iterdir())) == 2


def load(model, tmp_path):
    return load_tokenizer(str(model), CORPUS, vocab_size=256, cache_dir=tmp_path / "cache")


def test_a_local_folder_brings_its_own_tokenizer(tmp_path):
    own = word_tokenizer("a", "b")
    own.save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model", tmp_path)
    assert loaded.get_vocab() == own.get_vocab()
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_a_tokenizer_is_an_error_even_where_transformers_makes_an_empty_one(tmp_path):
    with pytest.raises(UsageError, match=r"holds no tokenizer that can be read.*save_pretrained.*--model tiny"):
        load(tmp_path, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UsageError, match=r"holds no tokenizer that can be read \(it has no vocabulary\)"):
        load(tmp_path, tmp_path)


def test_a_tokenizer_without_a_mask_token_is_an_error(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match=r"has no mask token; choose a masked language model or --model tiny"):
        load(tmp_path / "model", tmp_path)


def test_a_tokenizer_without_a_fast_implementation_is_an_error(tmp_path):
    from transformers import CanineTokenizer

    CanineTokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match="no fast implementation"):
        load(tmp_path / "model", tmp_path)


def assert_same(tokens, expected):
    np.testing.assert_array_equal(tokens.ids, expected.ids)
    np.testing.assert_array_equal(tokens.starts, expected.starts)
    np.testing.assert_array_equal(tokens.word_starts, expected.word_starts)


def test_a_corpus_is_tokenized_once_and_mapped_by_its_folder(tmp_path, tokenizer):
    folder = tokenized_folder(CORPUS, tokenizer, seq_len=32, cache_dir=tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == [folder]
    train = Tokens.load(folder / "train")
    assert_same(train, tokenize(CORPUS.train.texts, tokenizer, seq_len=32))
    assert_same(Tokens.load(folder / "eval"), tokenize(CORPUS.eval.texts, tokenizer, seq_len=32))
    assert isinstance(train.ids, np.memmap)
    made = (folder / "train" / "ids.npy").stat().st_mtime_ns
    assert tokenized_folder(CORPUS, tokenizer, seq_len=32, cache_dir=tmp_path / "new") == folder
    assert (folder / "train" / "ids.npy").stat().st_mtime_ns == made


def test_another_corpus_tokenizer_sequence_length_or_end_has_another_folder(tmp_path, tokenizer):
    other_corpus = Corpus("texts", CORPUS.train, CORPUS.eval, "f" * 16)
    folders = {
        tokenized_folder(CORPUS, tokenizer, seq_len=32, cache_dir=tmp_path),
        tokenized_folder(CORPUS, tokenizer, seq_len=31, cache_dir=tmp_path),
        tokenized_folder(CORPUS, train_wordpiece(TEXTS, 200), seq_len=32, cache_dir=tmp_path),
        tokenized_folder(other_corpus, tokenizer, seq_len=32, cache_dir=tmp_path),
        tokenized_folder(CORPUS, tokenizer, seq_len=32, cache_dir=tmp_path, end_id=3),
    }
    assert len(folders) == 5
    assert sorted(tmp_path.iterdir()) == sorted(folders)


def test_a_side_without_a_sample_is_an_error_and_leaves_no_folder(tmp_path, tokenizer):
    corpus = Corpus("short", CORPUS.train, Documents(("a b",), None), "e" * 16)
    with pytest.raises(UsageError, match=r"no eval document of short has 4 tokens.*--eval-data FILE"):
        tokenized_folder(corpus, tokenizer, seq_len=32, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_a_usage_error(tmp_path, tokenizer):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"cannot be written \(.*\); type --cache-dir FOLDER"):
        tokenized_folder(CORPUS, tokenizer, seq_len=32, cache_dir=tmp_path / "file" / "cache")


START_TOGETHER = """
import sys
from pathlib import Path
from asyncsgd.data.corpora import Corpus
from asyncsgd.data.documents import Documents
from asyncsgd.data.tokenization import Tokens, load_tokenizer, tokenized_folder
texts = tuple(f"the server applies update {i} of worker {i % 7}" for i in range(3000))
corpus = Corpus("texts", Documents(texts[100:], None), Documents(texts[:100], None), "0" * 16)
import transformers.models.bert.tokenization_bert
print("ready", flush=True)
sys.stdin.readline()
tokenizer = load_tokenizer("tiny", corpus, vocab_size=300, cache_dir=Path(sys.argv[1]))
folder = tokenized_folder(corpus, tokenizer, seq_len=16, cache_dir=Path(sys.argv[1]))
train, held_out = Tokens.load(folder / "train"), Tokens.load(folder / "eval")
print(train.num_samples, held_out.num_samples, int(train.ids.sum()), int(held_out.ids.sum()))
"""
