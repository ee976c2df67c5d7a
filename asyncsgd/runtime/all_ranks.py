"""All ranks of a run together: rows of numbers and bytes from each of them, over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from asyncsgd.runtime.launch import TIMEOUT


class AllRanks:
    """All ranks of the initialised process group. Every rank constructs it, and calls its methods in the same order."""

    def __init__(self) -> None:
        self.rank, self.number = dist.get_rank(), dist.get_world_size()
        self._gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def told(self, *numbers: int) -> tuple[int, ...]:
        """Rank 0's numbers, on every rank."""
        row = torch.tensor(numbers)
        dist.broadcast(row, 0, group=self._gloo)
        return tuple(row.tolist())

    def gather(self, row: Tensor) -> Tensor:
        """Every rank's row, `(N, len(row))`, on every rank; `row` lies on the CPU."""
        rows = [torch.empty_like(row) for _ in range(self.number)]
        dist.all_gather(rows, row, group=self._gloo)
        return torch.stack(rows)

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Every rank's bytes on every rank. Nothing that comes over a network is unpickled."""
        encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([len(encoded)], dtype=torch.int64))[:, 0].tolist()
        row = torch.zeros(max(lengths), dtype=torch.uint8)
        row[: len(encoded)] = encoded
        rows = self.gather(row)
        return [rows[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text on every rank."""
        return [content.decode() for content in self.gather_bytes(text.encode())]
