"""A causal language model that learns more from texts with a higher reward: a loss of one's own, in any mode.

    python experiments/reward_weighted.py --mode async --nproc 2
    python experiments/reward_weighted.py --mode sync --nproc 2 --model runs/causal_lm-async-w4-... --data answers.txt

Over the texts i of a batch, with rewards r_i >= 0 and T_i predicted tokens each,

    loss = -sum_i r_i log p(text_i) / sum_i r_i T_i

So a text of reward 2 counts as two texts, and one of reward 0 is not learned. The numerator is the weighted
log-likelihood of reward-weighted regression (Peters and Schaal, Reinforcement Learning by Reward-Weighted Regression
for Operational Space Control, ICML 2007). There the actions are drawn from the policy itself. Here the texts are given.
The denominator makes it a mean per token: with equal rewards it is the loss of `CausalLM`.

Change `reward`: e.g. ask a model, or look up what people said of a text. ``--help`` lists the settings."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.tokens import Samples
from asyncsgd.errors import UsageError
from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.task import TaskScript
from asyncsgd.tasks.base import Sums
from asyncsgd.tasks.causal_lm import CausalLM
from asyncsgd.tasks.text_batches import Batch, Draw
from asyncsgd.tasks.text_task import IGNORED, TextData


def reward(text: str) -> float:
    """How good a text is, 0 or more; a function of the text alone, so that every worker gives the same rewards."""
    return 1.0 if "return" in text else 0.1


@dataclasses.dataclass(frozen=True)
class RewardWeighted(CausalLM):
    """Causal language modelling in which every text counts as much as its reward. The fields are those of `CausalLM`.

    A text that is longer than a row is cut, and every piece has a reward of its own.
    """

    name: ClassVar[str] = "reward_weighted"
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"perplexity": "lower"}

    packs: ClassVar[bool] = False  # a row of several texts has no one reward

    def more_facts(self, corpus: Corpus, train: Samples, held_out: Samples, built: Any) -> Mapping[str, Any]:
        facts = super().more_facts(corpus, train, held_out, built)
        return {**facts, "notes": ["a row has one text, or one piece of it, and its reward"]}

    def collate(self, samples: Samples, numbers: np.ndarray, draw: Draw) -> Batch:
        """As `CausalLM`, and ``rewards``, float32 `(B,)`."""
        batch = super().collate(samples, numbers, draw)
        tokenizer = _tokenizer(self.known["tokenizer"])
        texts = tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
        batch["rewards"] = torch.tensor([reward(text) for text in texts])
        return batch

    def data(self, seed: int) -> Rewarded:
        return Rewarded(self, seed)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        # A part of a batch may have no text with a reward; its loss is 0, and so is its weight.
        smallest = torch.finfo(torch.float32).tiny
        weight = _token_rewards(batch).sum().clamp(min=smallest)
        return _weighted_sum(outputs, batch) / weight

    def weight(self, batch: Batch) -> float:
        """What `loss` divides by. Workers' gradients are averaged with it, so it is not the number of tokens."""
        return float(_token_rewards(batch).sum())

    def sums(self, outputs: Tensor, batch: Batch) -> Sums:
        return {"loss": _weighted_sum(outputs, batch).double()}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """The perplexity, where a token counts as much as its text's reward."""
        metrics = super().metrics({**sums, "correct": 0})
        return {"perplexity": metrics["perplexity"]}


def _weighted_sum(logits: Tensor, batch: Batch) -> Tensor:
    labels = batch["labels"]
    by_token = logits.float().flatten(0, 1)
    losses = functional.cross_entropy(by_token, labels.flatten(), ignore_index=IGNORED, reduction="none")
    weighted = losses.view_as(labels) * batch["rewards"][:, None]
    return weighted.sum()


def _token_rewards(batch: Batch) -> Tensor:
    """Float32 `(B, L)`, the reward of every predicted token's text, and 0 where nothing is predicted."""
    return batch["rewards"][:, None] * (batch["labels"] != IGNORED)


class Rewarded(TextData):
    """The batches of a `RewardWeighted`, all with something to learn."""

    def batch(self, stream: int, index: int) -> Batch:
        batch = super().batch(stream, index)
        if batch["rewards"].min() < 0 or _token_rewards(batch).sum() == 0:
            raise UsageError("a batch has a negative reward, or none above 0; change reward(), or raise --batch-size")
        return batch


@functools.cache
def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


if __name__ == "__main__":
    sys.exit(run_script(TaskScript(RewardWeighted, "reward_weighted").run, ends_with_process=True))
