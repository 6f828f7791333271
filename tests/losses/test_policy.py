"""Advantages and the policy loss against loops written out per sequence, and against cases worked by hand."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from torchspec.losses.config import RLConfig
from torchspec.losses.policy import PolicyCounts, advantages, policy_counts, policy_loss, policy_metrics

# -- advantages ----------------------------------------------------------------------------------------------


def test_advantages_by_hand():
    rewards = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    adv, live = advantages(rewards, "group_std")
    assert live.tolist() == [True, False]
    torch.testing.assert_close(
        adv, torch.tensor([[-1.0, 1.0], [0, 0]]) / math.sqrt(2)
    )  # sample std of (1, 3) is sqrt(2)
    assert advantages(rewards, "group_mean")[0].tolist() == [[-1, 1], [0, 0]]
    assert advantages(rewards, "leave_one_out")[0].tolist() == [[-2, 2], [0, 0]]
    assert advantages(torch.tensor([[0.0, 3.0, 6.0]]), "leave_one_out")[0].tolist() == [[-4.5, 0, 4.5]]


@pytest.mark.parametrize("kind", ["group_std", "group_mean", "leave_one_out"])
def test_invalid_samples_are_left_out(kind):
    rewards = torch.tensor([[1.0, 9.0, 2.0, 4.0], [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [3.0, 1.0, 3.0, 3.0]])
    valid = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]], dtype=torch.bool)
    adv, live = advantages(rewards, kind, valid)
    assert live.tolist() == [True, False, False, False]
    torch.testing.assert_close(adv[0, [0, 2, 3]], advantages(rewards[:1, [0, 2, 3]], kind)[0][0])
    assert adv[0, 1] == 0 and adv[1:].abs().max() == 0


def test_equal_rewards_that_differ_by_rounding_are_dead():
    close = torch.tensor([[0.1 + 0.2, 0.3, 0.3, 0.3]], dtype=torch.float64)
    assert close[0, 0] != close[0, 1]
    assert not advantages(close, "group_std")[1].any()
    assert not advantages(torch.tensor([[1e6, 1e6 + 0.0625]]), "group_std")[1].any()
    assert advantages(torch.tensor([[0.0, 1e-4]]), "group_std")[1].all()
    assert not advantages(torch.zeros(1, 4), "group_std")[1].any()


def test_advantages_refuse_what_makes_no_sense():
    with pytest.raises(ValueError, match="sample 1 in group 0 is nan"):
        advantages(torch.tensor([[0.0, float("nan")]]), "group_std")
    advantages(torch.tensor([[0.0, 1.0, float("nan")]]), "group_std", torch.tensor([[True, True, False]]))
    with pytest.raises(ValueError, match="unknown"):
        advantages(torch.zeros(1, 2), "best_of")


# -- the loss ------------------------------------------------------------------------------------------------


def batch(lengths=(5, 3, 7, 1, 4)):
    """Sequences with an untrained prefix of one row each; NaN where nothing may be read."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    g = torch.Generator().manual_seed(seed)
    rows = sum(lengths) + len(lengths)
    new, old, engine, ref = (-torch.rand(rows, generator=g, dtype=torch.float64) * 1.5 for _ in range(4))
    seq = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths) + 1)
    mask = torch.cat([torch.arange(n + 1) > 0 for n in lengths])
    adv = torch.randn(len(lengths), generator=g, dtype=torch.float64)[seq]
    for x in (new, old, engine, ref):
        x[~mask] = float("nan")
    return {
        "logp_new_T": new,
        "logp_old_T": old,
        "logp_engine_T": engine,
        "adv_T": adv,
        "mask_T": mask,
        "seq_ids_T": seq,
        "ref_logp_T": ref,
    }


def by_the_loop(b, rl, counts):
    """The formulas, one sequence and one token at a time."""
    new = b["logp_new_T"].clone().requires_grad_()
    loss = 0.0
    for s in b["seq_ids_T"].unique().tolist():
        at = ((b["seq_ids_T"] == s) & b["mask_T"]).nonzero().squeeze(1)
        if not len(at):
            continue
        diff = new[at] - b["logp_old_T"][at]
        ratio = diff.exp() if rl.ratio == "token" else diff.mean().exp().expand(len(at))
        gap = b["logp_old_T"][at] - b["logp_engine_T"][at]
        w = (gap if rl.tis_level == "token" else gap.sum().expand(len(at))).exp()
        if rl.tis_cap > 0:
            w = w.clamp(max=rl.tis_cap) if rl.tis_mode == "truncate" else w * (w <= rl.tis_cap)
        else:
            w = torch.ones_like(w)
        a = b["adv_T"][at]
        tokens = -w * torch.minimum(ratio * a, ratio.clamp(1 - rl.clip_low, 1 + rl.clip_high) * a)
        back = b["ref_logp_T"][at] - new[at]
        tokens = tokens + rl.kl_coef * (back.exp() - back - 1)
        scale = {
            "token": 1 / counts.tokens,
            "sequence": 1 / len(at) / counts.sequences,
            "constant": 1 / counts.sequences / max(rl.loss_norm_constant, 1),
        }[rl.loss_norm]
        loss = loss + tokens.sum() * scale
    loss.backward()
    return loss.detach(), torch.nan_to_num(new.grad)


@pytest.mark.parity
@pytest.mark.parametrize("norm, ratio", [*itertools.product(["token", "sequence", "constant"], ["token", "sequence"])])
@pytest.mark.parametrize(
    "tis_cap, mode, level",
    [(0, "truncate", "token"), *((1.3, m, x) for m in ("truncate", "mask") for x in ("token", "sequence"))],
)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_equal_to_the_loop(norm, ratio, tis_cap, mode, level, kl_coef):
    rl = RLConfig(
        loss_norm=norm,
        loss_norm_constant=11,
        ratio=ratio,
        tis_cap=tis_cap,
        tis_mode=mode,
        tis_level=level,
        kl_coef=kl_coef,
        clip_low=0.15,
        clip_high=0.28,
    )
    b = batch()
    counts = PolicyCounts(40.0, 9.0)
    new = b["logp_new_T"].clone().requires_grad_()
    out = policy_loss(**{**b, "logp_new_T": new}, rl=rl, counts=counts)
    out.loss.backward()
    loss, grad = by_the_loop(b, rl, counts)
    torch.testing.assert_close(out.loss.detach(), loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(new.grad, grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", ["token", "sequence", "constant"])
def test_microbatches_of_whole_sequences_add_up(norm):
    rl = RLConfig(loss_norm=norm, loss_norm_constant=8, ratio="sequence", tis_level="sequence")
    b = batch()
    counts = PolicyCounts(*policy_counts(b["mask_T"], b["seq_ids_T"]).tolist())
    assert counts == (20.0, 5.0)
    whole = policy_loss(**b, rl=rl, counts=counts)
    parts, total = [], torch.zeros(2, dtype=torch.float64)
    for keep in (b["seq_ids_T"] < 2, b["seq_ids_T"] >= 2):
        part = {name: x[keep] for name, x in b.items()}
        part["seq_ids_T"] = part["seq_ids_T"] - part["seq_ids_T"].min()
        parts.append(policy_loss(**part, rl=rl, counts=counts))
        total += policy_counts(part["mask_T"], part["seq_ids_T"])
    assert total.tolist() == [20, 5]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss, rtol=1e-12, atol=1e-12)
    for name in whole.sums:
        torch.testing.assert_close(parts[0].sums[name] + parts[1].sums[name], whole.sums[name])
    assert max(p.maxima["logprob_gap"] for p in parts) == whole.maxima["logprob_gap"]


def test_one_update_on_policy_is_the_plain_gradient():
    """old = new and engine = old: ratio 1, nothing clipped, gradient -A / tokens."""
    b = batch()
    new = b["logp_new_T"].clone().requires_grad_()
    out = policy_loss(new, new, new.detach(), b["adv_T"], b["mask_T"], b["seq_ids_T"], RLConfig(), PolicyCounts(20, 5))
    out.loss.backward()
    torch.testing.assert_close(new.grad, torch.where(b["mask_T"], -b["adv_T"] / 20, 0.0))
    metrics = policy_metrics(out.sums, out.maxima)
    assert metrics["policy/ratio_mean"] == 1 and metrics["policy/clip_fraction"] == 0
    assert metrics["train/logprob_gap"] == 0 and metrics["train/engine_kl"] == 0
    assert metrics["policy/advantage_std"] == pytest.approx(b["adv_T"][b["mask_T"]].std(correction=0).item())


def test_metrics_by_hand():
    new = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0])) - 2
    old = torch.full((5,), -2.0)
    engine = old - torch.log(torch.tensor([1.0, 3.0, 1.0, 1.0, 0.5]))
    adv = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
    out = policy_loss(
        new,
        old,
        engine,
        adv,
        torch.ones(5),
        torch.zeros(5, dtype=torch.int64),
        RLConfig(),
        PolicyCounts(5, 1),
        entropy_T=torch.arange(5.0),
    )
    metrics = policy_metrics(out.sums, out.maxima)
    assert metrics["policy/clip_high_fraction"] == pytest.approx(1 / 5)  # ratio 1.5 with a positive advantage
    assert metrics["policy/clip_low_fraction"] == pytest.approx(1 / 5)  # ratio 0.5 with a negative one
    assert metrics["policy/tis_clip_fraction"] == pytest.approx(1 / 5)
    assert metrics["policy/tis_weight_mean"] == pytest.approx((1 + 2 + 1 + 1 + 0.5) / 5)
    assert metrics["train/logprob_gap"] == pytest.approx(math.log(3))
    assert metrics["train/logprob_gap_mean"] == pytest.approx((math.log(3) + math.log(2)) / 5)
    assert metrics["train/engine_kl"] == pytest.approx((3 - math.log(3) - 1 + 0.5 + math.log(2) - 1) / 5)
    assert metrics["policy/entropy"] == 2.0
    # -w * min(r A, clip(r) A): 1.2, 2 * 1.5, 0.5, 0.8, 0
    assert float(out.loss) == pytest.approx((-1.2 + 3.0 - 0.5 + 0.8) / 5, rel=1e-6)


def test_far_off_policy_stays_finite():
    b = {k: (v.float() if v.is_floating_point() else v) for k, v in batch().items()}
    b["logp_old_T"] = b["logp_old_T"] - 500
    b["logp_engine_T"] = b["logp_engine_T"] - 1500
    new = b["logp_new_T"].clone().requires_grad_()
    for level in ("token", "sequence"):
        out = policy_loss(
            **{**b, "logp_new_T": new}, rl=RLConfig(tis_level=level, kl_coef=0.1), counts=PolicyCounts(20, 5)
        )
        out.loss.backward()
        assert torch.isfinite(out.loss) and torch.isfinite(new.grad).all()
        assert all(math.isfinite(v) for v in policy_metrics(out.sums, out.maxima).values())


def test_no_trained_token_keeps_the_graph():
    new = torch.randn(3, requires_grad=True)
    zeros = torch.zeros(3)
    out = policy_loss(
        new,
        new,
        zeros,
        zeros,
        zeros.bool(),
        torch.zeros(3, dtype=torch.int64),
        RLConfig(),
        PolicyCounts(0, 0),
    )
    out.loss.backward()
    assert out.loss == 0 and new.grad.abs().max() == 0


def test_refusals():
    b = batch()
    with pytest.raises(ValueError, match="loss_norm_constant is 0"):
        policy_loss(**b, rl=RLConfig(loss_norm="constant"), counts=PolicyCounts(1, 1))
    b["ref_logp_T"] = None
    with pytest.raises(ValueError, match="no reference"):
        policy_loss(**b, rl=RLConfig(kl_coef=0.1), counts=PolicyCounts(1, 1))


def test_compiles_without_a_graph_break():
    b = batch()
    rl = RLConfig(ratio="sequence", kl_coef=0.1)

    def step(new):
        out = policy_loss(**{**b, "logp_new_T": new}, rl=rl, counts=PolicyCounts(20, 5))
        return out.loss, out.sums, out.maxima

    grads = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        new = b["logp_new_T"].clone().requires_grad_()
        loss, sums, _ = function(new)
        loss.backward()
        grads.append((loss.detach(), sums["ratio"], new.grad))
    for eager, compiled in zip(*grads):
        torch.testing.assert_close(eager, compiled, rtol=1e-14, atol=1e-14)
