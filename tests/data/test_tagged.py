"""Tagged sentences: what is read and refused, which piece is a word's first, and arrays that survive on disk."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from asyncsgd.data.documents import Documents
from asyncsgd.data.tagged import TaggedTokens, load_tagged, tagged_folder, tokenize_words
from asyncsgd.data.tokenization import train_wordpiece
from asyncsgd.errors import UsageError

Row = tuple[object, object]
TRAIN = [(["Li", "ran"], ["B-PER", "O"]), (["in", "New", "York"], ["O", "B-LOC", "I-LOC"])]
TEST = [(["York", "ran"], ["B-LOC", "O"])]


def write(folder, name, rows, columns=("tokens", "ner_tags")):
    folder.mkdir(parents=True, exist_ok=True)
    values = [dict(zip(columns, row, strict=True)) for row in rows]
    if name.endswith(".jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, values)))
    else:
        pytest.importorskip("pandas").DataFrame(values).to_parquet(folder / name)


def load(folder, **more):
    return load_tagged(str(folder), **{"tokens_column": "tokens", "tags_column": "ner_tags"} | more)


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_folder_is_read_the_same_from_every_kind_of_file(tmp_path, kind):
    write(tmp_path / "d", f"train{kind}", TRAIN)
    write(tmp_path / "d", f"test{kind}", TEST)
    data = load(tmp_path / "d")
    assert data.train.texts == ("Li ran", "in New York")
    assert data.eval.texts == ("York ran",)
    assert (data.name, data.split, data.labels, data.notes) == ("d", "test", ("B-LOC", "B-PER", "I-LOC", "O"), ())
    assert [tags.tolist() for tags in data.tags(data.train)] == [[1, 3], [3, 0, 2]]


def test_numbers_get_their_names_from_labels_json_or_from_the_feature(tmp_path):
    names = ["O", "B-PER", "B-LOC", "I-LOC", "I-PER"]
    numbers = [(words, [names.index(tag) for tag in tags]) for words, tags in TRAIN]  # type: ignore[attr-defined]
    test = [(["York", "ran"], [2, 0])]
    write(tmp_path / "json", "train.jsonl", numbers)
    write(tmp_path / "json", "test.jsonl", test)
    with pytest.raises(UsageError, match=r"line 1: '1' is no BIO tag.*numbers need names, in labels.json"):
        load(tmp_path / "json")
    (tmp_path / "json" / "labels.json").write_text(json.dumps(names))
    datasets = pytest.importorskip("datasets")
    (tmp_path / "feature").mkdir()
    for kind in (datasets.Sequence, datasets.List):
        features = datasets.Features(
            tokens=kind(datasets.Value("string")), ner_tags=kind(datasets.ClassLabel(names=names))
        )
        for side, rows in (("train", numbers), ("test", test)):
            columns = dict(zip(("tokens", "ner_tags"), map(list, zip(*rows, strict=True)), strict=True))
            datasets.Dataset.from_dict(columns, features).to_parquet(tmp_path / "feature" / f"{side}.parquet")
        for folder in ("json", "feature"):
            data = load(tmp_path / folder)
            assert data.labels == tuple(names)
            assert [tags.tolist() for tags in data.tags(data.train)] == [[1, 0], [0, 2, 3]]
            assert data.notes == ("no training word has the tag I-PER",)


def test_what_is_left_out_is_counted(tmp_path):
    write(tmp_path, "train.jsonl", [*TRAIN, *TEST, ([], []), ([" "], ["O"])])
    write(tmp_path, "test.jsonl", TEST)
    data = load(tmp_path)
    assert data.train.texts == ("Li ran", "in New York")
    assert data.notes == (
        f"2 rows of {tmp_path.name} (train) without words are left out",
        "1 training sentences that are test sentences too are left out",
    )
    assert load(tmp_path, train_samples=1).train.texts == ("Li ran",)
    assert load(tmp_path, train_samples=1).fingerprint != data.fingerprint


def test_an_i_without_a_b_is_read_and_a_space_in_a_word_does_not_part_it(tmp_path):
    write(tmp_path, "train.jsonl", [(["New York", "ran"], ["I-LOC", "O"]), (["a"], ["O"])])
    write(tmp_path, "test.jsonl", [(["Bern"], ["I-LOC"])])
    assert load(tmp_path).train.texts[0] == "New\u00a0York ran"


@pytest.mark.parametrize(
    ("train", "test", "more", "words"),
    [
        (TRAIN, TEST, {"tags_column": "tags"}, "'tags' --tags-column"),
        ([*TRAIN, (["a"], ["O", "O"])], TEST, {}, "line 3 1 words 2 tags"),
        (TRAIN, [(["a"], ["B-ORG"])], {}, "'B-ORG' no training word"),
        (TRAIN, [(["a"], ["S-LOC"])], {}, "line 1 'S-LOC' BIO"),
        ([("Li ran", ["O"])], TEST, {}, "'tokens' list --tokens-column"),
        ([(["Li"], ["O"])], [(["a"], ["O"])], {}, "one tag 'O'"),
        (TEST, TEST, {}, "no training sentence"),
        ([([], [])], TEST, {}, "(train) no sentence"),
        (TRAIN, TEST, {"split": "validation"}, "validation --split"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, train, test, more, words):
    write(tmp_path, "train.jsonl", train)
    write(tmp_path, "test.jsonl", test)
    with pytest.raises(UsageError) as error:
        load(tmp_path, **more)
    assert all(word in str(error.value) for word in words.split())


CORPUS = ["the unbelievable low-temperature fuel-cell (YSZ) ran at 650 °C", "Ärger mit naïve 2nd-order don't"]


def byte_level():
    """As GPT-2's and RoBERTa's: a space belongs to the piece behind it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trained.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=trained)


TOKENIZERS = {"wordpiece": train_wordpiece(CORPUS, 128), "byte_level": byte_level()}


def tokenized(sentence, tokenizer, seq_len=64):
    return tokenize_words(
        Documents((" ".join(sentence),), None), [np.arange(len(sentence), dtype=np.int32)], tokenizer, seq_len=seq_len
    )


words = st.text("abcdehtr-°ÄÄ.'", min_size=1, max_size=6)


@given(st.lists(words, min_size=1, max_size=5))
def test_the_first_piece_of_a_word_is_that_of_the_word_tokenized_by_itself(sentence):
    tokenizer = TOKENIZERS["wordpiece"]
    tokens = tokenized(sentence, tokenizer)
    alone = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in sentence]
    assert tokens.tokens.ids.tolist() == [piece for pieces in alone for piece in pieces]
    assert tokens.pieces.tolist() == np.cumsum([0, *map(len, alone)])[:-1].tolist()
    assert np.flatnonzero(tokens.tokens.word_starts).tolist() == tokens.pieces.tolist()


@given(st.lists(words, min_size=1, max_size=5))
def test_of_a_tokenizer_whose_pieces_begin_with_a_space_the_pieces_of_a_word_spell_it(sentence):
    tokenizer = TOKENIZERS["byte_level"]
    tokens = tokenized(sentence, tokenizer)
    bounds = [*tokens.pieces.tolist(), len(tokens.tokens.ids)]
    spelled = [tokenizer.decode(tokens.tokens.ids[a:b].tolist()) for a, b in itertools.pairwise(bounds)]
    assert [text.strip() for text in spelled] == sentence


def test_words_behind_the_cut_and_words_without_pieces_have_none():
    tokenizer = TOKENIZERS["wordpiece"]
    sentence = ["ran", "\u200b\ufffd", "", "at", "the", "unbelievable", "ran", "the"]
    whole = tokenized(sentence, tokenizer)
    first = whole.pieces.tolist()
    assert first[:4] == [0, -1, -1, 1]
    seq_len = first[6] + 2  # with [CLS] and [SEP]
    assert tokenized(sentence, tokenizer, seq_len).pieces.tolist() == [*first[:6], -1, -1]
    assert tokenized(sentence, tokenizer, seq_len).num_lost == 4
    assert tokenized(sentence, tokenizer, seq_len).tokens.ids.tolist() == whole.tokens.ids[: first[6]].tolist()


def test_the_arrays_lie_in_the_cache(tmp_path):
    write(tmp_path / "d", "train.jsonl", [(["\ufffd"], ["O"]), *TRAIN])
    write(tmp_path / "d", "test.jsonl", [(["\ufffd"], ["O"]), *TEST])
    data, tokenizer = load(tmp_path / "d"), TOKENIZERS["wordpiece"]
    folder = tagged_folder(data, tokenizer, seq_len=16, cache_dir=tmp_path / "cache")
    train, evaluation = (TaggedTokens.load(folder / side) for side in ("train", "eval"))
    # A training sentence that no piece is left of is left out; the evaluation keeps it.
    assert train.starts.tolist() == [0, 2, 5]
    assert train.tags.tolist() == [1, 3, 3, 0, 2]
    assert (train.pieces >= 0).all()
    assert evaluation.starts.tolist() == [0, 1, 3]
    assert evaluation.pieces.tolist()[0] == -1
    assert isinstance(train.tags, np.memmap)
    before = (folder / "train" / "ids.npy").stat().st_ino
    assert tagged_folder(data, tokenizer, seq_len=16, cache_dir=tmp_path / "cache") == folder
    assert (folder / "train" / "ids.npy").stat().st_ino == before
    assert tagged_folder(data, tokenizer, seq_len=15, cache_dir=tmp_path / "cache") != folder
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")] == []
