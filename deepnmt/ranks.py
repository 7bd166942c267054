"""This process among the others of a run, and how they talk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from deepnmt.errors import UserError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process among `world` processes. With one process every call answers at once."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Ranks:
        """The one process there is."""
        return cls(0, 1, 0, 1, torch.device(device))

    @property
    def first(self) -> bool:
        """Whether this is the process that talks and writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Returns when every process has come here and its device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.sum([0.0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over all processes, in float64."""
        return self._combine(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Element-wise maxima over all processes, in float64."""
        return self._combine(values, dist.ReduceOp.MAX)

    def _combine(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return list(values)
        combined = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(combined, how)
        return combined.tolist()

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank. No object is pickled."""
        if self.world == 1:
            return data or b""
        size = torch.tensor([len(data or b"")], dtype=torch.int64, device=self.device)
        dist.broadcast(size, 0)
        buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        if self.first and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if size.item():
            dist.broadcast(buffer, 0)
        return buffer.cpu().numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes in rank order on rank 0, None elsewhere."""
        if self.world == 1:
            return [data]
        sizes = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes)
        buffer = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=self.device)
        if data:
            buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(buffer) for _ in range(self.world)]
        dist.all_gather(parts, buffer)
        if not self.first:
            return None
        return [part[: int(n)].cpu().numpy().tobytes() for part, n in zip(parts, sizes)]

    def together(self, act: Callable[[], Result]) -> Result:
        """What `act`, which talks to no other process, returns here. Collective.

        Raises:
            UserError: on every rank, where `act` raises one on any: machines may differ in the files that they see, and
                those that saw no fault would wait for the others. It is that of the first such rank.
        """
        if self.world == 1:
            return act()
        fault = b""
        try:
            result = act()
        except UserError as error:
            fault = str(error).encode() or b"?"
        if self.sum([float(len(fault))])[0]:
            faults = self.gather_bytes(fault)
            raise UserError(self.broadcast_bytes(next(filter(None, faults)) if faults else None).decode())
        return result
