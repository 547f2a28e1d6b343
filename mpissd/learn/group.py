"""The processes that train one draft together, one a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

WAIT_S = 300  # for the slowest process, whose first steps may still compile


@dataclass(frozen=True)
class Group:
    """One of `size` processes; alone, nothing is sent."""

    rank: int = 0
    size: int = 1

    def add(self, tensor: Any) -> Any:
        """Sums a tensor over the processes in place and returns it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, value: float, device: Any) -> float:
        """Returns the largest of the processes' values."""
        if self.size == 1:
            return value
        told = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return float(told)

    def close(self) -> None:
        """Leaves the group."""
        if self.size > 1:
            dist.destroy_process_group()


def join(rank: int, size: int, place: str, gpu: bool, busy_s: float) -> Group:
    """Joins the processes that meet at the file `place`, over NCCL or, without a GPU, Gloo.

    busy_s: how long one of them may do something alone, while the others wait for it.
    """
    if size > 1:
        if gpu:
            torch.cuda.set_device(rank)
        where = {"init_method": f"file://{place}", "rank": rank, "world_size": size}
        wait = timedelta(seconds=WAIT_S + min(busy_s, 86400.0))
        dist.init_process_group("nccl" if gpu else "gloo", timeout=wait, **where)
    return Group(rank, size)
