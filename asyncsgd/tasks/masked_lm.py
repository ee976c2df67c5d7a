"""Masked language modelling with logits at the masked positions only.

    loss = -(1/M) sum_m log softmax(logits_m)[label_m],    m over the M masked tokens of the batch

The loss and the gradient are the same as with logits everywhere and label -100 at unmasked positions. But with 15 % of
the tokens masked, the vocabulary matrix product and the softmax are about seven times smaller, and they dominate small
models.

This works for any `AutoModelForMaskedLM`. Its encoder is ``model.base_model``, and its head works token by token. So a
forward hook on the encoder hands the head only the hidden states of the masked positions, as one sequence of M tokens.

Shapes: B sequences, L tokens, M masked tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncsgd import models
from asyncsgd.data.batching import Batch, EvaluationBatches, Frame, TrainingBatches, is_by_length
from asyncsgd.data.candidate_tokens import hash_of_candidates, tokens_with_candidates, with_candidates
from asyncsgd.data.candidates import read_complete
from asyncsgd.data.corpora import check_sources, load_corpus
from asyncsgd.data.masking import STRATEGIES, Masking, OnlyCandidates, Strategy
from asyncsgd.data.tokenization import Tokens, load_tokenizer, tokenized_folder
from asyncsgd.settings.flags import setting
from asyncsgd.settings.training import OF_TRANSFORMERS, Defaults, Sampling
from asyncsgd.tasks.base import Batches, Sums, Task, found, split_rows
from asyncsgd.tasks.scores import perplexity


class MaskedPositions:
    """Hands a model's head only the hidden states of the positions that are set; none set: all, as usual.

    Args:
        model: an `AutoModelForMaskedLM`; a forward hook is put on its encoder, for as long as the model lives.
    """

    def __init__(self, model: nn.Module) -> None:
        encoder = getattr(model, "base_model", None)
        if encoder is None or encoder is model:
            raise ValueError(f"{type(model).__name__} has no encoder of its own (base_model)")
        self.positions: Tensor | None = None
        encoder.register_forward_hook(self._keep_masked)

    @classmethod
    def of(cls, model: Any) -> MaskedPositions:
        """The one of this model, put there by the first call."""
        if not hasattr(model, "_masked_positions"):
            model._masked_positions = cls(model)
        return model._masked_positions

    def _keep_masked(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self.positions is None:
            return output  # somebody uses the model directly
        hidden = output[0]
        masked = hidden.reshape(-1, hidden.shape[-1])[self.positions].unsqueeze(0)
        if isinstance(output, tuple):
            return (masked, *output[1:])
        output.last_hidden_state = masked
        return output


@dataclasses.dataclass(frozen=True)
class MaskedLM(Task):
    """Masked language modelling on a text, with any `AutoModelForMaskedLM`.

    Evaluations have masks of their own, so runs that train with different masks take the same test. With `candidates`
    there is a second test, in which only candidates are masked.
    """

    name: ClassVar[str] = "masked_lm"
    defaults: ClassVar[Defaults] = OF_TRANSFORMERS
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"accuracy": "higher", "perplexity": "lower"}
    auto_class: ClassVar[str | None] = "AutoModelForMaskedLM"

    model_name: str = setting("tiny", "as --model of stilt_mlm.py", name="model")
    """As `asyncsgd.models.build_model` takes it."""
    data_name: str = setting("pydocs", "as --data of stilt_mlm.py", name="data")
    """As `asyncsgd.data.corpora.load_corpus` takes it, and the next two."""
    eval_data: str | None = None
    text_column: str = "text"
    seq_len: int = 128
    blocks: bool = False
    """See `asyncsgd.data.tokenization.tokenize`."""
    batch_size: int = 16
    sampling: Sampling = "group_by_length"
    """See `asyncsgd.data.batching.Order`."""
    mask: Literal["token", "word", "candidates"] = "token"
    mask_prob: float = 0.15
    eval_mask: Literal["token", "word"] = "token"
    eval_mask_prob: float = 0.15
    candidates: str | None = None
    """Folder that `asyncsgd.data.candidates.find_candidates` filled."""
    candidate_share: float = 1.0
    """See `asyncsgd.data.masking.ByCandidate`."""
    tech: bool = False
    """Mask candidates only, and leave out training sequences without one."""
    vocab_size: int = 8192
    """Of the tokenizer trained for a model that is new."""
    dropout: float = 0.0
    eval_samples: int = 500
    """Sequences in one evaluation; 0: all."""

    weights: str | None = found()
    """Folder of a pretrained model; None for one that is made here."""
    config: str | None = found()
    """The model's configuration, as JSON."""
    tokenizer: str | None = found()
    """Its folder or name."""
    tokens: str | None = found()
    """Folder of the token arrays, ``train`` and ``eval``."""
    prefix: tuple[int, ...] | None = found()
    suffix: tuple[int, ...] | None = found()
    pad_id: int | None = found()
    mask_id: int | None = found()
    vocabulary_size: int | None = found()
    special_ids: tuple[int, ...] | None = found()
    corpus: str | None = found()
    fingerprint: str | None = found()
    candidates_sha256: str | None = found()
    """Of what was found, by text."""
    num_without_candidates: int | None = found()
    """Training sequences; with `tech` they are left out."""
    num_train_samples: int | None = found()
    num_eval_samples: int | None = found()
    new_parameters: tuple[str, ...] | None = found()
    """See `asyncsgd.models.Built`."""

    def check_names(self) -> None:
        check_sources(self.data_name, self.eval_data)
        models.check_model(os.path.expanduser(self.model_name), self.seq_len)
        if self.candidates is not None:
            read_complete(Path(self.candidates).expanduser())

    def prepare(self, seed: int, cache: Path) -> Self:
        """Load the text, tokenize it, look at the model; everything slow is cached.

        Raises:
            UsageError: if the user must change something; the message says what.
        """
        name = os.path.expanduser(self.model_name)  # a YAML file has no shell to do it
        corpus = load_corpus(self.data_name, eval_data=self.eval_data, text_column=self.text_column, cache_dir=cache)
        tokenizer = load_tokenizer(name, corpus, vocab_size=self.vocab_size, cache_dir=cache)
        cut: dict[str, Any] = {"seq_len": self.seq_len, "cache_dir": cache, "blocks": self.blocks}
        folder = tokenized_folder(corpus, tokenizer, **cut)
        candidates: dict[str, Any] = {}
        if self.candidates is not None:
            plain = Tokens.load(folder / "train").num_samples
            folder = tokens_with_candidates(folder, self.candidates, corpus, tokenizer, drop=self.tech, **cut)
            has_some = with_candidates(Tokens.load(folder / "train"))
            candidates = {
                "candidates_sha256": hash_of_candidates(self.candidates),
                "num_without_candidates": plain - int(has_some.sum()),
            }
        initial = models.build_model(name, tokenizer, seq_len=self.seq_len, dropout=self.dropout, seed=seed)
        frame = models.frame_of(tokenizer)
        num_eval = Tokens.load(folder / "eval").num_samples
        return dataclasses.replace(
            self,
            weights=None if name in models.SHAPES else models.local_folder(name),
            config=models.config_json(initial.model),
            tokenizer=str(tokenizer.name_or_path),
            tokens=str(folder),
            prefix=frame.prefix,
            suffix=frame.suffix,
            pad_id=frame.pad_id,
            mask_id=tokenizer.mask_token_id,
            vocabulary_size=len(tokenizer),
            special_ids=tuple(sorted(tokenizer.all_special_ids)),
            corpus=corpus.name,
            fingerprint=corpus.fingerprint_of(self.blocks),
            num_train_samples=Tokens.load(folder / "train").num_samples,
            num_eval_samples=min(self.eval_samples or num_eval, num_eval),
            new_parameters=initial.new_parameters,
            **candidates,
        )

    def facts(self) -> Mapping[str, Any]:
        candidates = {name: getattr(self, name) for name in ("candidates_sha256", "num_without_candidates")}
        return {
            **(candidates if self.candidates is not None else {}),
            "data": self.corpus,
            "data_fingerprint": self.fingerprint,
            "base_model": None if self.weights is None else self.model_name,
            "num_train_samples": self.num_train_samples,
            "num_eval_samples": self.num_eval_samples,
            "new_parameters": len(self.new_parameters or ()),
        }

    def save(self, model: nn.Module, folder: Path) -> None:
        """`AutoModelForMaskedLM.from_pretrained(folder)` reads it."""
        models.save_pretrained(model, self.tokenizer, folder)

    def model(self, seed: int) -> nn.Module:
        return models.masked_lm(self.weights, str(self.config), self.dropout, seed)

    def data(self, seed: int) -> MaskedTokens:
        return MaskedTokens(self, seed)

    @property
    def frame(self) -> Frame:
        """What stands around each sample."""
        assert self.prefix is not None
        assert self.suffix is not None
        assert self.pad_id is not None
        return Frame(self.prefix, self.suffix, self.pad_id)

    @property
    def masking(self) -> Masking:
        """Of the training batches."""
        return self._masking(OnlyCandidates() if self.tech else self._strategy(self.mask), self.mask_prob)

    @property
    def eval_masking(self) -> Masking:
        return self._masking(self._strategy(self.eval_mask), self.eval_mask_prob)

    @property
    def candidate_masking(self) -> Masking:
        """Of the second evaluation, with `candidates`."""
        return self._masking(OnlyCandidates(), self.eval_mask_prob)

    def _strategy(self, name: str) -> Strategy:
        kind = STRATEGIES[name]
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    def _masking(self, strategy: Strategy, share: float) -> Masking:
        assert self.mask_id is not None
        assert self.vocabulary_size is not None
        assert self.special_ids is not None
        return Masking(strategy, share, self.mask_id, self.vocabulary_size, self.special_ids)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits `(M, V)` at the masked positions."""
        hook = MaskedPositions.of(model)
        hook.positions = batch.masked_positions
        try:
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        finally:
            hook.positions = None
        if logits.shape[:2] != (1, batch.num_masked):
            raise ValueError(
                f"the head of {type(model).__name__} does not work token by token: logits {tuple(logits.shape)}"
            )
        return logits[0]

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(outputs, batch.labels)

    def weight(self, batch: Batch) -> float:
        """Masked tokens."""
        return float(batch.num_masked)

    def count_tokens(self, batch: Batch) -> int:
        return int(batch.attention_mask.sum())

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Parts of whole samples, with the masked positions of their own."""
        rows = torch.arange(batch.num_samples)
        length = batch.input_ids.shape[1]
        split = []
        for input_ids, attention_mask, of_part in split_rows((batch.input_ids, batch.attention_mask, rows), parts):
            begin, end = int(of_part[0]) * length, (int(of_part[-1]) + 1) * length
            here = (batch.masked_positions >= begin) & (batch.masked_positions < end)
            split.append(Batch(input_ids, attention_mask, batch.masked_positions[here] - begin, batch.labels[here]))
        return split

    def sums(self, outputs: Tensor, batch: Batch) -> Sums:
        """The loss too, summed in float64 over float32 losses of tokens."""
        logits = outputs.float()
        losses = functional.cross_entropy(logits, batch.labels, reduction="none")
        correct = (logits.argmax(-1) == batch.labels).sum()
        return {"loss": losses.sum(dtype=torch.float64), "correct": correct}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """`accuracy` is the share of masked tokens predicted exactly."""
        return {
            "accuracy": sums["correct"] / sums["weight"],
            "perplexity": perplexity(sums["loss"] / sums["weight"]),
        }


class MaskedTokens:
    """The batches of a `MaskedLM` in one process."""

    def __init__(self, task: MaskedLM, seed: int) -> None:
        self._task, self._seed, self._by_length = task, seed, is_by_length(task.sampling)
        self._tokens = Tokens.load(Path(str(task.tokens)) / "train")
        self._streams: dict[int, TrainingBatches] = {}
        tokens = Tokens.load(Path(str(task.tokens)) / "eval")
        self.evaluation: dict[str, Batches] = {
            "main": EvaluationBatches(tokens, task.frame, task.eval_masking, task.eval_samples)
        }
        if tokens.candidates is not None and (chosen := with_candidates(tokens)).any():
            self.evaluation["candidates"] = EvaluationBatches(
                tokens.select(chosen), task.frame, task.candidate_masking, task.eval_samples
            )

    def batch(self, stream: int, index: int) -> Batch:
        if stream not in self._streams:
            task = self._task
            self._streams[stream] = TrainingBatches(
                self._tokens,
                task.frame,
                task.masking,
                task.batch_size,
                self._seed,
                stream,
                self._by_length,
            )
        return self._streams[stream].batch(index)
