"""Masked language modelling with logits at the masked positions only.

    loss = -(1/M) sum_m log softmax(logits_m)[label_m],    m over the M masked tokens of the batch

The same number, and the same gradient, as with logits everywhere and label -100 at unmasked positions; but with 15
% of the tokens masked, the vocabulary matrix product and the softmax are about seven times smaller, and they
dominate small models.

How it works for any `AutoModelForMaskedLM`: its encoder is ``model.base_model`` and its head works token by token,
so a forward hook on the encoder hands the head only the hidden states of the masked positions, as one sequence of M
tokens.

Shapes: B sequences, L tokens, M masked tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncsgd.data.batching import Batch, EvaluationBatches, Frame, TrainingBatches
from asyncsgd.data.masking import Masking
from asyncsgd.data.tokenization import Tokens
from asyncsgd.models import skeleton
from asyncsgd.scores import perplexity
from asyncsgd.tasks.base import Batches, Sums, Task


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
        found = model.__dict__.get("_masked_positions")
        if found is None:
            found = model.__dict__["_masked_positions"] = cls(model)
        return found

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
    """Masked language modelling on tokens that lie on disk; see `asyncsgd.prepare` for how they get there."""

    name: ClassVar[str] = "masked_lm"
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"accuracy": "higher", "perplexity": "lower"}

    config: str
    """The model's configuration, as `asyncsgd.models.skeleton` reads it."""
    train: Path
    """Folder of the training tokens."""
    evaluation: Path
    """Folder of the evaluation tokens."""
    frame: Frame
    masking: Masking
    """Of the training batches."""
    eval_masking: Masking
    batch_size: int
    eval_samples: int

    def model(self, seed: int) -> nn.Module:
        return skeleton(self.config)

    def data(self, seed: int) -> MaskedTokens:
        return MaskedTokens(self, seed)

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
        self._task, self._seed = task, seed
        self._tokens = Tokens.load(task.train)
        self._streams: dict[int, TrainingBatches] = {}
        self.evaluation: Mapping[str, Batches] = {
            "main": EvaluationBatches(Tokens.load(task.evaluation), task.frame, task.eval_masking, task.eval_samples)
        }

    def batch(self, stream: int, index: int) -> Batch:
        if stream not in self._streams:
            task = self._task
            self._streams[stream] = TrainingBatches(
                self._tokens, task.frame, task.masking, task.batch_size, self._seed, stream
            )
        return self._streams[stream].batch(index)
