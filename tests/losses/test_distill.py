"""The fused sweep against the plain computation: values, gradients, metrics, inputs that break naive code."""

from __future__ import annotations

import random

import pytest
import torch
from distill_oracle import case, dense

from torchspec.context_parallel.layout import PackedZigzag
from torchspec.losses.distill import (
    LogitTransform,
    NonFiniteTeacher,
    distill_loss,
    distill_metrics,
    gate_anchors,
    teacher_anchors,
    teacher_table,
)
from torchspec.losses.logits import row_max
from torchspec.losses.objectives import OBJECTIVES

EVERY = sorted(OBJECTIVES)


def fused(c, *, chunk_rows=4, probabilistic=False, teacher=None, student=None, **options):
    hidden = [h.clone().requires_grad_() for h in c["student_hidden"]]
    head = c["student_head"].clone().requires_grad_()
    out = distill_loss(
        c["teacher_hidden"],
        c["teacher_head"],
        hidden,
        head,
        c["anchors"],
        c["counts"],
        pass_weights=c["pass_weights"],
        d2t=c["d2t"],
        target_ids_R=c["target_ids"],
        chunk_rows=chunk_rows,
        draft_sampling="probabilistic" if probabilistic else "greedy",
        teacher_transform=LogitTransform(**teacher) if teacher else None,
        student_transform=LogitTransform(**student) if student else None,
        **options,
    )
    out.loss.backward()
    return out, [h.grad for h in hidden], head.grad


def assert_equal(c, tol=1e-12, chunk_rows=4, **options):
    out, hidden, head = fused(c, chunk_rows=chunk_rows, **options)
    loss, stats, hidden_ref, head_ref = dense(c, **options)
    assert torch.isfinite(out.loss)
    torch.testing.assert_close(out.loss, loss, rtol=tol, atol=tol)
    for ours, theirs in zip([*hidden, head], [*hidden_ref, head_ref]):
        torch.testing.assert_close(ours, theirs, rtol=tol, atol=tol)
    for name, ours in (
        ("loss", out.loss_sum_K),
        ("count", out.count_K),
        ("top1", out.top1_sum_K),
        ("accept", out.accept_sum_K),
    ):
        torch.testing.assert_close(ours, stats[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    assert float(out.accept_len_sum) == pytest.approx(stats["accept_len"], abs=1e-10)
    assert float(out.accept_len_count) == stats["windows"]
    assert float(out.entropy_sum) == pytest.approx(stats["entropy"], abs=1e-10)


@pytest.mark.parity
@pytest.mark.parametrize("draft_vocab", [None, 7])
@pytest.mark.parametrize("temperature, sampling", [(1.0, 1.0), (0.7, 0.7), (2.0, 1.0), (1.0, 0.0), (0.5, 0.0)])
@pytest.mark.parametrize("objective", EVERY)
def test_equal_to_the_dense_computation(objective, temperature, sampling, draft_vocab):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    c = case(draft_vocab=draft_vocab, seed=seed)
    assert_equal(c, objective=objective, temperature=temperature, sampling_temperature=sampling)
    assert_equal(c, objective=objective, temperature=temperature, sampling_temperature=sampling, probabilistic=True)


@pytest.mark.parametrize("chunk_rows", [1, 3, 5, 100])
def test_chunk_sizes_that_do_not_divide(chunk_rows):
    assert_equal(case(rows=13, draft_vocab=5, seed=1), chunk_rows=chunk_rows)
    assert_equal(case(rows=13, seed=1), chunk_rows=chunk_rows, objective="lk")


@pytest.mark.parametrize("objective", EVERY)
def test_blocks_smaller_than_a_chunk(objective, monkeypatch):
    monkeypatch.setattr("torchspec.losses.logits.BLOCK_ELEMENTS", 2 * 17)
    assert_equal(case(seed=2), objective=objective, chunk_rows=7, probabilistic=True)
    assert_equal(case(seed=2, draft_vocab=6), objective=objective, chunk_rows=7)


@pytest.mark.parametrize("objective", EVERY)
def test_one_row_and_no_row(objective):
    c = case(rows=1, passes=1)
    c["anchors"] = torch.tensor([[0]])
    assert_equal(c, objective=objective)
    c["anchors"] = torch.tensor([[-1]])
    c["counts"] = torch.tensor([0])
    out, hidden, head = fused(c, objective=objective)
    assert out.loss == 0 and hidden[0].abs().max() == 0 and head.abs().max() == 0
    c["counts"] = torch.tensor([5])  # another rank has rows
    assert fused(c, objective=objective)[0].loss == 0
    empty = {
        **c,
        "teacher_hidden": c["teacher_hidden"][:0],
        "anchors": torch.zeros(1, 0, dtype=torch.int64),
        "target_ids": c["target_ids"][:0],
    }
    assert fused(empty, objective=objective)[0].loss == 0


@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "hard_ce"])
@pytest.mark.parametrize("draft_vocab", [None, 6])
def test_position_gate_and_counts_taken_before(objective, draft_vocab):
    c = case(rows=20, draft_vocab=draft_vocab, seed=3)
    gated = gate_anchors(c["teacher_hidden"], c["teacher_head"], c["anchors"], c["d2t"], chunk_rows=6)
    c["counts"] = (gated >= 0).sum(1)
    assert_equal(c, objective=objective, position_gate=True)
    in_sweep = fused(c, objective=objective, position_gate=True)
    before = fused({**c, "anchors": gated}, objective=objective)
    torch.testing.assert_close(in_sweep[0].loss, before[0].loss)
    torch.testing.assert_close(in_sweep[2], before[2])
    if objective != "hard_ce":
        assert in_sweep[0].count_K.tolist() == c["counts"].tolist()
    if draft_vocab:
        assert (gated != c["anchors"]).any()


def test_hard_gate_keeps_rows_whose_token_the_draft_knows():
    c = case(rows=20, draft_vocab=6, seed=4)
    gated = gate_anchors(c["teacher_hidden"], c["teacher_head"], c["anchors"], c["d2t"], target_ids_R=c["target_ids"])
    out, _, _ = fused(c, objective="hard_ce")
    assert out.count_K.tolist() == (gated >= 0).sum(1).tolist() and (gated != c["anchors"]).any()


@pytest.mark.parametrize("objective", EVERY)
def test_softcap_scale_and_bias(objective):
    bias = torch.randn(17, dtype=torch.float64)
    c = case(seed=5, scale=2.0)
    assert_equal(
        c,
        objective=objective,
        teacher={"scale": 0.5, "softcap": 3.0, "bias": bias},
        student={"scale": 1.5, "softcap": 2.0},
        temperature=0.8,
        sampling_temperature=0.8,
    )
    c = case(seed=5, draft_vocab=6)
    assert_equal(c, objective=objective, teacher={"softcap": 3.0}, student={"scale": 0.25})


@pytest.mark.parametrize("objective", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_and_a_teacher_with_one_possible_token(objective, dtype):
    c = case(rows=8, width=4, passes=2, seed=6, dtype=dtype)
    big = 1e4 / c["teacher_hidden"].abs().max() / c["teacher_head"].abs().max() / 4
    c["teacher_hidden"] = c["teacher_hidden"] * big
    c["student_hidden"] = [h * big for h in c["student_hidden"]]
    out, hidden, head = fused(c, objective=objective)
    for x in (out.loss, head, *hidden, out.accept_len_sum, out.entropy_sum):
        assert torch.isfinite(x).all()
    if dtype == torch.float64 and objective != "lk":  # the oracle's -log(alpha) underflows
        assert_equal(c, objective=objective, tol=1e-9)
    bias = torch.full((17,), -torch.inf, dtype=dtype)
    bias[3] = 0.0
    out, hidden, head = fused(c, objective=objective, teacher={"bias": bias})
    assert all(torch.isfinite(x).all() for x in (out.loss, head, *hidden))
    assert out.entropy_sum == 0


def test_lk_at_zero_overlap_still_has_a_gradient():
    c = case(rows=3, width=2, vocab=4, passes=1, seed=7)
    c["teacher_hidden"] = torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64)
    c["teacher_head"] = torch.tensor([[1e4, 0], [0, 0], [0, 0], [0, 0]], dtype=torch.float64)
    c["student_hidden"] = [torch.tensor([[1.0, 0.0, 0.0]] * 3, dtype=torch.float64)]
    c["student_head"] = torch.tensor([[0, 0, 0], [1e4, 0, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.float64)
    out, hidden, head = fused(c, objective="lk")
    assert out.loss > 1000 and head.abs().max() > 0.1


@pytest.mark.parametrize("objective", EVERY)
def test_vocabulary_padding_switched_off_by_the_bias(objective):
    c = case(seed=8)
    padded = {
        **c,
        "teacher_head": torch.cat([c["teacher_head"], torch.randn(3, 6, dtype=torch.float64) * 9]),
        "d2t": torch.zeros(17, dtype=torch.int64),
    }
    bias = torch.cat([torch.zeros(17), torch.full((3,), -torch.inf)]).double()
    out, hidden, head = fused(padded, objective=objective, teacher={"bias": bias}, probabilistic=True)
    ref, hidden_ref, head_ref = fused(c, objective=objective, probabilistic=True)
    for a, b in zip(
        [out.loss, out.accept_sum_K, out.top1_sum_K, head, *hidden],
        [ref.loss, ref.accept_sum_K, ref.top1_sum_K, head_ref, *hidden_ref],
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_the_teacher_names_the_row(bad):
    c = case(rows=13, seed=9)
    row = int((c["anchors"] >= 0).any(0).nonzero()[5])
    c["teacher_hidden"][row, 2] = bad
    with pytest.raises(NonFiniteTeacher, match=rf"\b{row}\b") as caught:
        fused(c, chunk_rows=3)
    assert caught.value.rows == [row]
    c["anchors"][:, row] = -1  # a row that teaches nobody may hold anything
    assert torch.isfinite(fused(c, chunk_rows=3)[0].loss)


def test_nan_in_the_student_reaches_the_loss_and_nothing_crashes():
    c = case(seed=9)
    c["student_hidden"][1][int(c["anchors"][1].max())] = float("nan")
    for draft_sampling in (False, True):
        out, _, head = fused(c, probabilistic=draft_sampling)
        assert out.loss.isnan() and head.isnan().any() and torch.isfinite(out.loss_sum_K[0])


def test_joint_prefix_of_a_worked_case():
    """Two students with acceptances (1/2, 1/4) and (1, 1/2): 1/2 + 1/8 and 1 + 1/2; the product of means is
    3/4 + 9/32.
    """
    logs = torch.log(torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)).clamp_min(
        -800
    )
    student = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(2, 2).contiguous()
    out = distill_loss(
        logs,
        torch.eye(2, dtype=torch.float64),
        [student, student],
        torch.eye(2, dtype=torch.float64),
        torch.tensor([[0, -1, 1, -1], [-1, 0, -1, 1]]),
        torch.tensor([2, 2]),
    )
    assert float(out.accept_len_sum) == pytest.approx(0.5 + 0.125 + 1.0 + 0.5)
    assert float(out.accept_len_count) == 2
    metrics = distill_metrics(out.sums())
    assert metrics["draft/expected_accept_len"] == pytest.approx(1 + 2.125 / 2)
    assert metrics["draft/expected_accept_pass_1"] == pytest.approx(0.375)


def test_incoming_gradient_scales_and_a_second_backward_is_refused():
    c = case(seed=10)
    _, hidden, head = fused(c)
    student = [h.clone().requires_grad_() for h in c["student_hidden"]]
    weight = c["student_head"].clone().requires_grad_()
    out = distill_loss(
        c["teacher_hidden"],
        c["teacher_head"].requires_grad_(),
        student,
        weight,
        c["anchors"],
        c["counts"],
        pass_weights=c["pass_weights"],
    )
    loss = out.loss * -2.5
    loss.backward(retain_graph=True)
    torch.testing.assert_close(weight.grad, head * -2.5)
    torch.testing.assert_close(student[1].grad, hidden[1] * -2.5)
    assert c["teacher_head"].grad is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_microbatches_add_up():
    """Gradients of two microbatches with global counts sum to those of one batch."""
    c = case(rows=12, seed=11)
    c["anchors"] = torch.stack([torch.arange(12)] * 3)
    _, _, head = fused(c)
    halves = torch.zeros_like(head)
    for at in (slice(0, 5), slice(5, 12)):
        part = {
            **c,
            "teacher_hidden": c["teacher_hidden"][at],
            "student_hidden": [h[at] for h in c["student_hidden"]],
            "target_ids": c["target_ids"][at],
        }
        part["anchors"] = torch.stack([torch.arange(at.stop - at.start)] * 3)
        halves += fused(part)[2]
    torch.testing.assert_close(halves, head, rtol=1e-12, atol=1e-12)


def test_frozen_parts_cost_nothing_and_no_grad_runs():
    c = case(seed=12)
    hidden = [h.clone().requires_grad_() for h in c["student_hidden"]]
    args = (c["teacher_hidden"], c["teacher_head"], hidden, c["student_head"], c["anchors"], c["counts"])
    distill_loss(*args, pass_weights=c["pass_weights"]).loss.backward()
    for ours, theirs in zip(hidden, fused(c)[1]):
        torch.testing.assert_close(ours.grad, theirs)
    with torch.no_grad():
        assert distill_loss(*args).loss.requires_grad is False


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("objective", EVERY)
def test_lower_precision(objective, dtype, tol):
    c = case(rows=40, width=16, vocab=50, seed=13, scale=0.5)
    low = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in c.items()}
    low["student_hidden"] = [h.to(dtype) for h in c["student_hidden"]]
    exact = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in low.items()}
    exact["student_hidden"] = [h.double() for h in low["student_hidden"]]
    out, hidden, head = fused(low, objective=objective, chunk_rows=16)
    ref, hidden_ref, head_ref = fused(exact, objective=objective, chunk_rows=16)
    assert out.loss.dtype == torch.float32 and hidden[0].dtype == dtype and head.dtype == dtype
    assert abs(out.loss.item() - ref.loss.item()) < tol * max(1, abs(ref.loss.item()))
    for ours, theirs in zip([*hidden, head], [*hidden_ref, head_ref]):
        assert (ours.double() - theirs).norm() < 2 * tol * theirs.norm()


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"anchors": torch.tensor([[0, 0] + [-1] * 11] * 3)}, "two teacher rows teach student row 0"),
        ({"anchors": torch.full((3, 13), 13)}, "there are 13"),
        ({"counts": torch.ones(2)}, "counts_K must hold"),
        ({"pass_weights": (1.0,)}, "pass_weights has 1 numbers"),
        ({"student_head": torch.zeros(5, 7, dtype=torch.float64)}, "same vocabulary"),
        ({"d2t": torch.full((17,), 3)}, "outside the policy's vocabulary"),
    ],
)
def test_arguments_that_do_not_fit(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        fused(case(seed=14) | change)


def test_unknown_words():
    for options in ({"objective": "mse"}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="choose one of|above 0"):
            fused(case(), **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("objective", EVERY)
def test_cuda_equals_cpu(objective):
    for draft_vocab in (None, 7):
        c = case(seed=16, draft_vocab=draft_vocab)
        there = {k: v.cuda() if torch.is_tensor(v) else v for k, v in c.items()}
        there["student_hidden"] = [h.cuda() for h in c["student_hidden"]]
        out, hidden, head = fused(there, objective=objective, probabilistic=True)
        ref, hidden_ref, head_ref = fused(c, objective=objective, probabilistic=True)
        for ours, theirs in zip(
            [out.loss, out.accept_sum_K, head, *hidden], [ref.loss, ref.accept_sum_K, head_ref, *hidden_ref]
        ):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-10, atol=1e-10)


def test_row_max_finds_what_max_finds():
    for width in (1, 63, 64, 129, 1000, 4096):
        x = torch.randn(9, width)
        x[3, -1] = 100.0
        value, index = row_max(x)
        assert torch.equal(value, x.amax(-1)) and torch.equal(index, x.argmax(-1))


# -- which row teaches which ---------------------------------------------------------------------------------


def test_anchors_of_six_tokens():
    layout = PackedZigzag([6])
    assert teacher_anchors(layout, torch.ones(6, dtype=torch.bool), 3).tolist() == [
        [-1, 0, 1, 2, 3, -1],
        [-1, -1, 0, 1, 2, -1],
        [-1, -1, -1, 0, 1, -1],
    ]
    trained = torch.tensor([0, 0, 0, 1, 0, 1], dtype=torch.bool)  # row t counts where x[t+2+k] is trained
    assert teacher_anchors(layout, trained, 3).tolist() == [
        [-1, -1, 1, -1, 3, -1],
        [-1, -1, 0, -1, 2, -1],
        [-1, -1, -1, -1, 1, -1],
    ]


def test_anchors_never_cross_documents():
    layout = PackedZigzag([4, 1, 3])
    assert teacher_anchors(layout, torch.ones(8, dtype=torch.bool), 2).tolist() == [
        [-1, 0, 1, -1, -1, -1, 5, -1],
        [-1, -1, 0, -1, -1, -1, -1, -1],
    ]
    table, anchors = teacher_table(layout, torch.randn(8, 3), torch.ones(8, dtype=torch.bool), 2)
    assert table.shape == (8, 3) and anchors.shape == (2, 8)


# -- torch.compile -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_vocab", [None, 6])
def test_compiles_without_a_graph_break(draft_vocab):
    c = case(draft_vocab=draft_vocab, seed=15)

    def step(hidden, head):
        out = distill_loss(
            c["teacher_hidden"],
            c["teacher_head"],
            [h * 1.0 for h in hidden],
            head * 1.0,
            c["anchors"],
            c["counts"],
            pass_weights=c["pass_weights"],
            d2t=c["d2t"],
            chunk_rows=4,
        )
        return out.loss * 2, out.sums()

    grads = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        hidden = [h.clone().requires_grad_() for h in c["student_hidden"]]
        head = c["student_head"].clone().requires_grad_()
        loss, sums = function(hidden, head)
        loss.backward()
        grads.append([loss.detach(), sums["top1_sum_K"], head.grad, *[h.grad for h in hidden]])
    for eager, compiled in zip(*grads):
        assert torch.equal(eager, compiled)


def test_operator_checks():
    c = case(draft_vocab=6, seed=17)
    args = (
        c["teacher_hidden"],
        c["teacher_head"],
        c["student_hidden"],
        c["student_head"],
        c["anchors"],
        torch.ones(3, dtype=torch.float64),
        c["d2t"],
        None,
        None,
    )
    torch.library.opcheck(
        torch.ops.torchspec.distill_sweep.default,
        args,
        dict(
            need_hidden=True,
            need_head=True,
            objective="forward_kl",
            temperature=1.0,
            sampling_temperature=1.0,
            probabilistic=False,
            position_gate=False,
            chunk_rows=4,
            teacher_scale=1.0,
            teacher_softcap=0.0,
            student_scale=1.0,
            student_softcap=0.0,
            vocab_group="",
        ),
    )
