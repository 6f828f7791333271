"""Chunked log-probabilities against log_softmax: values, gradients, precision, compile."""

from __future__ import annotations

import random

import pytest
import torch
from distill_oracle import transformed

from torchspec.losses.distill import LogitTransform
from torchspec.losses.logprob import token_logprobs


def inputs(rows=11, width=5, vocab=13, dtype=torch.float64, scale=1.0):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(rows, width, generator=g, dtype=torch.float64) * scale).to(dtype)
    head = (torch.randn(vocab, width, generator=g, dtype=torch.float64) * scale).to(dtype)
    targets = torch.randint(-1, vocab, (rows,), generator=g)
    return hidden, head, targets, torch.randn(rows, generator=g, dtype=torch.float64).to(dtype)


def run(function, hidden, head, weights):
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    logp, entropy = function(hidden, head)
    (logp * weights).sum().backward()
    return logp.detach(), entropy.detach(), hidden.grad, head.grad


def dense(hidden, head, targets, temperature=1.0, transform=None):
    logits = transformed(hidden @ head.T, **(transform or {})) / temperature
    logq = torch.log_softmax(logits, -1)
    wanted = targets >= 0
    logp = torch.where(wanted, logq.gather(1, targets.clamp_min(0)[:, None]).squeeze(1), 0)
    return logp, torch.where(wanted, -(logq.exp() * logq).sum(-1), 0)


@pytest.mark.parity
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
@pytest.mark.parametrize(
    "transform", [None, {"scale": 0.5, "softcap": 2.0, "bias": torch.linspace(-1, 1, 13).double()}]
)
def test_equal_to_log_softmax(temperature, chunk_rows, transform, monkeypatch):
    monkeypatch.setattr("torchspec.losses.logits.BLOCK_ELEMENTS", 2 * 13)
    hidden, head, targets, weights = inputs(scale=1.5)
    got = run(
        lambda h, w: token_logprobs(
            h,
            w,
            targets,
            temperature=temperature,
            chunk_rows=chunk_rows,
            need_entropy=True,
            transform=LogitTransform(**transform) if transform else None,
        ),
        hidden,
        head,
        weights,
    )
    want = run(lambda h, w: dense(h, w, targets, temperature, transform), hidden, head, weights)
    for ours, theirs in zip(got, want):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    hidden, head, targets, _ = inputs(rows=4, vocab=6)
    function = lambda h, w: token_logprobs(h, w, targets.clamp_max(5), temperature=0.8, chunk_rows=3)[0]  # noqa: E731
    assert torch.autograd.gradcheck(function, (hidden.requires_grad_(), head.requires_grad_()))


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_lower_precision(dtype, tol):
    hidden, head, targets, weights = inputs(rows=30, width=16, dtype=dtype, scale=0.7)
    got = run(
        lambda h, w: token_logprobs(h, w, targets, chunk_rows=8, need_entropy=True),
        hidden,
        head,
        weights.float(),
    )
    want = run(lambda h, w: dense(h, w, targets), hidden.double(), head.double(), weights.double())
    assert got[0].dtype == torch.float32 and got[2].dtype == dtype and got[3].dtype == dtype
    for ours, theirs in zip(got, want):
        assert (ours.double() - theirs).norm() <= 2 * tol * theirs.norm()


def test_huge_logits_are_finite():
    hidden, head, targets, weights = inputs(dtype=torch.float32, scale=100.0)
    assert (hidden @ head.T).abs().max() > 1e4
    for x in run(lambda h, w: token_logprobs(h, w, targets, need_entropy=True), hidden, head, weights):
        assert torch.isfinite(x).all()


def test_unwanted_rows_are_never_read():
    hidden, head, targets, weights = inputs()
    targets[3] = -1
    hidden[3] = float("nan")
    logp, entropy, grad_hidden, grad_head = run(
        lambda h, w: token_logprobs(h, w, targets, need_entropy=True), hidden, head, weights
    )
    assert logp[3] == 0 and entropy[3] == 0 and grad_hidden[3].abs().max() == 0 and torch.isfinite(grad_head).all()
    logp, _, grad_hidden, grad_head = run(lambda h, w: token_logprobs(h, w, targets * 0 - 1), hidden, head, weights)
    assert logp.abs().max() == 0 and grad_head.abs().max() == 0 and grad_hidden.abs().max() == 0


def test_entropy_switch_and_detached():
    hidden, head, targets, _ = inputs()
    logp, entropy = token_logprobs(hidden.requires_grad_(), head, targets, need_entropy=False)
    assert entropy.abs().max() == 0 and not entropy.requires_grad and logp.requires_grad


def test_refuses_what_does_not_fit():
    hidden, head, targets, _ = inputs()
    with pytest.raises(ValueError, match="temperature above 0"):
        token_logprobs(hidden, head, targets, temperature=0.0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        token_logprobs(hidden, head, targets + 13)
    with pytest.raises(ValueError, match="Shapes do not fit"):
        token_logprobs(hidden, head, targets[:-1])


def test_compiles_without_a_graph_break():
    hidden, head, targets, weights = inputs()

    def function(h, w):
        return token_logprobs(h * 1.0, w * 1.0, targets, chunk_rows=4, need_entropy=True)

    eager = run(function, hidden, head, weights)
    compiled = run(torch.compile(function, fullgraph=True, backend="aot_eager"), hidden, head, weights)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled))


def test_operator_checks():
    hidden, head, targets, _ = inputs()
    torch.library.opcheck(
        torch.ops.torchspec.token_logprobs.default,
        (hidden.requires_grad_(), head.requires_grad_(), targets, None, 1.0, 4, True, 1.0, 0.0, ""),
    )
