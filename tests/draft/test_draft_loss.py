"""Which row teaches which, counted by hand on six tokens, and the loss against a dense fp64 computation.

Two documents, rows 0-1 and rows 2-5, tokens [7 3 | 9 4 5 8]; trained tokens are 3 (row 1), 5 (row 4) and 8
(row 5).

Row t at pass k predicts the token of row t+2+k and is taught by row t+1+k:

    pass 0   row 2 -> 5 (taught by row 3), row 3 -> 8 (by row 4); token 3 has no row two before it
    pass 1   row 2 -> 8 (by row 4);        row 1 may not reach into the next document
    pass 2   nothing: row 2 would predict past the end
"""

from __future__ import annotations

import pytest
import torch
from draft_oracle import dense_unroll, gather_rows, policy_shape, random_draft, unroll_rows

from torchspec.context_parallel.layout import PackedZigzag

TOKENS = [7, 3, 9, 4, 5, 8]
MASK = [0, 1, 0, 0, 1, 1]
ANCHORS = [
    [-1, -1, -1, 2, 3, -1],
    [-1, -1, -1, -1, 2, -1],
    [-1, -1, -1, -1, -1, -1],
]
COUNTS = [2, 1, 0]
TEACHES = {
    0: [(3, 2, 5), (4, 3, 8)],
    1: [(4, 2, 8)],
    2: [],
}  # pass -> (teacher row, draft row, predicted token)


def case(seed, draft, tokens):
    """Random policy rows, head, taps and embedding rows."""
    generator = torch.Generator().manual_seed(seed)

    def rows(count):
        return torch.randn(count, draft.shape.hidden_size, generator=generator, dtype=torch.float64)

    return rows(tokens), rows(draft.shape.vocab_size), [rows(tokens) for _ in draft.tap_ids], rows(tokens)


def dense_loss(draft, student, teaches, hidden_TE, head_VE, counts, weights, objective, gate):
    """sum_k alpha_k sum CE / sum_k alpha_k count_k with all logits written out; also the counts."""
    ids = torch.arange(draft.shape.draft_vocab_size) + (0 if draft.d2t is None else draft.d2t)
    total, counted = 0.0, []
    for k, triples in teaches.items():
        counted.append(0)
        for teacher_row, draft_row, token in triples:
            teacher_V = hidden_TE[teacher_row] @ head_VE.T
            log_q = (student[k][draft_row] @ draft.lm_head.weight.T).log_softmax(-1)
            if gate and teacher_V.argmax() not in ids:
                continue
            if objective == "hard_ce":
                if token not in ids:
                    continue
                total = total - weights[k] * log_q[ids.tolist().index(token)]
            else:
                total = total - weights[k] * (teacher_V[ids].softmax(-1) * log_q).sum()
            counted[-1] += 1
    denominator = sum(w * c for w, c in zip(weights, counts if counts is not None else counted, strict=True))
    return total / max(denominator, 1), counted


def gradients(loss, draft):
    return torch.autograd.grad(loss, list(draft.parameters()), allow_unused=True, materialize_grads=True)


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).abs().max() <= 1e-12 * other.abs().max().clamp_min(1.0)


@pytest.mark.parity
def test_six_tokens_by_hand():
    draft = random_draft(21, ttt_steps=3, pass_weights=(1.0, 0.8, 0.64))
    hidden_TE, head_VE, taps, embed = case(22, draft, 6)
    layout = PackedZigzag([2, 4])
    student = draft(taps, embed, layout)
    targets = draft.targets(hidden_TE, head_VE, torch.tensor(TOKENS), torch.tensor(MASK), layout)
    assert targets.anchors_KR.tolist() == ANCHORS
    assert targets.counts_K.tolist() == COUNTS
    assert draft.count_rows(layout, torch.tensor(MASK)).tolist() == COUNTS
    counts_K = targets.counts_K * 3  # this is one of three microbatches
    out = draft.loss(student, targets, head_VE, counts_K, chunk_rows=2)
    expected, _ = dense_loss(
        draft, student, TEACHES, hidden_TE, head_VE, [6, 3, 0], (1.0, 0.8, 0.64), "forward_kl", False
    )
    assert_same([out.loss], [expected])
    assert out.count_K.tolist() == COUNTS
    # retain_graph: both losses share the unroll
    actual = torch.autograd.grad(out.loss, list(draft.parameters()), retain_graph=True)
    assert_same(actual, gradients(expected, draft))


@pytest.mark.parity
@pytest.mark.parametrize("objective", ["forward_kl", "hard_ce"])
@pytest.mark.parametrize(("draft_vocab", "gate"), [(0, False), (6, False), (6, True)])
def test_loss_of_the_whole_unroll(objective, draft_vocab, gate):
    """Value and gradient of every parameter, against the dense unroll and dense losses, random pack."""
    seed = int(torch.randint(0, 2**31, ()))
    passes, lengths = 3, [5, 1, 7, 2]
    draft = random_draft(
        seed,
        ttt_steps=passes,
        objective=objective,
        vocab_size=draft_vocab,
        position_gate=gate,
        tap_ids=(1, 4),
    )
    hidden_TE, head_VE, taps, embed = case(seed + 1, draft, sum(lengths))
    if draft_vocab:
        draft.init_from_policy(head_VE, None, torch.randint(0, 9, (11,)))
    tokens_T, mask_T = torch.randint(0, 11, (15,)), torch.randint(0, 2, (15,))
    teaches, start = {k: [] for k in range(passes)}, 0
    for length in lengths:
        for k in range(passes):
            for row in range(start, start + length - 2 - k):
                if mask_T[row + 2 + k]:
                    teaches[k].append((row + 1 + k, row, int(tokens_T[row + 2 + k])))
        start += length
    sources, positions, masks = unroll_rows(lengths, passes)
    oracle = dense_unroll(
        dict(draft.named_parameters()),
        torch.cat(taps, -1),
        [gather_rows(embed, s) for s in sources],
        positions,
        masks,
        head_dim=4,
        theta=100.0,
        eps=1e-6,
    )
    expected, counted = dense_loss(draft, oracle, teaches, hidden_TE, head_VE, None, (1.0, 1.0, 1.0), objective, gate)
    layout = PackedZigzag(lengths)
    targets = draft.targets(hidden_TE, head_VE, tokens_T, mask_T, layout)
    assert targets.counts_K.tolist() == counted, f"seed {seed}"
    gated = draft_vocab and (gate or objective == "hard_ce")
    before_K = draft.count_rows(layout, mask_T.bool())
    assert before_K is None if gated else before_K.tolist() == counted
    if not sum(counted):
        return
    out = draft.loss(draft(taps, embed, layout), targets, head_VE, targets.counts_K, chunk_rows=4)
    assert_same([out.loss], [expected])
    assert_same(gradients(out.loss, draft), gradients(expected, draft))


def test_nothing_reaches_the_policy():
    draft = random_draft(23, ttt_steps=2)
    hidden_TE, head_VE, taps, embed = case(24, draft, 6)
    hidden_TE.requires_grad_(), head_VE.requires_grad_()
    layout = PackedZigzag([6])
    targets = draft.targets(hidden_TE, head_VE, torch.tensor(TOKENS), torch.ones(6, dtype=torch.int64), layout)
    draft.loss(draft(taps, embed, layout), targets, head_VE, targets.counts_K).loss.backward()
    assert hidden_TE.grad is None and head_VE.grad is None
    assert all(parameter.grad is not None for parameter in draft.parameters())


def test_a_pack_without_a_trained_token_keeps_the_graph():
    draft = random_draft(25, ttt_steps=2)
    hidden_TE, head_VE, taps, embed = case(26, draft, 6)
    layout = PackedZigzag([6])
    targets = draft.targets(hidden_TE, head_VE, torch.tensor(TOKENS), torch.zeros(6, dtype=torch.int64), layout)
    assert targets.counts_K.tolist() == [0, 0]
    out = draft.loss(draft(taps, embed, layout), targets, head_VE, torch.tensor([4, 3]))
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in draft.parameters())


def test_training_learns_a_deterministic_policy():
    """A policy that continues a cycle of tokens: after some steps the draft must guess every pass right."""
    torch.manual_seed(0)
    draft = random_draft(27, dtype=torch.float32, shape=policy_shape(hidden_size=18), ttt_steps=3)
    table_VE = torch.randn(11, 18)
    head_VE = 3 * torch.randn(11, 18)
    tokens_T = torch.arange(44) % 11
    hidden_TE = torch.linalg.lstsq(head_VE, 20 * torch.eye(11)).solution.T[(tokens_T + 1) % 11]
    head_VE = head_VE.detach()
    draft.init_from_policy(head_VE)
    layout = PackedZigzag([20, 24])
    taps, embed = [table_VE[tokens_T]] * 3, table_VE[tokens_T]
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    mask_T = torch.ones(44, dtype=torch.int64)
    for _ in range(100):
        targets = draft.targets(hidden_TE, head_VE, tokens_T, mask_T, layout)
        out = draft.loss(draft(taps, embed, layout), targets, head_VE, targets.counts_K)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert (out.top1_sum_K / out.count_K > 0.9).all(), out.top1_sum_K / out.count_K
    proposals_TN = draft.propose(tokens_T, taps, table_VE, layout, 3)
    teacher_T = (hidden_TE @ head_VE.T).argmax(-1)
    right = [(proposals_TN[t, k] == teacher_T[t + 1 + k]).item() for t in range(20, 38) for k in range(3)]
    assert sum(right) / len(right) > 0.9
