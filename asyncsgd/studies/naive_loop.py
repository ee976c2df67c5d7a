"""The loop of a tutorial: plain PyTorch that imports no part of this library, to be read and copied. The speed ladder
begins with it; `asyncsgd.studies.naive` records it as a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def naive_loop(
    texts: Sequence[str],
    labels: Sequence[int] | None,
    tokenizer: Any,
    model: nn.Module,
    learning_rate: float,
    samples: int,
    seed: int,
    device: str,
    arrived: Callable[[int, float, float], None],
    batch_size: int = 16,
    seq_len: int = 256,
) -> None:
    """Train `model` in place, by the loop that the optimisation guide begins with.

    Args:
        labels: the class of each text; None: masked words are predicted.
        seed: that of torch's default generator, which draws the order of the texts, the dropout and the masks.
        arrived: called after every step with the samples so far, the mean loss of the batch, and the seconds so far.
    """
    encoded = tokenizer(list(texts), padding="max_length", truncation=True, max_length=seq_len, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    torch.manual_seed(seed)
    model.train()
    done = 0
    began = time.perf_counter()
    while done < samples:
        for rows in torch.randperm(len(texts)).split(batch_size):
            input_ids = encoded["input_ids"][rows]
            attention_mask = encoded["attention_mask"][rows]
            if labels is None:
                input_ids, targets = masked(input_ids, tokenizer)
            else:
                targets = torch.tensor(labels)[rows]
            outputs = model(
                input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), labels=targets.to(device)
            )
            optimizer.zero_grad()
            outputs.loss.backward()
            optimizer.step()
            loss = outputs.loss.item()
            done += len(rows)
            arrived(done, loss, time.perf_counter() - began)
            if done >= samples:
                break


def masked(input_ids: torch.Tensor, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose 15 % of the words: 80 % of them are masked, 10 % replaced by other words, and 10 % kept.

    Returns:
        The input, and the labels: -100 where nothing is predicted.
    """
    special = torch.isin(input_ids, torch.tensor(tokenizer.all_special_ids))
    is_drawn = torch.rand(input_ids.shape) < 0.15
    chosen = is_drawn & ~special
    labels = torch.where(chosen, input_ids, -100)
    draw = torch.rand(input_ids.shape)
    is_masked = chosen & (draw < 0.8)
    changed = torch.where(is_masked, tokenizer.mask_token_id, input_ids)
    other = torch.randint(len(tokenizer), input_ids.shape)
    is_replaced = chosen & (draw >= 0.9)
    return torch.where(is_replaced, other, changed), labels
