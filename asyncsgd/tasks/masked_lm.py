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

from asyncsgd.data.mask_names import CHOICES as MASKS
from asyncsgd.data.mask_names import NAMED, OWN, check_mask
from asyncsgd.errors import UsageError
from asyncsgd.settings.specs import setting
from asyncsgd.tasks.base import Batches, Directions
from asyncsgd.tasks.language_model import LanguageModel
from asyncsgd.tasks.text_task import IGNORED, side_of

if TYPE_CHECKING:  # the fields are flags, and --help is not to wait for torch, numpy and the reading of data
    from numpy import ndarray
    from torch import Tensor, nn

    from asyncsgd.data.corpora import Corpus
    from asyncsgd.data.masks import Masking, Strategy
    from asyncsgd.data.tokens import Samples
    from asyncsgd.tasks.models import Built
    from asyncsgd.tasks.text_batches import Batch, Draw, EvaluationBatches


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
        """The hook of this model, which the first call puts there."""
        if not hasattr(model, "_masked_positions"):
            model._masked_positions = cls(model)
        return model._masked_positions

    def _keep_masked(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self.positions is not None:  # else somebody uses the model directly
            hidden = output.last_hidden_state
            by_token = hidden.reshape(-1, hidden.shape[-1])
            output.last_hidden_state = by_token[self.positions].unsqueeze(0)
        return output


@dataclasses.dataclass(frozen=True)
class MaskedLM(LanguageModel):
    """Masked language modelling on a text, with any `AutoModelForMaskedLM`.

    Batches have ``labels``, the true ids at masked positions and -100 elsewhere. Evaluations have masks of their own,
    so runs that train with different masks take the same test. Candidates are tokens that a finder has marked as terms
    of the domain, see `asyncsgd.domain_masking`. With `candidates` there is a second test, in which only they are
    masked.
    """

    name: ClassVar[str] = "masked_lm"
    better: ClassVar[Directions] = {"accuracy": "higher", "perplexity": "lower"}
    auto_class: ClassVar[str | None] = "AutoModelForMaskedLM"

    mask: str = setting("token", "mask single tokens, whole words, or first the words of --candidates", named=MASKS)
    mask_prob: float = setting(0.15, "share of the tokens to predict", above=0, below=1)
    eval_mask: Literal["token", "word"] = setting(
        "token", "as --mask, in evaluations; runs with different ones are not compared"
    )
    eval_mask_prob: float = setting(0.15, "as --mask-prob, in evaluations", above=0, below=1)
    candidates: str | None = setting(
        None,
        "folder of candidates, which also get an evaluation of their own; experiments/mask_candidates.py of the "
        "repository fills it",
        unset="none",
    )
    candidate_share: float = setting(
        1.0, "share of the masked tokens that comes from candidates; --mask candidates only", at_least=0, at_most=1
    )
    tech: bool = setting(
        False, "mask candidates (technical terms) only, and leave sequences without one out of training"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mask(self.mask)
        by_candidate = self.mask == "candidates" or self.tech
        if by_candidate and self.candidates is None:
            flag = "--tech" if self.tech else "--mask candidates"
            raise UsageError(f"{flag} needs a folder that experiments/mask_candidates.py fills; add --candidates DIR")
        if self.tech and self.mask not in ("token", "candidates"):
            raise UsageError(f"--tech is a masking of its own, got --mask {self.mask}; drop one of the two")
        if self.candidate_share != type(self).candidate_share and (self.tech or not by_candidate):
            masking = "--tech, whose share is 1" if self.tech else f"--mask {self.mask}"
            raise UsageError(f"--candidate-share is for --mask candidates, got {masking}; drop one of the two")
        if self.candidates is not None:
            from asyncsgd.data.evaluation_sets import named_places

            if "candidates" in named_places(self.eval_data):
                raise UsageError(
                    "the evaluation of --candidates is called candidates, so no other set can be; name the set: "
                    "--eval-data NAME=PATH"
                )

    def check_names(self) -> None:
        super().check_names()
        if self.candidates is not None:
            from asyncsgd.domain_masking.candidates import read_complete

            read_complete(self.candidates)

    def look(self, corpus: Corpus, tokenizer: Any, initial: Built) -> Mapping[str, Any]:
        from asyncsgd.data.tokens import special_around

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
        if self.candidates is None or (side == "eval" and corpus.number):  # only the first set has candidates
            return self.rows(corpus, side, tokenizer)
        from asyncsgd.domain_masking.candidates import candidate_flags

        flags = candidate_flags(self.candidates, corpus, tokenizer, side)
        return self.rows(corpus, side, tokenizer, flags=flags)

    def samples(self, side: str) -> Samples:
        """The rows of a side; with `tech`, those for training have a candidate."""
        samples = super().samples(side)
        if self.tech and side == "train":
            return samples.select(_with_candidates(samples))
        return samples

    def more_facts(self, corpus: Corpus, train: Samples, held_out: Samples, built: Built) -> Mapping[str, Any]:
        notes = list(corpus.notes)
        facts = dict(super().more_facts(corpus, train, held_out, built))
        if self.candidates is not None:
            num_with = int(_with_candidates(train).sum())
            num_without = len(train) - num_with
            # The masks by token and by word know no candidates, which then only get an evaluation of their own.
            if num_without and (self.tech or self.mask not in ("token", "word")):
                treatment = "are left out" if self.tech else "are masked as if there were no candidates"
                notes.append(f"{num_without} training sequences without a candidate {treatment}")
            facts["candidates_sha256"] = self.known["candidates_sha256"]
            facts["num_without_candidates"] = num_without
            facts["num_train_samples"] = num_with if self.tech else len(train)
        new = built.new_parameters
        if new and self.known["weights"] is not None:
            notes.append(
                f"{len(new)} tensors are not in the checkpoint, so they are drawn from the seed: {', '.join(new)}"
            )
        facts["eval_masking"] = f"{self.eval_mask}:{self.eval_mask_prob}"
        facts["notes"] = notes
        facts["new_parameters"] = len(new)
        return facts

    def tests(self, number: int) -> Mapping[str, Batches]:
        from asyncsgd.data.masks import OnlyCandidates

        held_out = self.samples(side_of(number))
        strategy: Strategy = NAMED[self.eval_mask]()
        tests = {"main": self._masked_batches(held_out, strategy)}
        if "candidates" in held_out.values:
            chosen = _with_candidates(held_out)
            if chosen.any():
                tests["candidates"] = self._masked_batches(held_out.select(chosen), OnlyCandidates())
        return tests

    def _masked_batches(self, samples: Samples, strategy: Strategy) -> EvaluationBatches:
        """The batches of an evaluation with the masks of a strategy."""
        from asyncsgd.tasks.text_batches import EvaluationBatches

        masking = self.masking(strategy, self.eval_mask_prob)
        collate = functools.partial(self.masked, masking=masking)
        return EvaluationBatches(collate, samples, self.test_rows(samples))

    @property
    def strategy(self) -> Strategy:
        """How the tokens to predict are chosen in training."""
        if self.tech:
            from asyncsgd.data.masks import OnlyCandidates

            return OnlyCandidates()
        if self.mask not in OWN:
            return MASKS.read(self.mask)
        # The library's own masks take their parameters from the settings that have the same names.
        strategy = NAMED[self.mask]
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(strategy)}
        return strategy(**settings)

    def masking(self, strategy: Strategy, share: float) -> Masking:
        """How rows are masked."""
        known = self.known
        special_ids = tuple(known["special_ids"])
        return _masking(strategy, share, known["mask_id"], known["vocabulary_size"], special_ids)

    def collate(self, samples: Samples, numbers: ndarray, draw: Draw) -> Batch:
        masking = self.masking(self.strategy, self.mask_prob)
        return self.masked(samples, numbers, draw, masking)

    def masked(self, samples: Samples, numbers: ndarray, draw: Draw, masking: Masking) -> Batch:
        """The batch of some rows with these masks."""
        import numpy as np

        from asyncsgd.data.masks import Sample
        from asyncsgd.data.tokens import pad

        before, behind = self.known["around"]
        rows = []
        labels = []
        for line, number in enumerate(numbers):
            row = np.array(samples.row("ids", number))
            inside = slice(before, len(row) - behind)
            columns = [row[inside]]  # in the order of the fields of `Sample`, of which candidates are the last one
            for name in ("word_starts", "candidates"):
                if name in samples.values:
                    columns.append(samples.row(name, number)[inside])
            masked, chosen = masking(Sample(*columns), draw(line))
            positions = before + chosen
            row_labels = np.full(len(row), IGNORED)
            row_labels[positions] = row[positions]
            row[inside] = masked
            rows.append(row)
            labels.append(row_labels)
        batch = self.padded(samples, numbers)
        batch["input_ids"] = pad(rows, self.known["pad_id"])
        batch["labels"] = pad(labels, IGNORED)
        return batch

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits `(M, V)` at the masked positions."""
        hook = MaskedPositions.of(model)
        is_masked = batch["labels"].flatten() != IGNORED
        hook.positions = is_masked.nonzero().flatten()
        try:
            return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[0]
        finally:
            hook.positions = None

    def targets(self, batch: Batch) -> Tensor:
        labels: Tensor = batch["labels"]
        return labels[labels != IGNORED]


@functools.lru_cache(maxsize=8)
def _masking(
    strategy: Strategy, share: float, mask_id: int, vocabulary_size: int, special_ids: tuple[int, ...]
) -> Masking:
    """A `Masking`, made once, since it sorts a vocabulary."""
    from asyncsgd.data.masks import Masking

    return Masking(strategy, share, mask_id, vocabulary_size, special_ids)


def _with_candidates(samples: Samples) -> ndarray:
    """Which rows have a candidate, bool `(S,)`."""
    import numpy as np

    totals = np.cumsum(samples.values["candidates"])
    num_before = np.concatenate([[0], totals])
    starts = samples.starts["candidates"]
    return np.diff(num_before[starts]) > 0
