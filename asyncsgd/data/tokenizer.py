"""Tokenizers: trained on the texts, the same in every process, or those that a model brings with it."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.files import hub_is_reachable
from asyncsgd.data.tokens import cached
from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings.groups import TRAINED_HERE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Changes when the same texts get another tokenizer: old caches are then left alone and new ones are made.
TOKENIZER_FORMAT = 1

END_OF_TEXT = "<|endoftext|>"
_SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_LARGEST_ALPHABET = 1000

# The time of training grows with the square of a word's length, so no more than the beginning of a long one is used.
_LONG_WORD = re.compile(r"\b(\w{1000})\w+")
_LONG_RUN = re.compile(r"(\S{1000})\S+")


def train_wordpiece(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a lower-casing BERT tokenizer; the same texts give the same vocabulary in every process.

    It has at most `vocab_size` entries, which are 64 or more, special tokens included; a small corpus gives fewer.
    """
    if vocab_size < 64:
        raise UsageError(f"a vocabulary of {vocab_size} entries is too small; type --vocab-size 64 or more")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertTokenizer

    texts = [_LONG_WORD.sub(r"\1", text) for text in texts]
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizers.BertNormalizer(lowercase=True)
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    normalized_texts = map(trained.normalizer.normalize_str, texts)
    alphabet = _alphabet(normalized_texts, vocab_size)
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


def _alphabet(normalized_texts: Iterable[str], vocab_size: int) -> list[str]:
    """The most frequent characters, sorted; a character costs up to two entries, so at most half of all."""
    counts: Counter[str] = Counter()
    for text in normalized_texts:
        counts.update(text)
    visible = [character for character in counts if not character.isspace()]
    if not visible:
        raise UsageError("a tokenizer cannot be trained on texts that hold nothing but spaces; give other texts")
    most_frequent_first = sorted(visible, key=lambda character: (-counts[character], character))
    num_characters = min(_LARGEST_ALPHABET, (vocab_size - len(_SPECIAL_TOKENS)) // 4)
    return sorted(most_frequent_first[:num_characters])


def train_byte_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer as GPT-2 has one; the same texts give the same vocabulary in every process.

    It adds no special tokens; its ``eos_token`` is ``<|endoftext|>``. That and the bytes take 257 entries.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator((_LONG_RUN.sub(r"\1", text) for text in texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END_OF_TEXT)


def load_tokenizer(model: str, corpus: Corpus, *, vocab_size: int, cache_dir: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `model`, which has a mask token: its own, or one trained on `corpus` for models made here."""
    if model in TRAINED_HERE:
        return trained_tokenizer(corpus, vocab_size, cache_dir)
    tokenizer = pretrained_tokenizer(model)
    if tokenizer.mask_token is None:
        raise UsageError(f"the tokenizer of {model} has no mask token; choose a masked language model or --model tiny")
    return tokenizer


def pad_id_of(tokenizer: PreTrainedTokenizerBase, model: Any) -> int:
    """The token that fills the shorter rows of a batch: the tokenizer's, or the model's, else any, since the attention
    mask hides it.
    """
    for pad_id in (tokenizer.pad_token_id, getattr(model.config, "pad_token_id", None)):
        if pad_id is not None:
            return int(pad_id)
    return 0


def trained_tokenizer(
    corpus: Corpus,
    vocab_size: int,
    cache_dir: Path,
    train: Callable[[Iterable[str], int], PreTrainedTokenizerBase] = train_wordpiece,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that `train` makes of ``corpus.train``, kept in a folder, which is its ``name_or_path``."""
    import tokenizers
    from transformers import AutoTokenizer

    key = [TOKENIZER_FORMAT, corpus.fingerprint, vocab_size, tokenizers.__version__]
    if train is not train_wordpiece:
        key.append(train.__name__)

    def make(folder: Path) -> None:
        tokenizer = train(corpus.train.texts, vocab_size)
        tokenizer.save_pretrained(folder)

    # Read back even when just trained, so that the first run and the later ones use the same object.
    folder = cached(cache_dir, "tokenizer", key, make)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def pretrained_tokenizer(model: str, built_in: Sequence[str] = TRAINED_HERE) -> PreTrainedTokenizerBase:
    """The tokenizer, with a fast implementation, that `model`, a local folder or a Hub id, brings with it.

    Args:
        built_in: the models that bring none, for messages; the first is proposed.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        source = str(folder)
        here_only = True
    else:
        source = model
        here_only = not hub_is_reachable()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=here_only, trust_remote_code=False)
        # For a folder with a model's config.json but no tokenizer file, transformers makes a tokenizer that knows the
        # special tokens alone and turns every text into [UNK].
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError("it has no vocabulary")
        if not tokenizer.is_fast:
            raise ValueError("it has no fast implementation, tokenizer.json")
    except Exception as error:
        refuse_own_code(model, error)
        reason, _, _ = str(error).strip().partition("\n")  # transformers then lists all that it tried
        raise UsageError(
            f"{model}{nearest(model, built_in)}: no tokenizer can be read there ({reason}); use --model {built_in[0]} "
            f"or --model FOLDER"
        ) from error
    return tokenizer


def refuse_own_code(model: str, error: Exception) -> None:
    """Refuse `model` if transformers could not load it because it would have to run code that comes with it."""
    if "trust_remote_code" in str(error):  # transformers has no type for it, but names the argument to set
        raise UsageError(
            f"{model} needs code of its own (auto_map in its config.json), and asyncsgd runs no code that comes with a "
            f"model; take a model of an architecture that transformers has, or --model tiny"
        ) from error
