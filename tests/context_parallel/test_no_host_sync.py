"""Nothing in a pass on CUDA waits for the GPU, shown without one: the CUDA path run on tensors without data.

A ``meta`` tensor has a shape and no values: ``.item()``, ``.tolist()``, ``if tensor``, ``nonzero``, a boolean
index or a copy to the host cannot be answered and raise, which is just what would wait on a GPU.  So the CUDA
kernel is made the kernel of ``meta`` tensors, and layers, unrolls and their backwards run through the real
autograd, DTensor handlers and functional collectives (of a fake process group), down to the flash ops'
own shape functions.  Beyond that, ``Device`` refuses copies between host and device, and counts what it
launches: the counts are the same for one document and for many.

What this cannot show: that the flash ops themselves, NCCL and the allocator do not wait.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchspec.attention import branch_attention, cuda, kernels
from torchspec.context_parallel import dispatch
from torchspec.context_parallel.layout import PackedZigzag
from torchspec.context_parallel.trunk import Trunk, packed_attention
from torchspec.draft.config import DraftConfig
from torchspec.draft.eagle3 import Eagle3Draft
from torchspec.policy.config import PolicyConfig
from torchspec.policy.titan import build_policy

HEADS, GROUPS, DIM, PASSES = 8, 2, 16, 3
ONE, MANY = [128], [16, 8, 40, 1, 7, 3, 31]  # both 128 rows with the padding of C = 4


class HostWait(AssertionError):
    """The host would have waited for the device."""


class Device(TorchDispatchMode):
    """Runs torchspec's ops open, so that what they launch is seen; refuses what makes the host wait.

    ``launched`` counts the ops on ``meta`` tensors by name, views left out.  What the host computes on its own
    tensors (the plan of a shift, made once for a packing) is its own business.
    """

    def __init__(self):
        super().__init__()
        self.launched = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor takes the op apart: its parts come back here
        name = func._schema.name
        if name in OPDEFS:
            with self:
                return OPDEFS[name]._init_fn(*args, **kwargs)
        if func.namespace == "aten":
            with self:  # what consists of other ops comes back here as those
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if any(x.is_meta for x in inputs):
                raise HostWait(f"{name} cannot be answered without the device's data: {error}") from error
            raise
        tensors = [*inputs, *(x for x in tree_leaves(result) if isinstance(x, torch.Tensor))]
        if any(x.is_meta for x in tensors):
            self.launched[name] += not func.is_view
            self._check(name, tensors, args, kwargs)
        return result

    @staticmethod
    def _check(name: str, tensors: list[torch.Tensor], args: tuple, kwargs: dict) -> None:
        indices = tree_leaves(args[1]) if name in ("aten::index", "aten::index_put", "aten::index_put_") else []
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in indices):
            raise HostWait(f"{name} counts the true elements of a mask.")
        # a tensor without dimensions is a number that travels with the launch; a shift's plan does not wait
        if not kwargs.get("non_blocking") and {x.is_meta for x in tensors if x.dim()} == {True, False}:
            raise HostWait(f"{name} mixes tensors of the host and of the device, or copies from one to the other.")


@pytest.fixture
def cuda_path(monkeypatch):
    """``meta`` tensors get the CUDA kernel."""
    monkeypatch.setitem(kernels._KERNELS, "meta", cuda)


@pytest.fixture
def layout_of(cuda_path):
    """A function (lengths, size, rank, transport) -> layout on ``meta``, over a fake process group."""

    def make(lengths: list[int], size: int, rank: int = 0, trunk_transport: str = "gather") -> PackedZigzag:
        if dist.is_initialized():
            dist.destroy_process_group()
        mesh = None
        if size > 1:
            dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
            mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        return PackedZigzag(lengths, cp_mesh=mesh, trunk_transport=trunk_transport, device="meta")

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def leaf(rows: int, heads: int) -> torch.Tensor:
    return torch.empty(rows, heads, DIM, device="meta", dtype=torch.bfloat16, requires_grad=True)


def draft_passes(layout: PackedZigzag, window: int = 0) -> None:
    """K passes, forward and backward; pass k's query depends on pass k-1's output."""
    trunk, previous, loss = Trunk(layout, window=window), 0.0, 0.0
    for index in range(PASSES):
        q, k, v = (leaf(layout.num_tokens, h) for h in (HEADS, GROUPS, GROUPS))
        previous = trunk.attend(q + previous, k, v)
        loss = loss + layout.shift(previous, 1 + index).float().sum()
    loss.backward()
    assert k.grad is not None


def policy_layer(layout: PackedZigzag, window: int = 0) -> None:
    q, k, v = (leaf(layout.num_tokens, h) for h in (HEADS, GROUPS, GROUPS))
    packed_attention(q, k, v, layout, window=window).float().sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None


def launched(function, layout: PackedZigzag, window: int = 0) -> Counter:
    function(layout, window)  # DTensor plans an op at its first call; so does a shift
    with Device() as device:
        function(layout, window)
    return device.launched


PLACES = [(1, 0), (2, 0), (2, 1), (4, 0), (4, 2), (4, 3)]


@pytest.mark.parametrize("function", [draft_passes, policy_layer])
@pytest.mark.parametrize("trunk_transport", ["gather", "ring"])
@pytest.mark.parametrize("size, rank", PLACES)
def test_the_host_never_waits_and_documents_cost_no_launch(layout_of, function, trunk_transport, size, rank):
    one, many = (launched(function, layout_of(x, size, rank, trunk_transport)) for x in (ONE, MANY))
    assert one == many
    calls = (PASSES if function is draft_passes else 1) * {"gather": min(size, 2), "ring": size}[trunk_transport]
    assert one["aten::_flash_attention_forward"] == one["aten::_flash_attention_backward"] == calls


@pytest.mark.parametrize("function", [draft_passes, policy_layer])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sliding_window_in_gather(layout_of, function, size):
    one, many = (launched(function, layout_of(x, size), 5) for x in (ONE, MANY))
    assert one == many and one["aten::_flash_attention_forward"]


@pytest.mark.parametrize("size, trunk_transport", [(1, "gather"), (2, "gather"), (2, "ring")])
def test_the_gradient_of_lse(layout_of, size, trunk_transport):
    def both(layout: PackedZigzag, window: int) -> None:
        tensors = [leaf(layout.num_tokens, h) for h in (HEADS, GROUPS, GROUPS, GROUPS, GROUPS)]
        if size > 1:
            tensors = [DTensor.from_local(x, layout.cp_mesh, [Shard(0)]) for x in tensors]
        q, k, v, kb, vb = tensors
        found = branch_attention(
            q, k, v, [kb], [vb], layout.cu_seqlens, layout.max_seqlen, 0.3, transport=trunk_transport
        )
        out, lse = (x if size == 1 else x.to_local() for x in found)
        (out.float().sum() + lse.sum()).backward()

    one, many = (launched(both, layout_of(x, size, size - 1, trunk_transport)) for x in (ONE, MANY))
    assert one == many and one["aten::_flash_attention_backward"]


def test_a_new_packing_waits_for_nothing(layout_of):
    """Shifts are planned on the host, once for a packing, and their rows go up without waiting."""
    layout = layout_of(MANY, 2, 1)
    new = PackedZigzag([5, *MANY], cp_mesh=layout.cp_mesh, device="meta")
    with Device():
        draft_passes(new)


@pytest.mark.parametrize("trunk_transport", ["gather", "ring"])
@pytest.mark.parametrize("size", [1, 2])
def test_whole_models(layout_of, size, trunk_transport):
    """The policy with its taps, and the draft's unroll: forward and backward, all layers."""
    config = PolicyConfig(
        hidden_size=48, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8, intermediate_size=48, vocab_size=23
    )
    policy = build_policy(config, vocab_size=23, seed=1, device="cpu", dtype=torch.bfloat16)
    draft = Eagle3Draft.build(
        DraftConfig(ttt_steps=PASSES, tap_ids=(1, 2, 3)), policy.shape, seed=2, dtype=torch.bfloat16
    )
    policy, draft = policy.to("meta"), draft.to("meta")

    def step(layout: PackedZigzag, window: int) -> None:
        out = policy(torch.empty(layout.num_tokens, dtype=torch.int64, device="meta"), layout, (0, *draft.tap_ids))
        out.hidden_TE.float().sum().backward()
        student = draft([out.taps[i] for i in draft.tap_ids], out.taps[0], layout)
        sum(x.float().sum() for x in student).backward()
        assert all(p.grad is not None for p in draft.midlayer.parameters())

    one, many = (launched(step, layout_of(x, size, size - 1, trunk_transport)) for x in (ONE, MANY))
    assert one == many


# ---- the net has no holes: each of these is caught ----------------------------------------------------------


def _item(view, q_rows, k_rows):
    int(view.cu_seqlens[-1])


def _mask(view, q_rows, k_rows):
    view.cu_seqlens[view.cu_seqlens > 0]


def _masked_write(view, q_rows, k_rows):
    view.cu_seqlens.clone()[view.cu_seqlens > 0] = 0


def _branch(view, q_rows, k_rows):
    if (view.cu_seqlens > 3).any():
        pass


def _to_host(view, q_rows, k_rows):
    view.cu_seqlens.cpu()


def _from_host(view, q_rows, k_rows):
    torch.arange(q_rows).to(view.cu_seqlens.device)


def _host_index(view, q_rows, k_rows):
    view.cu_seqlens[torch.zeros(3, dtype=torch.int64)]


def _repeat(view, q_rows, k_rows):
    view.cu_seqlens.repeat_interleave(torch.diff(view.cu_seqlens, prepend=view.cu_seqlens[:1]))


WAITS = [_item, _mask, _masked_write, _branch, _to_host, _from_host, _host_index, _repeat]


@pytest.mark.parametrize("wait", WAITS, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("size", [1, 2])
def test_waiting_is_caught(layout_of, monkeypatch, wait, size):
    sound = cuda.calls_of
    monkeypatch.setattr(cuda, "calls_of", lambda *args: wait(*args) or sound(*args))
    layout = layout_of(MANY, size)
    with pytest.raises(HostWait), Device():
        policy_layer(layout)


def test_waiting_in_a_handler_or_a_backward_is_caught(layout_of, monkeypatch):
    layout = layout_of(MANY, 2)
    sound = dispatch.scatter_trunk_gradient
    broken = lambda dk, dv, cu, ring: bool(cu[-1] > 0) and sound(dk, dv, cu, ring)  # noqa: E731
    monkeypatch.setattr(dispatch, "scatter_trunk_gradient", broken)
    with pytest.raises(HostWait), Device():
        policy_layer(layout)


def test_a_loop_over_documents_is_caught(layout_of, monkeypatch):
    """A loop needs no value where the host knows how many documents there are; the launches tell on it."""

    def one_by_one(q, k, v, view, scale):
        parts = []
        for index in range(view.cu_seqlens.shape[0] - 1):
            borders = view.cu_seqlens[index : index + 2]
            parts.append(cuda._forward(q, k, v, borders, borders, 8, 8, 0.0, True, False, scale=scale))
        return parts[0][0].float(), parts[0][1].transpose(0, 1)

    monkeypatch.setattr(cuda, "trunk_forward", one_by_one)
    one, many = (launched(policy_layer, layout_of(x, 1)) for x in (ONE, MANY))
    assert one != many


def test_branch_attention_on_meta_needs_the_fixture():
    """Without it no kernel serves ``meta``: the tests above ran what they say."""
    x = torch.empty(4, 2, DIM, device="meta", dtype=torch.bfloat16)
    cu = torch.empty(2, device="meta", dtype=torch.int32)
    with pytest.raises(ValueError, match="not for a tensor on meta"), Device():
        branch_attention(x, x, x, [], [], cu, 4, 1.0)
