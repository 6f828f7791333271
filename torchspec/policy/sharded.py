"""Runs packed microbatches through a policy whose weights are sharded over the ranks that would else be replicas.

Has what ``WholePolicy`` (run.py) has. All ranks run equally many microbatches, each its own. Between runs every
parameter is a slice; inside one, the embedding, the final norm and the head are whole, and each layer while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchspec.policy.model import Policy
from torchspec.policy.run import WholePolicy
from torchspec.shard import shard_module

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torchspec.data.packing import PackedBatch


class ShardedPolicy(WholePolicy):
    """A policy of which this rank keeps a slice.

    Args:
        policy: built whole, the same on all ranks; it is sharded here, in place.
        mesh: one-dimensional, of the ranks that share it.
    """

    equal_count = True

    def __init__(self, policy: Policy, mesh: DeviceMesh) -> None:
        super().__init__(policy)
        shard_module(policy, mesh, policy.model.layers.values(), policy.compute_dtype)
        policy.set_reshard_after_backward(False, recurse=False)  # gathered once a run
        self._head: Tensor | None = None

    @property
    def teacher_head(self) -> Tensor:
        return self._head

    def share_head(self) -> None:
        """Gather the head for the draft, which reads it outside of a run too; in the compute dtype, as it is read."""
        self._head = self.policy.head_weight.detach().to(self.policy.compute_dtype).full_tensor()

    def run(self, batches: Sequence[PackedBatch], *args: Any, **options: Any) -> None:
        """See ``WholePolicy.run``. All ranks call, with equally many microbatches."""
        super().run(batches, *args, **options)
        # A forward without gradients leaves weights behind that the next optimizer step would not reach.
        self.policy.reset_iter_state()
