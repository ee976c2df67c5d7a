"""What tasks share that put a new head on the encoder of a masked-language model, named with ``--model``."""

from __future__ import annotations

import abc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from asyncsgd.errors import UsageError
from asyncsgd.settings.training import OF_TRANSFORMERS, Defaults
from asyncsgd.tasks.base import Task

if TYPE_CHECKING:  # the fields of subclasses are flags, and --help is not to wait for torch
    from torch import nn

    from asyncsgd.models import Built

VOCABULARY = 8192
"""Entries of the tokenizer that tiny and small get, unless `vocab_size` says otherwise."""

START = "a run of masked_lm, a saved model, a name on the Hub, or tiny or small (random weights)"
"""Help of `model_name`."""


class EncoderTask(Task):
    """A task whose model is an encoder and a head. Subclasses are frozen dataclasses with all fields named here."""

    defaults: ClassVar[Defaults] = OF_TRANSFORMERS

    model_name: str
    seq_len: int
    dropout: float
    vocab_size: int

    model_source: str | None
    """What `asyncsgd.models.build_model` takes, without a network; found, as all below."""
    folder: str | None
    """Of the tokenized data, with the tokenizer in ``tokenizer``."""
    corpus: str | None
    data_fingerprint: str | None
    from_scratch: bool | None
    parent: str | None
    """As JSON."""
    init_sha256: str | None
    notes: tuple[str, ...]

    @abc.abstractmethod
    def head(self, masked_lm: nn.Module, seed: int) -> Built:
        """The encoder of a masked-language model, and a head drawn from the seed."""

    @abc.abstractmethod
    def read(self, seed: int, cache: Path) -> Self:
        """Read and tokenize the data, and build the model once, to see that it can be built; see `prepare`."""

    def prepare(self, seed: int, cache: Path) -> Self:
        """Look at the names, then `read`.

        Raises:
            UsageError: if the user must change something; the message says what.
        """
        self.check_names()
        return self.read(seed, cache)

    def check_encoder(self) -> None:
        """Look at what `model_name` names.

        Raises:
            UsageError: if it cannot be used, or another setting does nothing with it.
        """
        from asyncsgd import models
        from asyncsgd.data.tokenization import TRAINED_HERE
        from asyncsgd.origin import read_origin

        origin = read_origin(self.model_name)
        if self.vocab_size != VOCABULARY and origin.model not in TRAINED_HERE:
            raise UsageError(
                f"--vocab-size {self.vocab_size} does nothing for {self.model_name}, which brings its own "
                f"tokenizer; drop it"
            )
        models.check_model(origin.model, self.seq_len)

    def found_of_encoder(self, tokenizer: Any, seed: int) -> dict[str, Any]:
        """Build the model once, to see that it can be built; return what was found, by the names of the fields."""
        from asyncsgd import models
        from asyncsgd.data.tokenization import TRAINED_HERE
        from asyncsgd.origin import hash_of, read_origin

        origin = read_origin(self.model_name)
        built = models.build_model(origin.model, tokenizer, seq_len=self.seq_len, dropout=self.dropout, seed=seed)
        init_sha256 = hash_of(built.model, origin)
        self.head(built.model, seed)
        return {
            "model_source": origin.model if origin.model in TRAINED_HERE else models.local_folder(origin.model),
            "from_scratch": origin.from_scratch,
            "parent": None if origin.parent is None else json.dumps(origin.parent),
            "init_sha256": init_sha256,
        }

    def facts_of_encoder(self) -> dict[str, Any]:
        """What a run's summary says of data and model."""
        from asyncsgd.data.tokenization import TRAINED_HERE

        return {
            "model": self.model_name,
            "data": self.corpus,
            "data_fingerprint": self.data_fingerprint,
            "base_model": None if self.model_name in TRAINED_HERE else self.model_name,
            "from_scratch": self.from_scratch,
            "parent": None if self.parent is None else json.loads(self.parent),
            "init_sha256": self.init_sha256,
            "notes": list(self.notes),
        }

    def model(self, seed: int) -> nn.Module:
        """The masked-language model's encoder, and a head drawn from the seed."""
        from asyncsgd import models

        source, tokenizer = self.known("model_source"), self.tokenizer()
        built = models.build_model(source, tokenizer, seq_len=self.seq_len, dropout=self.dropout, seed=seed)
        return self.head(built.model, seed).model

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write model and tokenizer; the transformers class `auto_class` reads them from there."""
        from asyncsgd import models

        models.save_pretrained(model, str(Path(self.known("folder")) / "tokenizer"), folder)

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        folder = Path(self.known("folder")) / "tokenizer"
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    def known(self, name: str) -> Any:
        """What `prepare` has found.

        Raises:
            ValueError: before `prepare`.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{name} is not known yet; call prepare(seed, cache) and go on with what it returns")
        return value
