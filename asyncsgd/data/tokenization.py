"""From texts to arrays of token ids that several processes can map into memory.

Shapes: T tokens, S samples. Importing this module costs numpy only; transformers and tokenizers are imported by the
functions that need them, and `Tokens.load` needs neither.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import string
import sys
import unicodedata
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncsgd.data.corpora import Corpus, hub_is_reachable
from asyncsgd.data.masking import Sample
from asyncsgd.errors import UsageError, nearest, reason

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

# Change when the same texts get other tokens: old caches are then left alone and new ones are made.
TOKENIZER_FORMAT = 1
TOKENS_FORMAT = 1

# The models that bring no tokenizer of their own: theirs is trained on the corpus.
TRAINED_HERE = ("tiny", "small", "tiny-distilbert")

# A shorter sample would hardly have context around a masked token.
MIN_SAMPLE_IDS = 4

END_OF_TEXT = "<|endoftext|>"
_SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_SMALLEST_VOCABULARY = 64
_NUM_BYTES = 256
_LARGEST_ALPHABET = 1000
_LONGEST_WORD = 1000
_RUN_WITHOUT_SPACE = re.compile(rf"\S{{{_LONGEST_WORD},}}")
_TEXTS_PER_CHUNK = 2048
_CANDIDATES = "candidates.npy"


TrainTokenizer = Callable[[Iterable[str], int], "PreTrainedTokenizerBase"]
"""From texts and the size of a vocabulary to a tokenizer; the same in every process."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The token ids of a set of samples, one after another, without special tokens or padding.

    Args:
        ids: int32 (T,), the token ids.
        starts: int64 (S + 1,), ascending from 0 to T; sample s is ``ids[starts[s]:starts[s + 1]]``.
        word_starts: bool (T,), True where a token begins a word (punctuation counts as a word) or a sample.
        candidates: bool (T,), True where a finder found something; None where nobody has looked.

    >>> tokens = Tokens(np.arange(9, dtype=np.int32), np.array([0, 4, 9]), np.ones(9, dtype=bool))
    >>> tokens.num_samples, tokens.lengths.tolist()
    (2, [4, 5])
    """

    ids: np.ndarray
    starts: np.ndarray
    word_starts: np.ndarray
    candidates: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.starts) == 0 or self.starts[0] != 0 or self.starts[-1] != len(self.ids):
            raise ValueError(f"starts must run from 0 to the number of ids, {len(self.ids)}")
        if len(self.word_starts) != len(self.ids):
            raise ValueError(f"{len(self.word_starts)} word_starts for {len(self.ids)} ids")
        if self.candidates is not None and len(self.candidates) != len(self.ids):
            raise ValueError(f"{len(self.candidates)} candidates for {len(self.ids)} ids")

    @property
    def num_samples(self) -> int:
        """S, the number of samples."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 (S,), the number of ids of each sample; a new array at each call."""
        return np.diff(self.starts)

    def sample(self, number: int) -> Sample:
        """Sample `number` in [0, S), as views."""
        tokens = slice(self.starts[number], self.starts[number + 1])
        candidates = None if self.candidates is None else self.candidates[tokens]
        return Sample(self.ids[tokens], self.word_starts[tokens], candidates)

    def select(self, keep: np.ndarray) -> Tokens:
        """The samples where bool `keep` (S,) is set, in arrays of their own."""
        tokens = np.repeat(keep, self.lengths)
        return Tokens(
            self.ids[tokens],
            np.concatenate([[0], np.cumsum(self.lengths[keep])]),
            self.word_starts[tokens],
            None if self.candidates is None else self.candidates[tokens],
        )

    def save(self, folder: Path) -> None:
        """Write one .npy file per array into `folder`, which is made when needed; existing files are overwritten."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "ids.npy", self.ids)
        np.save(folder / "starts.npy", self.starts)
        np.save(folder / "word_starts.npy", self.word_starts)
        if self.candidates is not None:
            np.save(folder / _CANDIDATES, self.candidates)

    @classmethod
    def load(cls, folder: Path) -> Tokens:
        """Map what `save` wrote into memory: read-only arrays, shared between the processes that map them.

        Raises:
            OSError: a file is missing or empty.
            ValueError: a file is cut short or the arrays do not fit together.
        """
        ids, starts, word_starts = (
            np.load(folder / name, mmap_mode="r") for name in ("ids.npy", "starts.npy", "word_starts.npy")
        )
        has_candidates = (folder / _CANDIDATES).exists()
        return cls(ids, starts, word_starts, np.load(folder / _CANDIDATES, mmap_mode="r") if has_candidates else None)


def train_wordpiece(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a lower-casing BERT tokenizer; the same texts give the same vocabulary in every process.

    Args:
        texts: the documents; read once.
        vocab_size: the largest number of entries, special tokens included, at least 64. A small corpus gives fewer.

    Returns:
        A `transformers.BertTokenizer`, whose `save_pretrained` folder `AutoTokenizer.from_pretrained` reads.

    Raises:
        UsageError: `vocab_size` is below 64, or the texts hold nothing but spaces.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise UsageError(f"a vocabulary of {vocab_size} entries is too small; use at least {_SMALLEST_VOCABULARY}")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertTokenizer

    texts = [_with_short_words(text) for text in texts]
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizers.BertNormalizer(lowercase=True)
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    alphabet = _alphabet(map(trained.normalizer.normalize_str, texts), vocab_size)
    # The library numbers the pieces "##x" in the order of a hash table, which differs from run to run. It settles ties
    # between merges by these numbers. So two trainings on the same texts give different vocabularies. Listed as special
    # tokens, all single characters are numbered before it looks; the tokenizer below does not know of this.
    pieces = ["##" + character for character in alphabet if character not in string.punctuation]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL_TOKENS + pieces,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer, length=len(texts))
    vocabulary = dict(sorted(trained.get_vocab().items(), key=lambda entry: entry[1]))
    return BertTokenizer(vocab=vocabulary, do_lower_case=True)


def _with_short_words(text: str) -> str:
    """Return `text` with very long words cut: training on one would take hours and hear no signal.

    The time grows with the square of a word's length. A tokenizer makes [UNK] of a word of more than 100 characters
    anyway; the limit is higher, so that the vocabularies of ordinary texts are what they have always been.
    """
    if max(map(len, text.split()), default=0) <= _LONGEST_WORD:
        return text
    return _words().sub(lambda word: word[0][:_LONGEST_WORD], text)


@functools.cache
def _words() -> re.Pattern[str]:
    """What BERT's pre-tokenizer takes for one word; it cuts at spaces, at punctuation and around Chinese characters."""
    punctuation = (c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c).startswith("P"))
    outside = re.escape(string.punctuation + "".join(punctuation))
    return re.compile(rf"[^\s{outside}\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]+")


def _alphabet(normalized_texts: Iterable[str], vocab_size: int) -> list[str]:
    """Return the most frequent characters, sorted; a character costs up to two entries, so at most half of all."""
    counts: Counter[str] = Counter()
    for text in normalized_texts:
        counts.update(text)
    characters = [character for character in counts if not character.isspace()]
    if not characters:
        raise UsageError("a tokenizer cannot be trained on texts that hold nothing but spaces; give other texts")
    characters.sort(key=lambda character: (-counts[character], character))
    return sorted(characters[: min(_LARGEST_ALPHABET, (vocab_size - len(_SPECIAL_TOKENS)) // 4)])


def train_byte_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer as GPT-2 has one; the same texts give the same vocabulary in every process.

    Args:
        texts: the documents; read once.
        vocab_size: the largest number of entries, the 256 bytes and the end-of-text token included.

    Returns:
        A fast tokenizer that adds no special tokens; its ``eos_token`` is ``<|endoftext|>``.

    Raises:
        UsageError: `vocab_size` is below 257.
    """
    if vocab_size <= _NUM_BYTES:
        raise UsageError(f"a vocabulary of {vocab_size} entries is too small; use at least {_NUM_BYTES + 1}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    # The time of training grows with the square of a word's length, as it does for WordPiece.
    texts = [_RUN_WITHOUT_SPACE.sub(lambda run: run[0][:_LONGEST_WORD], text) for text in texts]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer, length=len(texts))
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END_OF_TEXT)


def load_tokenizer(model: str, corpus: Corpus, *, vocab_size: int, cache_dir: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `model`: its own, or one trained on `corpus` for the models without one.

    Args:
        model: ``"tiny"`` or ``"small"`` (a WordPiece tokenizer trained on ``corpus.train`` and kept in `cache_dir`), a
            local folder, or a Hub id.
        corpus: the texts to train on; not read for the other models.
        vocab_size: the size of a trained vocabulary; not used for the other models, which bring their own.
        cache_dir: folder of the trained tokenizers; made when needed.

    Raises:
        UsageError: there is no such tokenizer or the Hub is unreachable, or the tokenizer has no vocabulary, no mask
            token or no fast implementation.
    """
    if model in TRAINED_HERE:
        return trained_tokenizer(corpus, vocab_size, cache_dir)
    tokenizer = pretrained_tokenizer(model)
    if tokenizer.mask_token is None:
        raise UsageError(f"the tokenizer of {model} has no mask token; choose a masked language model or --model tiny")
    return tokenizer


def trained_tokenizer(
    corpus: Corpus, vocab_size: int, cache_dir: Path, train: TrainTokenizer = train_wordpiece
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that `train` makes of ``corpus.train``, kept in a folder of `cache_dir`.

    The folder is the tokenizer's ``name_or_path``.
    """
    import tokenizers
    from transformers import AutoTokenizer

    kind = () if train is train_wordpiece else (train.__name__,)
    key = cache_key(TOKENIZER_FORMAT, corpus.fingerprint, vocab_size, tokenizers.__version__, *kind)
    folder = cache_dir / f"tokenizer-{key}"

    def train_and_save(temporary: Path) -> None:
        train(corpus.train.texts, vocab_size).save_pretrained(temporary)

    publish(folder, train_and_save)
    # Read back even when just trained, so that the first run and the later ones use the same object.
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _has_vocabulary(tokenizer: PreTrainedTokenizerBase) -> bool:
    # For a folder with a model's config.json but no tokenizer file, transformers makes a tokenizer that knows the
    # special tokens alone and turns every text into [UNK].
    return len(tokenizer) > len(tokenizer.all_special_ids)


def pretrained_tokenizer(model: str, built_in: Sequence[str] = TRAINED_HERE) -> PreTrainedTokenizerBase:
    """Return the tokenizer that `model`, a local folder or a Hub id, brings with it.

    Args:
        built_in: the models that bring none, for messages; the first is proposed.

    Raises:
        UsageError: there is no such tokenizer or the Hub is unreachable, or the tokenizer has no vocabulary or no fast
            implementation.
    """
    is_folder = is_model_folder(model, built_in)
    from transformers import AutoConfig, AutoTokenizer

    source = str(Path(model).expanduser()) if is_folder else model
    offline = not is_folder and not hub_is_reachable()
    local = is_folder or offline
    try:
        AutoConfig.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    except Exception as error:
        refuse_own_code(model, error, built_in)  # building the model explains any other error better
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    except Exception as error:
        refuse_own_code(model, error, built_in)
        # Only the first line, because transformers then lists all that it tried.
        raise _no_tokenizer(model, built_in, is_folder, offline, str(error).strip().partition("\n")[0]) from error
    if not _has_vocabulary(tokenizer):
        raise _no_tokenizer(model, built_in, is_folder, offline, "it has no vocabulary")
    if not tokenizer.is_fast:
        raise UsageError(
            f"the tokenizer of {model} has no fast implementation (tokenizer.json); use --model {built_in[0]}"
        )
    return tokenizer


def refuse_own_code(model: str, error: Exception, built_in: Sequence[str] = TRAINED_HERE) -> None:
    """Refuse `model` if transformers could not load it because it would have to run code that comes with it.

    Raises:
        UsageError: with `error` as its cause; nothing is raised for another error.
    """
    if "trust_remote_code" in str(error):  # transformers has no type for it, but names the argument to set
        raise UsageError(
            f"{model} needs code of its own (auto_map in its config.json or tokenizer_config.json), and asyncsgd runs "
            f"no code that comes with a model; take a model of an architecture that transformers has, or --model "
            f"{built_in[0]}"
        ) from error


def is_model_folder(model: str, built_in: Sequence[str] = TRAINED_HERE) -> bool:
    """Whether `model` is a folder; if not, it may be on the Hub.

    Raises:
        UsageError: if it can be neither.
    """
    if Path(model).expanduser().is_dir():
        return True
    if model.startswith((".", "~", os.sep)) or model.count("/") > 1 or os.path.exists(model):
        raise UsageError(f"there is no folder {model!r}; --model takes {', '.join(built_in)}, a folder or a Hub id")
    return False


def _no_tokenizer(model: str, built_in: Sequence[str], is_folder: bool, offline: bool, reason: str) -> UsageError:
    if is_folder:
        return UsageError(
            f"the folder {model} holds no tokenizer that can be read ({reason}); "
            f"write one there with tokenizer.save_pretrained(folder), or use --model {built_in[0]}"
        )
    if offline:
        return UsageError(
            f"the tokenizer of {model}{nearest(model, built_in)} is not in the local cache and the Hub is "
            f'unreachable; run the same command once online, or python -c "import transformers; '
            f'transformers.AutoTokenizer.from_pretrained({model!r})"; or use --model '
            f"{built_in[0]} or --model FOLDER"
        )
    return UsageError(f"the tokenizer of {model} cannot be loaded from the Hub: {reason}; use --model {built_in[0]}")


def tokenize(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    end_id: int | None = None,
    blocks: bool = False,
) -> Tokens:
    """Tokenize documents and cut each into consecutive samples that fit `seq_len` with their special tokens.

    A sample holds at most C = seq_len - (special tokens that the tokenizer adds) ids of one document; only the last
    one of a document is shorter, and it is dropped below 4 ids. A special token spelled out in a text, such as
    ``[MASK]``, is tokenized as ordinary characters.

    Args:
        texts: the documents.
        tokenizer: a fast tokenizer; neither used up nor changed.
        seq_len: the length of a padded sample, special tokens included.
        end_id: a token to put behind every document, before it is cut; None: none.
        blocks: cut all documents together, as if they were one; so all samples but the last have C ids.

    Returns:
        The samples in the order of the texts, in arrays of their own.

    Raises:
        UsageError: `seq_len` leaves room for fewer than 4 ids.
    """
    capacity = capacity_of(tokenizer, seq_len)
    backend = plain_backend(tokenizer)
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = [
        (np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, bool))
    ]
    for first in range(0, len(texts), _TEXTS_PER_CHUNK):
        chunk = list(texts[first : first + _TEXTS_PER_CHUNK])
        parts.append(_joined(backend.encode_batch(chunk, add_special_tokens=False), end_id))
    ids, lengths, word_starts = zip(*parts, strict=True)
    to_cut = units_to_cut(np.concatenate(lengths), blocks)
    starts, sizes = _sample_bounds(to_cut, capacity)
    begins_word, kept = np.concatenate(word_starts), kept_ids(to_cut, capacity)
    begins_word[starts] = True
    sizes = sizes[sizes >= MIN_SAMPLE_IDS]
    ends = np.concatenate([np.zeros(1, dtype=np.int64), sizes]).cumsum()
    return Tokens(np.concatenate(ids)[kept], ends, begins_word[kept])


def tokenize_beginnings(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, seq_len: int) -> Tokens:
    """Tokenize documents and keep the beginning of each, one sample a text, for tasks that label a text as a whole.

    Args:
        texts: the documents; one without any token becomes a sample of length 0.
        tokenizer: a fast tokenizer; neither used up nor changed.
        seq_len: the length of a padded sample, special tokens included.

    Returns:
        As many samples as texts, each of at most C = seq_len - (special tokens) ids.
    """
    capacity = capacity_of(tokenizer, seq_len)
    backend = plain_backend(tokenizer)
    ids: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
    for first in range(0, len(texts), _TEXTS_PER_CHUNK):
        encodings = backend.encode_batch(list(texts[first : first + _TEXTS_PER_CHUNK]), add_special_tokens=False)
        ids += [np.asarray(encoding.ids[:capacity], dtype=np.int32) for encoding in encodings]
    starts = np.cumsum([len(sample) for sample in ids], dtype=np.int64)
    joined = np.concatenate(ids)
    return Tokens(joined, starts, np.ones(len(joined), dtype=bool))


def capacity_of(tokenizer: PreTrainedTokenizerBase, seq_len: int) -> int:
    """How many ids of a text fit `seq_len`."""
    num_special = tokenizer.num_special_tokens_to_add()
    capacity = seq_len - num_special
    if capacity < MIN_SAMPLE_IDS:
        raise UsageError(
            f"a sequence length of {seq_len} leaves {max(capacity, 0)} tokens beside {num_special} special ones; "
            f"use at least {MIN_SAMPLE_IDS + num_special}"
        )
    return capacity


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a copy of the Rust tokenizer that neither cuts, pads, nor finds special tokens in the text."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    # Many published tokenizer files carry the truncation of their training, which would lose the rest of a document.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _joined(encodings: Sequence[Encoding], end_id: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (ids, length of each document, word_starts) of some documents, one after another."""
    end = () if end_id is None else (end_id,)
    outside = (None,) * len(end)
    document_lengths = np.array([len(encoding) + len(end) for encoding in encodings], dtype=np.int64)
    num_ids = int(document_lengths.sum())
    ids = np.fromiter((i for encoding in encodings for i in (*encoding.ids, *end)), np.int32, num_ids)
    words = np.fromiter(
        # None stands for a token outside all words; it has one of its own.
        (-1 if word is None else word for encoding in encodings for word in (*encoding.word_ids, *outside)),
        np.int64,
        num_ids,
    )
    word_starts = np.ones(num_ids, dtype=bool)
    word_starts[1:] = (words[1:] != words[:-1]) | (words[1:] == -1)
    word_starts[(document_lengths.cumsum() - document_lengths)[document_lengths > 0]] = True
    return ids, document_lengths, word_starts


def units_to_cut(document_lengths: np.ndarray, blocks: bool) -> np.ndarray:
    """The lengths of what `tokenize` cuts: of the documents, or of all together."""
    return document_lengths.sum(keepdims=True) if blocks else document_lengths


def kept_ids(document_lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Which of the ids of documents of these lengths are in a sample of `tokenize`, bool."""
    _, lengths = _sample_bounds(document_lengths, capacity)
    return np.repeat(lengths >= MIN_SAMPLE_IDS, lengths)


def _sample_bounds(document_lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (start, length), both int64, of the pieces of at most `capacity` that tile consecutive documents."""
    num_pieces = -(-document_lengths // capacity)
    document_ends = document_lengths.cumsum()
    first_piece = np.repeat(num_pieces.cumsum() - num_pieces, num_pieces)
    piece_in_document = np.arange(num_pieces.sum()) - first_piece
    starts = np.repeat(document_ends - document_lengths, num_pieces) + piece_in_document * capacity
    return starts, np.minimum(capacity, np.repeat(document_ends, num_pieces) - starts)


def tokenized_folder(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    cache_dir: Path,
    end_id: int | None = None,
    blocks: bool = False,
) -> Path:
    """Tokenize a corpus once and return the folder whose ``train`` and ``eval`` subfolders `Tokens.load` reads.

    The folder's name is decided by the texts, the tokenizer and `seq_len`, so that other processes of a run can map
    the same arrays without a tokenizer. Processes that start together may all tokenize; the first folder stays.

    Args:
        corpus: the documents.
        tokenizer: a fast tokenizer.
        seq_len: the length of a padded sample, special tokens included, as in `tokenize`.
        cache_dir: where the folder is made; made itself when needed.
        end_id, blocks: as in `tokenize`.

    Raises:
        UsageError: `seq_len` is too small, or a side of the corpus has no document of 4 tokens.
    """
    end = () if end_id is None else (end_id,)
    cut = ("blocks",) if blocks else ()
    key = cache_key(TOKENS_FORMAT, corpus.fingerprint, tokenizer.backend_tokenizer.to_str(), seq_len, *end, *cut)
    folder = cache_dir / f"tokens-{key}"

    def tokenize_and_save(temporary: Path) -> None:
        for side, documents in (("train", corpus.train), ("eval", corpus.eval)):
            tokens = tokenize(documents.texts, tokenizer, seq_len=seq_len, end_id=end_id, blocks=blocks)
            if not tokens.num_samples:
                raise UsageError(
                    f"no {side} document of {corpus.name} has {MIN_SAMPLE_IDS} tokens (a word of more than 100 "
                    f"characters is one); give other texts with --{'data' if side == 'train' else 'eval-data'} FILE"
                )
            tokens.save(temporary / side)

    publish(folder, tokenize_and_save)
    return folder


def cache_key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, then give it the name `folder` at once. A folder of that name is whole."""
    if folder.is_dir():
        return
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # another process was first, and what it wrote is the same
                raise
    except Exception as error:
        # The Rust library raises bare Exception for what the operating system refuses.
        if not isinstance(error, OSError):
            if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            error = OSError(int(number[1]), os.strerror(int(number[1])))
        raise UsageError(
            f"the cache folder {folder.parent} cannot be written ({reason(error)}); type --cache-dir FOLDER"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
