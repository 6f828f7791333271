"""The ranks of a run: pipeline x data parallel x context parallel, one rank without torchrun.

Rank order is (pp, dp, cp): the cp ranks of one data-parallel rank are neighbours and hold shards of the same
microbatches. The ranks of one place in the pipeline are replicas: they hold the same parameters, whose gradients are
summed over them after an optimizer step's last microbatch; with parallelism.shard each holds a slice of them instead
(shard.py). Every rank knows every sample, so global counts follow without a message.

Every wait has a deadline (``parallelism.timeout_s``): the process group raises when a peer is late.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchspec.errors import ConfigError, RunError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torchspec.context_parallel.layout import PackedZigzag


def own_group(members: list[list[int]], timeout_s: float) -> dist.ProcessGroup:
    """A process group for every list of ranks; returns the caller's. All ranks call this, with the same lists.

    gloo takes the deadline of a wait from the group, when it is made; torch's own default is half an hour.
    """
    mine = None
    for ranks in members:
        group = dist.new_group(ranks, timeout=datetime.timedelta(seconds=timeout_s))
        if dist.get_rank() in ranks:
            mine = group
    return mine


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Exchange something with other ranks; where it fails, the sentence says ``what`` this rank waited to do.

    Raises RunError for the backend's own words: a rank has ended, or its deadline has passed.
    """
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RunError) or not (
            isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
        ):
            raise
        late = "imed out" in str(error) or "imeout" in str(error)
        cause = (
            "another rank did not come in time (parallelism.timeout_s, pipeline.deadline_s)"
            if late
            else "another rank has ended"
        )
        raise RunError(
            f"Rank {dist.get_rank()} waited {time.monotonic() - start:.1f} s to {what}: {cause}. The first error of "
            "the other ranks (error.log, error-rankN.log) tells why."
        ) from error


class _GatherRows(torch.autograd.Function):
    """Local rows -> the rows of the real pack, the same on every cp rank.

    What follows is computed alike on every rank of the group, so the gradient needs no sum: each takes its own rows'
    part.
    """

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, layout: PackedZigzag, group: Any) -> Tensor:
        ctx.layout = layout
        shards = [torch.empty_like(x_T) for _ in range(layout.cp_size)]
        with waiting("put the rows of a pack together"):
            dist.all_gather(shards, x_T.contiguous(), group=group)
        return layout.unshard(shards)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.shard(grad), None, None


class Ranks:
    """Who this process is, and what it does together with the others.

    Attributes:
        world, rank: of all processes.
        pp_size, pp_rank, dp_size, dp_rank, cp_size, cp_rank: of the three dimensions.
        num_replicas: dp_size * cp_size, ranks that hold the same parameters.
        cp_mesh: one-dimensional mesh of the cp ranks; None for cp_size 1.
        columns: the ranks of every pipeline, in its order; there are num_replicas of them.
        column_group: process group of this rank's pipeline; None for pp_size 1.
        replica_group: process group of the ranks at this place of the pipeline; None (all ranks) for pp_size 1.
    """

    def __init__(
        self,
        cp_size: int = 1,
        device: str = "cpu",
        timeout_s: float = 600.0,
        *,
        pp_size: int = 1,
        pp_timeout_s: float = 240.0,
    ) -> None:
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        if self.world % (cp_size * pp_size):
            raise ConfigError(
                f"parallelism.context_parallel_degree = {cp_size} times pipeline.ranks = {pp_size} must divide the "
                f"number of ranks, {self.world}; start them with torchrun --nproc-per-node."
            )
        self.cp_size, self.pp_size = cp_size, pp_size
        self.num_replicas = self.world // pp_size
        self.dp_size = self.num_replicas // cp_size
        self.pp_rank, place = divmod(self.rank, self.num_replicas)
        self.dp_rank, self.cp_rank = divmod(place, cp_size)
        self.columns = [list(range(start, self.world, self.num_replicas)) for start in range(self.num_replicas)]
        self.cp_mesh: DeviceMesh | None = None
        self.column_group = self.replica_group = None
        if self.world == 1:
            return
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if not dist.is_initialized():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=timeout_s)
            )
        if pp_size > 1:
            replicas = [
                list(range(start, start + self.num_replicas)) for start in range(0, self.world, self.num_replicas)
            ]
            self.replica_group = own_group(replicas, timeout_s)
            self.column_group = own_group(self.columns, pp_timeout_s)
        if cp_size > 1:
            from torch.distributed.device_mesh import DeviceMesh

            group = own_group(
                [list(range(start, start + cp_size)) for start in range(0, self.world, cp_size)], timeout_s
            )
            self.cp_mesh = DeviceMesh.from_group(group, device, mesh_dim_names=("cp",))

    def replica_mesh(self, device: str) -> DeviceMesh:
        """One-dimensional mesh of the replicas, which shard what they would else all hold. Without a pipeline only.

        Raises:
            ConfigError: there is but one rank.
        """
        from torch.distributed.device_mesh import DeviceMesh

        if self.world == 1:
            raise ConfigError("parallelism.shard = true needs several ranks to shard over; start them with torchrun.")
        return DeviceMesh.from_group(dist.group.WORLD, device, mesh_dim_names=("replicas",))

    @property
    def is_main(self) -> bool:
        """Rank 0 writes the logs, the checkpoints and the exports."""
        return self.rank == 0

    @property
    def writes_part(self) -> bool:
        """The first replica of each place of the pipeline writes what that place holds."""
        return self.rank == self.pp_rank * self.num_replicas

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order (pickled: for metrics and samples, not for weights)."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with waiting("agree with all ranks"):
            dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return any(self.gather(bool(flag)))

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank when any of them failed: the own error, or one that names who did."""
        errors = self.gather(None if error is None else (type(error).__name__, str(error)))
        if error is not None:
            raise error
        for rank, found in enumerate(errors):
            if found is not None:
                raise RunError(f"Rank {rank} failed ({found[0]}: {found[1]}); all ranks stop.")

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def sum_gradients(self, module: nn.Module) -> None:
        """Add every parameter's gradient over the replicas, as one message; a rank without one adds zeros.

        Those of sharded parameters were summed in the backward.
        """
        parameters = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        if self.num_replicas == 1 or not parameters:
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        with waiting("add up gradients"):
            dist.all_reduce(flat, group=self.replica_group)
        for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = piece.view_as(p)

    def sum(self, x: Tensor) -> Tensor:
        """Sum of a small tensor over the replicas."""
        if self.num_replicas > 1:
            x = x.clone()
            with waiting("add up counts"):
                dist.all_reduce(x, group=self.replica_group)
        return x

    def rows_of_pack(self, x_T: Tensor, layout: PackedZigzag) -> Tensor:
        """This rank's rows of a per-token tensor -> those of the whole pack, without padding; differentiable."""
        if self.cp_size == 1:
            return x_T
        return _GatherRows.apply(x_T, layout, self.cp_mesh.get_group())

    def sum_metrics(self, sums: dict[str, Tensor], replicas: int = 1) -> dict[str, Tensor]:
        """Sums over all ranks, key by key; ``replicas`` ranks each had the same share. A rank may have none."""
        if self.world == 1:
            return sums
        total: dict[str, Tensor] = {}
        for found in self.gather({name: value.cpu() for name, value in sums.items()}):
            for name, value in found.items():
                total[name] = total[name] + value / replicas if name in total else value / replicas
        return total

    def max_metrics(self, maxima: dict[str, Tensor]) -> dict[str, Tensor]:
        """Maxima over all ranks, key by key."""
        if self.world == 1:
            return maxima
        total: dict[str, Tensor] = {}
        for found in self.gather({name: value.cpu() for name, value in maxima.items()}):
            for name, value in found.items():
                total[name] = torch.maximum(total[name], value) if name in total else value
        return total

    def slowest(self, seconds: dict[str, float]) -> dict[str, float]:
        """The largest of every rank's seconds, by name."""
        found = self.gather(dict(seconds))
        return {name: max(each.get(name, 0.0) for each in found) for each in found for name in each}

    def merge(self, metrics: dict[str, float]) -> dict[str, float]:
        """Every rank's metrics in one; of a name that several have, the first rank's."""
        if self.pp_size == 1:
            return metrics  # replicas know the same
        return {name: value for found in reversed(self.gather(metrics)) for name, value in found.items()}

    def close(self) -> None:
        """Leave the process group."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()
