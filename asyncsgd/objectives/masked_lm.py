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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncsgd.data.batching import Batch


@dataclasses.dataclass(frozen=True)
class Sums:
    """Loss and hits summed over masked tokens, so that shards add up exactly; means are taken once, at the end."""

    loss: float = 0.0
    """Sum of -log p(label) in nats."""
    correct: int = 0
    masked_tokens: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.loss + other.loss, self.correct + other.correct, self.masked_tokens + other.masked_tokens)


class MaskedLM:
    """The objective of a masked-language model.

    Args:
        model: an `AutoModelForMaskedLM`; a forward hook is put on its encoder, for as long as the model lives.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._positions: Tensor | None = None
        encoder = getattr(model, "base_model", None)
        if encoder is None or encoder is model:
            raise ValueError(f"{type(model).__name__} has no encoder of its own (base_model)")
        encoder.register_forward_hook(self._keep_masked)
        self._training_model = model

    def through(self, wrapper: nn.Module) -> None:
        """Send training passes through `wrapper`, a module around the same model (DistributedDataParallel)."""
        self._training_model = wrapper

    def logits(self, batch: Batch) -> Tensor:
        """Return the logits `(M, V)` at the masked positions."""
        self._positions = batch.masked_positions
        call = self._training_model if torch.is_grad_enabled() else self.model
        try:
            logits = call(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        finally:
            self._positions = None
        if logits.shape[:2] != (1, batch.num_masked):
            raise ValueError(
                f"the head of {type(self.model).__name__} does not work token by token: logits {tuple(logits.shape)}"
            )
        return logits[0]

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss per masked token, a scalar with its graph; its weight is ``batch.num_masked``."""
        return functional.cross_entropy(self.logits(batch), batch.labels)

    def sums(self, batch: Batch) -> Sums:
        """Return the batch's sums in evaluation mode: no dropout, no gradient, float64 sums over float32 losses."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                logits = self.logits(batch).float()
                losses = functional.cross_entropy(logits, batch.labels, reduction="none")
                correct = int((logits.argmax(-1) == batch.labels).sum())
                return Sums(float(losses.sum(dtype=torch.float64)), correct, batch.num_masked)
        finally:
            self.model.train(training)

    def _keep_masked(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self._positions is None:
            return output  # somebody uses the model directly
        hidden = output[0]
        masked = hidden.reshape(-1, hidden.shape[-1])[self._positions].unsqueeze(0)
        if isinstance(output, tuple):
            return (masked, *output[1:])
        output.last_hidden_state = masked
        return output
