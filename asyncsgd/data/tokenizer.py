"""Tokenizers: trained on the texts, the same in every process, or those that a model brings with it."""

from __future__ import annotations

import functools
import os
import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.tables import hub_is_reachable
from asyncsgd.data.tokens import cached
from asyncsgd.errors import UsageError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Changes when the same texts get another tokenizer: old caches are then left alone and new ones are made.
TOKENIZER_FORMAT = 1

# The models that bring no tokenizer of their own: theirs is trained on the corpus.
TRAINED_HERE = ("tiny", "small", "tiny-distilbert")

END_OF_TEXT = "<|endoftext|>"
_SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_SMALLEST_VOCABULARY = 64
_NUM_BYTES = 256
_LARGEST_ALPHABET = 1000
_LONGEST_WORD = 1000
_RUN_WITHOUT_SPACE = re.compile(rf"\S{{{_LONGEST_WORD},}}")

TrainTokenizer = Callable[[Iterable[str], int], "PreTrainedTokenizerBase"]
"""From texts and the size of a vocabulary to a tokenizer; the same in every process."""


def train_wordpiece(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a lower-casing BERT tokenizer; the same texts give the same vocabulary in every process.

    Args:
        vocab_size: the largest number of entries, special tokens included. A small corpus gives fewer.

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

    It adds no special tokens; its ``eos_token`` is ``<|endoftext|>``.

    Raises:
        UsageError: `vocab_size` is below 257, which the bytes and the end-of-text token take.
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

    Raises:
        UsageError: as `pretrained_tokenizer` does, or the tokenizer has no mask token.
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
    """Return the tokenizer that `train` makes of ``corpus.train``, kept in a folder, which is its ``name_or_path``."""
    import tokenizers
    from transformers import AutoTokenizer

    kind = () if train is train_wordpiece else (train.__name__,)
    key = TOKENIZER_FORMAT, corpus.fingerprint, vocab_size, tokenizers.__version__, *kind

    def train_and_save(folder: Path) -> None:
        train(corpus.train.texts, vocab_size).save_pretrained(folder)

    # Read back even when just trained, so that the first run and the later ones use the same object.
    folder = cached(cache_dir, "tokenizer", key, train_and_save)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


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
    local: dict[str, Any] = {"local_files_only": is_folder or offline, "trust_remote_code": False}
    try:
        AutoConfig.from_pretrained(source, **local)
    except Exception as error:
        refuse_own_code(model, error, built_in)  # building the model explains any other error better
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **local)
        # For a folder with a model's config.json but no tokenizer file, transformers makes a tokenizer that knows the
        # special tokens alone and turns every text into [UNK].
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError("it has no vocabulary")
    except Exception as error:
        refuse_own_code(model, error, built_in)
        reason = str(error).strip().partition("\n")[0]  # transformers then lists all that it tried
        if is_folder:
            what = f"the folder {model} holds no tokenizer that can be read ({reason}); write one there with "
            what += "tokenizer.save_pretrained(folder)"
        elif offline:
            what = f"the tokenizer of {model}{nearest(model, built_in)} is not in the local cache and the Hub is "
            what += "unreachable; run the same command once online"
        else:
            what = f"the tokenizer of {model} cannot be loaded from the Hub: {reason}"
        raise UsageError(f"{what}, or use --model {built_in[0]} or --model FOLDER") from error
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
