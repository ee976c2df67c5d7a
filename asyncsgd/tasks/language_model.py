"""What masked and causal language modelling share."""
# ruff: noqa: RUF009 - the calls in the dataclass's defaults are `setting`, which returns dataclasses.field

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from asyncsgd.errors import UsageError
from asyncsgd.settings.groups import (
    BLOCKS,
    ENCODING,
    EVAL_DATA,
    FIRST,
    NEWEST,
    QUOTING,
    QUOTING_UNSET,
    SAMPLE_ORDER,
    SAMPLING,
    SPLIT,
    EvalData,
    Quoting,
    Sampling,
    Units,
)
from asyncsgd.settings.specs import setting
from asyncsgd.tasks.base import Sums, found
from asyncsgd.tasks.text_task import VOCABULARY, TextTask

if TYPE_CHECKING:  # fields are flags, and --help is not to wait for torch, numpy and the reading of data
    import numpy as np
    from torch import Tensor

    from asyncsgd.data.corpora import Corpus
    from asyncsgd.data.tokens import Samples
    from asyncsgd.tasks.models import Built
    from asyncsgd.tasks.text_batches import Batch


@dataclasses.dataclass(frozen=True)
class LanguageModel(TextTask):
    """What masked and causal language modelling share: plain texts, and evaluations of some rows."""

    column_fields: ClassVar[tuple[str, ...]] = ("text_column",)

    model_name: str = setting(
        "tiny",
        "tiny, small or tiny-distilbert (new, no network), a run, a folder or a name on the Hub",
        name="model",
        run=True,
    )
    data_name: str = setting(
        "pydocs",
        "pydocs (built in, no network), a file, a folder or hub:NAME; A+B joins two",
        name="data",
        aliases=("train_file",),
    )
    eval_data: EvalData | None = setting(
        None, EVAL_DATA, unset="held out from --data", aliases=("val_file",), repeats=True
    )
    eval_split: str | None = setting(None, SPLIT, unset="validation, or some that are held out", name="split")
    text_column: str = setting("text", "column of the data that holds the text")
    encoding: str = setting("utf-8", ENCODING)
    quoting: Quoting | None = setting(None, QUOTING, unset=QUOTING_UNSET)
    documents: Units | None = setting(
        None, "what a document of a .txt file is", unset="a line, or a paragraph where a line is blank"
    )
    seq_len: int = setting(128, "tokens per row", at_least=8)
    blocks: bool = setting(False, BLOCKS)
    batch_size: int = setting(16, "rows in one gradient, per worker", at_least=1)
    sampling: Sampling = setting("group_by_length", SAMPLING)
    sample_order: int = setting(NEWEST, SAMPLE_ORDER, at_least=FIRST, at_most=NEWEST)
    eval_samples: int = setting(500, "rows in one evaluation; 0: all", at_least=0)
    vocab_size: int = setting(VOCABULARY, "of the tokenizer trained for a model that is new", at_least=1)
    dropout: float = setting(0.0, "of all dropout layers", at_least=0, below=1)

    prepared: str | None = found()

    def read(self, cache: Path) -> Corpus:
        from asyncsgd.data.corpora import load_corpus

        corpus = load_corpus(
            self.data_name,
            self.columns,
            eval_data=self.eval_data,
            split=self.eval_split,
            cache_dir=cache,
            reading=self.reading,
        )
        # So that evaluations with and without --blocks, which are different tests, are not compared.
        return dataclasses.replace(corpus, fingerprint=corpus.fingerprint_of(self.blocks))

    def rows(self, corpus: Corpus, side: str, tokenizer: Any, **options: Any) -> Samples:
        """The rows of a side, as `asyncsgd.data.tokens.rows_of` makes them with these further arguments.

        Raises:
            UsageError: if there is none.
        """
        from asyncsgd.data.tokens import MIN_SAMPLE_IDS, rows_of

        documents = corpus.eval
        flag = "--eval-data"
        if side == "train":
            documents = corpus.train
            flag = "--data"
        samples = rows_of(documents.texts, tokenizer, seq_len=self.seq_len, blocks=self.blocks, **options)
        if not len(samples):
            raise UsageError(
                f"no {side} document of {corpus.name} has {MIN_SAMPLE_IDS} tokens (a word of more than 100 "
                f"characters is one); give other texts with {flag} FILE"
            )
        return samples

    def test_rows(self, held_out: Samples) -> list[np.ndarray]:
        from asyncsgd.tasks.text_batches import by_length

        return by_length(held_out, self.eval_batch_size, self.eval_samples)

    def more_facts(self, corpus: Corpus, train: Samples, held_out: Samples, built: Built) -> Mapping[str, Any]:
        from asyncsgd.data.documents import evenly

        evaluated = evenly(len(held_out), self.eval_samples)
        return {"num_eval_samples": len(evaluated)}

    def sums(self, outputs: Tensor, batch: Batch) -> Sums:
        logits = outputs.float().flatten(0, -2)
        is_right = logits.argmax(-1) == self.targets(batch)
        return {"loss": self.summed_loss(outputs, batch), "correct": is_right.sum()}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """`accuracy` is the share of the tokens that are predicted exactly."""
        from asyncsgd.tasks import scores

        loss = sums["loss"] / sums["weight"]
        right = sums["correct"] / sums["weight"]
        metrics = {"perplexity": scores.perplexity(loss), "accuracy": right}
        return {name: metrics[name] for name in self.better}
