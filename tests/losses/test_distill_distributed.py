"""Two gloo ranks, equal to one: the vocabulary split (tensor parallel) or the tokens (context parallel)."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from distill_oracle import case, dense, transformed
from gloo_ranks import results_of

from torchspec.context_parallel.layout import PackedZigzag
from torchspec.losses.distill import (
    LogitTransform,
    NonFiniteTeacher,
    distill_loss,
    gate_anchors,
    register_vocab_group,
    teacher_anchors,
    teacher_table,
)
from torchspec.losses.logprob import token_logprobs
from torchspec.losses.objectives import OBJECTIVES

TOL = {"rtol": 1e-12, "atol": 1e-12}


def _sum(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


# -- vocabulary over ranks -----------------------------------------------------------------------------------


def _mine(tensor, sizes, rank):
    return tensor.split(sizes)[rank]


def _tp_case(rank, group, c, sizes, draft_sizes, *, teacher=None, student=None, probabilistic=False, **options):
    hidden = [h.clone().requires_grad_() for h in c["student_hidden"]]
    head = _mine(c["student_head"], draft_sizes, rank).clone().requires_grad_()
    own = dict(teacher or {})
    if "bias" in own:
        own["bias"] = _mine(own["bias"], sizes, rank)
    out = distill_loss(
        c["teacher_hidden"],
        _mine(c["teacher_head"], sizes, rank),
        hidden,
        head,
        c["anchors"],
        c["counts"],
        pass_weights=c["pass_weights"],
        d2t=c["d2t"],
        target_ids_R=c["target_ids"],
        chunk_rows=5,
        vocab_group=group,
        draft_sampling="probabilistic" if probabilistic else "greedy",
        teacher_transform=LogitTransform(**own),
        student_transform=LogitTransform(**(student or {})),
        **options,
    )
    out.loss.backward()
    loss, stats, hidden_ref, head_ref = dense(
        c, teacher=teacher, student=student, probabilistic=probabilistic, **options
    )
    torch.testing.assert_close(out.loss.detach(), loss, **TOL)
    torch.testing.assert_close(head.grad, _mine(head_ref, draft_sizes, rank), **TOL)
    for ours, theirs in zip(hidden, hidden_ref):
        torch.testing.assert_close(ours.grad, theirs, **TOL)
    for name, ours in (
        ("loss", out.loss_sum_K),
        ("top1", out.top1_sum_K),
        ("accept", out.accept_sum_K),
        ("count", out.count_K),
    ):
        torch.testing.assert_close(ours, stats[name], **TOL)
    assert abs(float(out.accept_len_sum) - stats["accept_len"]) < 1e-10
    assert abs(float(out.entropy_sum) - stats["entropy"]) < 1e-10


def _tensor_parallel(rank, seed):
    group = register_vocab_group(dist.group.WORLD)
    bias = torch.randn(17, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for i, objective in enumerate(sorted(OBJECTIVES)):
        full, subset = case(seed=seed + i), case(seed=seed + i, draft_vocab=7)
        for probabilistic in (False, True):
            _tp_case(rank, group, full, [9, 8], [9, 8], objective=objective, probabilistic=probabilistic)
            _tp_case(
                rank,
                group,
                subset,
                [9, 8],
                [4, 3],
                objective=objective,
                probabilistic=probabilistic,
                temperature=0.7,
            )
        _tp_case(
            rank,
            group,
            subset,
            [12, 5],
            [7, 0],
            objective=objective,
            sampling_temperature=0.0,
            position_gate=True,
        )
        _tp_case(
            rank,
            group,
            full,
            [12, 5],
            [12, 5],
            objective=objective,
            temperature=0.6,
            sampling_temperature=0.6,
            teacher={"scale": 0.5, "softcap": 3.0, "bias": bias},
            student={"softcap": 2.0, "scale": 1.5},
        )
    c = case(seed=seed, draft_vocab=7)
    gated = gate_anchors(
        c["teacher_hidden"], _mine(c["teacher_head"], [9, 8], rank), c["anchors"], c["d2t"], vocab_group=group
    )
    assert torch.equal(gated, gate_anchors(c["teacher_hidden"], c["teacher_head"], c["anchors"], c["d2t"]))
    row = int(c["anchors"][0].argmax())
    c["teacher_hidden"][row] = float("nan")
    with pytest.raises(NonFiniteTeacher, match=str(row)):  # on both ranks, so nobody is left waiting
        _tp_case(rank, group, c, [9, 8], [4, 3])
    _logprobs(rank, group, seed)


def _logprobs(rank, group, seed):
    g = torch.Generator().manual_seed(seed)
    hidden, head, weights = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((11, 5), (13, 5), (11,)))
    targets = torch.randint(-1, 13, (11,), generator=g)
    h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    logq = torch.log_softmax(transformed(h @ w.T, softcap=2.0) / 0.7, -1)
    logp_ref = torch.where(targets >= 0, logq.gather(1, targets.clamp_min(0)[:, None]).squeeze(1), 0)
    entropy_ref = torch.where(targets >= 0, -(logq.exp() * logq).sum(-1), 0)
    (logp_ref * weights).sum().backward()
    for sizes in ([7, 6], [13, 0]):
        mine, own = hidden.clone().requires_grad_(), _mine(head, sizes, rank).clone().requires_grad_()
        logp, entropy = token_logprobs(
            mine,
            own,
            targets,
            need_entropy=True,
            temperature=0.7,
            chunk_rows=4,
            vocab_group=group,
            transform=LogitTransform(softcap=2.0),
        )
        (logp * weights).sum().backward()
        torch.testing.assert_close(logp, logp_ref, **TOL)
        torch.testing.assert_close(entropy, entropy_ref.detach(), **TOL)
        torch.testing.assert_close(mine.grad, h.grad, **TOL)
        torch.testing.assert_close(own.grad, _mine(w.grad, sizes, rank), **TOL)


@pytest.mark.parity
def test_vocabulary_split_over_two_ranks():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    results_of(_tensor_parallel, 2, seed)


def test_an_unknown_group_is_refused():
    c = case()
    with pytest.raises(ValueError, match="register_vocab_group"):
        distill_loss(
            c["teacher_hidden"],
            c["teacher_head"],
            c["student_hidden"],
            c["student_head"],
            c["anchors"],
            c["counts"],
            vocab_group="nobody",
        )


# -- tokens over ranks ---------------------------------------------------------------------------------------


class GatheringLayout(PackedZigzag):
    """shift by the plainest way there is, whatever the layout's own exchange does: gather all, shift, keep
    one's own.
    """

    def shift(self, x_T, n):
        shards = [torch.empty_like(x_T) for _ in range(2)]
        dist.all_gather(shards, x_T.contiguous())
        return self.shard(PackedZigzag(self.doc_lengths).shift(self.unshard(shards), n))


def _context_parallel(rank, seed, passes):
    lengths, width, vocab = [9, 2, 14, 1], 6, 11
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    teacher, head, student_head = (
        torch.randn(*s, generator=g, dtype=torch.float64) for s in ((total, width), (vocab, width), (vocab, width))
    )
    student = [torch.randn(total, width, generator=g, dtype=torch.float64) for _ in range(passes)]
    mask = torch.rand(total, generator=g) < 0.7
    one = PackedZigzag(lengths)
    anchors = teacher_anchors(one, mask, passes)
    counts = (anchors >= 0).sum(1)

    def step(layout, table, anchors, hidden):
        hidden = [h.clone().requires_grad_() for h in hidden]
        weight = student_head.clone().requires_grad_()
        out = distill_loss(table, head, hidden, weight, anchors, counts, chunk_rows=4)
        out.loss.backward()
        return out, weight.grad, [h.grad for h in hidden]

    ref, head_ref, hidden_ref = step(one, teacher, anchors, student)
    layout = GatheringLayout(lengths, cp_size=2, cp_rank=rank)
    table, mine = teacher_table(layout, layout.shard(teacher), layout.shard(mask), passes)
    assert table.shape[0] <= layout.num_tokens + 2 * passes * len(lengths)
    out, head_grad, hidden_grad = step(layout, table, mine, [layout.shard(h) for h in student])
    torch.testing.assert_close(_sum(out.loss.detach()), ref.loss.detach(), **TOL)
    torch.testing.assert_close(_sum(head_grad), head_ref, **TOL)
    for ours, theirs in zip(hidden_grad, hidden_ref):
        torch.testing.assert_close(ours, layout.shard(theirs), **TOL)
    for name, value in out.sums().items():
        torch.testing.assert_close(_sum(value), ref.sums()[name], **TOL)


def _context_parallel_cases(rank, seed):
    for passes in (1, 3, 7):
        _context_parallel(rank, seed + passes, passes)


@pytest.mark.parity
def test_tokens_split_over_two_ranks():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    results_of(_context_parallel_cases, 2, seed)
