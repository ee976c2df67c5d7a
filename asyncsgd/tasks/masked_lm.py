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
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.masks import STRATEGIES, Masking, OnlyCandidates, Sample, Strategy
from asyncsgd.data.tokens import Samples, pad, special_around
from asyncsgd.errors import UsageError
from asyncsgd.settings.flags import setting
from asyncsgd.tasks.base import Batches
from asyncsgd.tasks.language_model import LanguageModel
from asyncsgd.tasks.text_batches import Batch, Draw, EvaluationBatches
from asyncsgd.tasks.text_task import IGNORED, side_of

if TYPE_CHECKING:  # the fields are flags, and --help is not to wait for torch
    from torch import Tensor, nn

    from asyncsgd.tasks.models import Built


class MaskedPositions:
    """Hands a model's head only the hidden states of the positions that are set; none set: all, as usual.

    Args:
        model: an `AutoModelForMaskedLM`; a forward hook is put on its encoder, for as long as the model lives.
    """

    def __init__(self, model: Any) -> None:
        self.positions: Tensor | None = None
        model.base_model.register_forward_hook(self._keep_masked)

    @classmethod
    def of(cls, model: Any) -> MaskedPositions:
        """The one of this model, put there by the first call."""
        if not hasattr(model, "_masked_positions"):
            model._masked_positions = cls(model)
        return model._masked_positions

    def _keep_masked(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self.positions is not None:  # else somebody uses the model directly
            hidden = output.last_hidden_state
            output.last_hidden_state = hidden.reshape(-1, hidden.shape[-1])[self.positions].unsqueeze(0)
        return output


@dataclasses.dataclass(frozen=True)
class MaskedLM(LanguageModel):
    """Masked language modelling on a text, with any `AutoModelForMaskedLM`.

    Batches have ``labels``, the true ids at masked positions and -100 elsewhere. Evaluations have masks of their own,
    so runs that train with different masks take the same test. With `candidates` there is a second test, in which only
    candidates are masked.
    """

    name: ClassVar[str] = "masked_lm"
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"accuracy": "higher", "perplexity": "lower"}
    auto_class: ClassVar[str | None] = "AutoModelForMaskedLM"

    mask: Literal["token", "word", "candidates"] = setting(
        "token", "mask single tokens, whole words, or words with --candidates first"
    )
    mask_prob: float = setting(0.15, "share of the tokens to predict", above=0, below=1)
    eval_mask: Literal["token", "word"] = setting(
        "token", "as --mask, in evaluations; runs with different ones are not compared"
    )
    eval_mask_prob: float = setting(0.15, "as --mask-prob, in evaluations", above=0, below=1)
    candidates: str | None = setting(
        None, "folder of mask_candidates.py; evaluations are then made on candidates only, too", unset="none"
    )
    candidate_share: float = setting(
        1.0, "share of the masked tokens that comes from candidates; --mask candidates only", at_least=0, at_most=1
    )
    tech: bool = setting(False, "mask candidates only, and leave sequences without one out of training")

    def __post_init__(self) -> None:
        super().__post_init__()
        by_candidate = self.mask == "candidates" or self.tech
        if by_candidate and self.candidates is None:
            flag = "--tech" if self.tech else "--mask candidates"
            raise UsageError(f"{flag} needs a folder that mask_candidates.py has filled; add --candidates DIR")
        if self.tech and self.mask == "word":
            raise UsageError("--tech is a masking of its own, got --mask word; drop one of the two")
        if self.candidate_share != type(self).candidate_share and (self.tech or not by_candidate):
            masking = "--tech, whose share is 1" if self.tech else f"--mask {self.mask}"
            raise UsageError(f"--candidate-share is for --mask candidates, got {masking}; drop one of the two")

    def check_names(self) -> None:
        super().check_names()
        if self.candidates is not None:
            from asyncsgd.domain_masking.candidates import read_complete

            read_complete(self.candidates)

    def look(self, corpus: Corpus, tokenizer: Any, initial: Built) -> Mapping[str, Any]:
        known: dict[str, Any] = {
            "around": [len(part) for part in special_around(tokenizer)],
            "mask_id": tokenizer.mask_token_id,
            "vocabulary_size": len(tokenizer),
            "special_ids": sorted(tokenizer.all_special_ids),
        }
        if self.candidates is not None:
            from asyncsgd.domain_masking.candidates import read_complete

            known["candidates_sha256"] = read_complete(self.candidates)["sha256"][:16]
        return known

    def rows_depend_on(self) -> Sequence[object]:
        return self.blocks, self.known.get("candidates_sha256")

    def encode(self, corpus: Corpus, side: str, tokenizer: Any) -> Samples:
        if self.candidates is None or (side == "eval" and corpus.number):  # they are of the first set alone
            return self.rows(corpus, side, tokenizer)
        from asyncsgd.domain_masking.candidates import candidate_flags

        return self.rows(corpus, side, tokenizer, flags=candidate_flags(self.candidates, corpus, tokenizer, side))

    def samples(self, side: str) -> Samples:
        """The rows of a side; with `tech`, those for training have a candidate."""
        samples = super().samples(side)
        return samples.select(_with_candidates(samples)) if self.tech and side == "train" else samples

    def more_facts(self, corpus: Corpus, train: Samples, held_out: Samples, built: Built) -> Mapping[str, Any]:
        notes = list(corpus.notes)
        facts = dict(super().more_facts(corpus, train, held_out, built))
        if self.candidates is not None:
            has_some = int(_with_candidates(train).sum())
            if without := len(train) - has_some:
                kept = "are left out" if self.tech else "are masked as if there were no candidates"
                notes.append(f"{without} training sequences without a candidate {kept}")
            facts |= {"candidates_sha256": self.known["candidates_sha256"], "num_without_candidates": without}
            facts |= {"num_train_samples": has_some if self.tech else len(train)}
        if (new := built.new_parameters) and self.known["weights"] is not None:
            notes.append(
                f"{len(new)} tensors are not in the checkpoint, so they are drawn from the seed: {', '.join(new)}"
            )
        masking = f"{self.eval_mask}:{self.eval_mask_prob}"
        return {**facts, "eval_masking": masking, "notes": notes, "new_parameters": len(new)}

    def tests(self, number: int) -> Mapping[str, Batches]:
        held_out = self.samples(side_of(number))
        tests: list[tuple[str, Samples, Strategy]] = [("main", held_out, STRATEGIES[self.eval_mask]())]
        if "candidates" in held_out.values and (chosen := _with_candidates(held_out)).any():
            tests.append(("candidates", held_out.select(chosen), OnlyCandidates()))
        sets = {}
        for name, samples, strategy in tests:
            collate = functools.partial(self.masked, masking=self.masking(strategy, self.eval_mask_prob))
            sets[name] = EvaluationBatches(collate, samples, self.test_rows(samples))
        return sets

    @property
    def strategy(self) -> Strategy:
        """That of training."""
        if self.tech:
            return OnlyCandidates()
        kind = STRATEGIES[self.mask]
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    def masking(self, strategy: Strategy, share: float) -> Masking:
        """How rows are masked."""
        known = self.known
        return _masking(strategy, share, known["mask_id"], known["vocabulary_size"], tuple(known["special_ids"]))

    def collate(self, samples: Samples, numbers: np.ndarray, draw: Draw) -> Batch:
        return self.masked(samples, numbers, draw, self.masking(self.strategy, self.mask_prob))

    def masked(self, samples: Samples, numbers: np.ndarray, draw: Draw, masking: Masking) -> Batch:
        """The batch of some rows with these masks."""
        before, behind = self.known["around"]
        ids = []
        labels = []
        for place, number in enumerate(numbers):
            row = np.array(samples.row("ids", number))
            inside = slice(before, len(row) - behind)
            columns = [
                samples.row(name, number)[inside] for name in ("word_starts", "candidates") if name in samples.values
            ]
            masked, chosen = masking(Sample(row[inside], *columns), draw(place))
            label = np.full(len(row), IGNORED)
            label[before + chosen] = row[before + chosen]
            row[inside] = masked
            ids.append(row)
            labels.append(label)
        return {
            **self.padded(samples, numbers),
            "input_ids": pad(ids, self.known["pad_id"]),
            "labels": pad(labels, IGNORED),
        }

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits `(M, V)` at the masked positions."""
        hook = MaskedPositions.of(model)
        hook.positions = (batch["labels"].flatten() != IGNORED).nonzero().flatten()
        try:
            return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[0]
        finally:
            hook.positions = None

    def targets(self, batch: Batch) -> Tensor:
        labels: Tensor = batch["labels"]
        return labels[labels != IGNORED]


_masking = functools.lru_cache(maxsize=8)(Masking)  # it sorts a vocabulary when it is made


def _with_candidates(samples: Samples) -> np.ndarray:
    """Which rows have a candidate, bool `(S,)`."""
    total = np.concatenate([[0], np.cumsum(samples.values["candidates"])])
    return np.diff(total[samples.starts["candidates"]]) > 0
