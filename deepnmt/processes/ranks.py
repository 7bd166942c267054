"""The rank of this process among those of a run, and communication between them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from deepnmt.errors import UserError, error_from_json

Result = TypeVar("Result")

_BACKGROUND_WAIT = timedelta(hours=6)  # that one process may wait for another in the background: disks may be slow


@dataclass(frozen=True)
class Ranks:
    """This process among `world` processes. With one process no call communicates.

    Attributes:
        rank, world: number of this process, from 0, and of all processes of the run.
        local_rank, local_world: the same on this machine.
        device: where this process computes.
        group: the process group that communicates; None: the default one.
        store: in which the processes have found each other, if there are several.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    store: dist.Store | None = None

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Ranks:
        """A run of one process."""
        return cls(0, 1, 0, 1, torch.device(device))

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    def background_group(self) -> Ranks:
        """The same processes on a separate gloo group, for a thread that works beside the main one. Collective."""
        group = None
        if self.world > 1:
            group = dist.new_group(backend="gloo", timeout=_BACKGROUND_WAIT)
        return replace(self, device=torch.device("cpu"), group=group)

    def send(self, tensor: torch.Tensor) -> None:
        """Sends a tensor to rank 0, which calls `receive`."""
        dist.send(tensor, 0, group=self.group)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Receives what `rank` sends into a tensor of the same size."""
        dist.recv(tensor, rank, group=self.group)

    def barrier(self) -> None:
        """Waits until every process has called this and its device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.sum([0.0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over all processes, in float64."""
        return self._combine(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maxima over all processes, in float64."""
        return self._combine(values, dist.ReduceOp.MAX)

    def _combine(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return list(values)
        combined = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(combined, operation, group=self.group)
        return combined.tolist()

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's `data`, on every rank. Nothing is pickled."""
        if self.world == 1:
            return data or b""
        size = torch.tensor([len(data or b"")], dtype=torch.int64, device=self.device)
        dist.broadcast(size, 0, group=self.group)
        buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        if self.first and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if size.item():
            dist.broadcast(buffer, 0, group=self.group)
        return buffer.cpu().numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes in rank order on rank 0, None elsewhere."""
        if self.world == 1:
            return [data]
        sizes = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes, group=self.group)
        buffer = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=self.device)
        if data:
            buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(buffer) for _ in range(self.world)]
        dist.all_gather(parts, buffer, group=self.group)
        if not self.first:
            return None
        return [part[: int(n)].cpu().numpy().tobytes() for part, n in zip(parts, sizes)]

    def raise_everywhere(self, check: Callable[[], Result]) -> Result:
        """Calls `check` on every rank and returns its result; a UserError on one rank is raised on all of them.

        Machines may see different files; the message says on which it was. Without this, ranks whose `check` passed
        would wait for the others for ever.
        Collective; `check` itself must not communicate.

        Raises:
            UserError: that of the lowest rank whose `check` raised one, of the same class and with the same `errno`.
        """
        if self.world == 1:
            return check()
        fault = b""
        try:
            result = check()
        except UserError as error:
            if self.local_world < self.world:
                error.args = (f"{error} (on {socket.gethostname()})",)
            fault = error.to_json().encode()
        if self.sum([float(len(fault))])[0]:
            faults = self.gather_bytes(fault) or []  # on rank 0
            first = next(filter(None, faults), None)
            raise error_from_json(self.broadcast_bytes(first))
        return result
