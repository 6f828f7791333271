"""Sharded models (FSDP2): a rank of a mesh keeps a slice of each parameter, of its gradient and of its optimizer state.

Whole weights exist only where a module runs. A slice is a DTensor; gradients are SUMS over the mesh, made in the master
dtype while the backward runs, so that nothing is left to sum after it. Checkpoints and exports hold whole tensors: a
run may go on with another number of ranks, sharded or not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Said of the policy's output, one row of a batch of one. Nothing writes into it.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def shard_module(
    module: nn.Module, mesh: DeviceMesh, parts: Iterable[nn.Module] = (), parts_dtype: torch.dtype | None = None
) -> None:
    """Shard a module that was built whole, in place; optimizers are made after this.

    Args:
        module: the same on all ranks of ``mesh``. What lies outside of ``parts`` is gathered in the master dtype, and
            stays whole until the backward ends: a loss reads the head after the module's forward, and casts it there.
        mesh: one-dimensional.
        parts: modules in it that are gathered apart, each for the time that it runs.
        parts_dtype: of the gathered parts, and of their gradients before they are summed; None: the master dtype.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    master = next(module.parameters()).dtype

    def precision(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=master, cast_forward_inputs=False)

    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=precision(parts_dtype), reshard_after_forward=True)
    fully_shard(module, mesh=mesh, mp_policy=precision(None), reshard_after_forward=False)
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    # All ranks must reduce the same parameters, and one may have none of a loss (a teacher that is not finite).
    module.set_reduce_scatter_unused_params(True)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a slice (all ranks call), or a tensor that is whole as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def slice_for(value: Tensor, place: Tensor) -> Tensor:
    """What of the whole tensor ``value`` belongs into ``place``: all of it, or this rank's slice. Sends nothing."""
    if not isinstance(place, DTensor):
        return value
    value = value.to(place.device, place.dtype)
    return distribute_tensor(value, place.device_mesh, place.placements, src_data_rank=None)


def whole_state(state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """``state`` with whole tensors on the CPU for its slices; without them where not ``keep``. All ranks call."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            found[name] = whole_state(value, keep)
        elif isinstance(value, DTensor):
            tensor = value.full_tensor()  # one at a time
            if keep:
                found[name] = tensor.cpu()
        else:
            found[name] = value
    return found


def load_whole(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """``module.load_state_dict`` of whole tensors, where the module may be sharded."""
    own = module.state_dict()
    module.load_state_dict({name: slice_for(value, own.get(name, value)) for name, value in state.items()})
