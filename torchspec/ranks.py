"""The ranks of a run: data parallel x context parallel, one rank without torchrun.

Rank order is (dp, cp): the cp ranks of one data-parallel rank are neighbours and hold shards of the same microbatches. Both
models are replicated; gradients are summed over all ranks after an optimizer step's last microbatch. Every rank knows every
sample, so global counts follow without a message.

Every wait has a deadline (``parallelism.timeout_s``): the process group raises when a peer is late.
"""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchspec.errors import ConfigError, RunError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torchspec.context_parallel.layout import PackedZigzag


class _GatherRows(torch.autograd.Function):
    """Local rows -> the rows of the real pack, the same on every cp rank.

    What follows is computed alike on every rank of the group, so the gradient needs no sum: each takes its own rows' part.
    """

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, layout: PackedZigzag, group: Any) -> Tensor:
        ctx.layout = layout
        shards = [torch.empty_like(x_T) for _ in range(layout.cp_size)]
        dist.all_gather(shards, x_T.contiguous(), group=group)
        return layout.unshard(shards)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.shard(grad), None, None


class Ranks:
    """Who this process is, and what it does together with the others.

    Attributes:
        world, rank: of all processes.
        dp_size, dp_rank, cp_size, cp_rank: of the two dimensions.
        cp_mesh: one-dimensional mesh of the cp ranks; None for cp_size 1.
    """

    def __init__(self, cp_size: int = 1, device: str = "cpu", timeout_s: float = 600.0) -> None:
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        if self.world % cp_size:
            raise ConfigError(
                f"parallelism.context_parallel_degree = {cp_size} must divide the number of ranks, {self.world}; "
                "start them with torchrun --nproc-per-node."
            )
        self.cp_size, self.dp_size = cp_size, self.world // cp_size
        self.dp_rank, self.cp_rank = divmod(self.rank, cp_size)
        self.cp_mesh: DeviceMesh | None = None
        if self.world == 1:
            return
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if not dist.is_initialized():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=timeout_s)
            )
        if cp_size > 1:
            from torch.distributed.device_mesh import init_device_mesh

            self.cp_mesh = init_device_mesh(device, (self.dp_size, cp_size), mesh_dim_names=("dp", "cp"))["cp"]

    @property
    def is_main(self) -> bool:
        """Rank 0 writes the logs, the checkpoints and the exports."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order (pickled: for metrics and samples, not for weights)."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
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
        """Add every parameter's gradient over all ranks, as one message; a rank without one adds zeros."""
        if self.world == 1:
            return
        parameters = [p for p in module.parameters() if p.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        dist.all_reduce(flat)
        for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = piece.view_as(p)

    def sum(self, x: Tensor) -> Tensor:
        """Sum of a small tensor over all ranks."""
        if self.world > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def rows_of_pack(self, x_T: Tensor, layout: PackedZigzag) -> Tensor:
        """This rank's rows of a per-token tensor -> those of the whole pack, without padding; differentiable."""
        if self.cp_size == 1:
            return x_T
        return _GatherRows.apply(x_T, layout, self.cp_mesh.get_group())

    def all_finite(self, x: Tensor) -> bool:
        """Whether ``x`` is finite on every cp rank of this group."""
        finite = torch.isfinite(x).all().to(torch.int32)
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=self.cp_mesh.get_group())
        return bool(finite)

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

    def close(self) -> None:
        """Leave the process group."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()
