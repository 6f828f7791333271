"""The policy equals transformers' Qwen3ForCausalLM and LlamaForCausalLM: logits, gradients and taps, in
fp32."""

from __future__ import annotations

import pytest
import torch
from policy_oracle import LAYERS, gradients, hf_model, pack, policy_of

CASES = [
    ("qwen3", True, "default"),
    ("qwen3", False, "yarn"),
    ("llama", False, "default"),
    ("llama", True, "llama3"),
    ("llama", False, "linear"),
    ("qwen3", True, "llama3"),
]


def close(found, expected, tolerance=1e-5):
    """Largest difference, relative to the largest entry where that is above 1."""
    return (found - expected).abs().max().item() <= tolerance * max(1.0, expected.abs().max().item())


@pytest.mark.parity
@pytest.mark.parametrize(("architecture", "tied", "scaling"), CASES)
def test_logits_gradients_and_taps(tmp_path, architecture, tied, scaling):
    """Three packed documents against one call of the oracle per document; lengths pass the scalings' borders
    (64)."""
    model = hf_model(architecture, tied=tied, scaling=scaling)
    policy = policy_of(model, tmp_path)
    lengths = (90, 1, 14)
    tokens_T, layout = pack(*lengths)
    expected = [model(doc[None], output_hidden_states=True) for doc in tokens_T.split(lengths)]
    out = policy(tokens_T, layout, tuple(range(LAYERS + 1)))

    logits_TV = out.hidden_TE @ policy.head_weight.T
    expected_TV = torch.cat([e.logits[0] for e in expected])
    assert close(logits_TV, expected_TV)
    for i in range(LAYERS):
        assert close(out.taps[i], torch.cat([e.hidden_states[i][0] for e in expected]))
    # transformers' last entry is after the final norm: normalising our last tap gives it
    assert close(model.model.norm(out.taps[LAYERS]), torch.cat([e.hidden_states[LAYERS][0] for e in expected]))
    assert not close(out.taps[LAYERS], out.hidden_TE)

    weight_TV = torch.randn_like(expected_TV)
    (expected_TV * weight_TV).sum().backward()
    (logits_TV * weight_TV).sum().backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    ours = gradients(policy)
    assert set(ours) == set(theirs)
    for name, grad in ours.items():
        assert close(grad, theirs[name]), name


@pytest.mark.parity
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_positions_past_2048(tmp_path, architecture):
    """A document of 2100 tokens: no table ends at a default length (declared: 256)."""
    model = hf_model(architecture, scaling="llama3", num_hidden_layers=1)
    policy = policy_of(model, tmp_path)
    tokens_T, layout = pack(5, 2100)
    with torch.no_grad():
        logits_TV = policy(tokens_T, layout).hidden_TE @ policy.head_weight.T
        expected_TV = model(tokens_T[None, 5:]).logits[0]
    assert close(logits_TV[5:], expected_TV)


@pytest.mark.parity
def test_packed_equals_one_document_at_a_time(tmp_path):
    policy = policy_of(hf_model(), tmp_path)
    lengths = (7, 33, 2, 1)
    tokens_T, layout = pack(*lengths)
    weight_TE = torch.randn(sum(lengths), 48)
    packed = policy(tokens_T, layout, (0, 2, LAYERS))
    (packed.hidden_TE * weight_TE).sum().backward()
    packed_grads = gradients(policy)
    outs = []
    for tokens, weight in zip(tokens_T.split(lengths), weight_TE.split(lengths)):
        outs.append(policy(tokens, pack(len(tokens))[1], (0, 2, LAYERS)))
        (outs[-1].hidden_TE * weight).sum().backward()
    assert close(packed.hidden_TE, torch.cat([o.hidden_TE for o in outs]))
    for i in (0, 2, LAYERS):
        assert close(packed.taps[i], torch.cat([o.taps[i] for o in outs]))
    for name, grad in gradients(policy).items():
        assert close(packed_grads[name], grad), name


@pytest.mark.parity
def test_fp64_master_is_fp64_throughout(tmp_path):
    """Rotary tables included: the policy in fp64 is the oracle in fp64, far below fp32's error."""
    model = hf_model("llama", scaling="default", num_hidden_layers=1, rope_parameters={"rope_theta": 500.0})
    policy = policy_of(model, tmp_path, dtype=torch.float64)
    tokens_T, layout = pack(40)
    model.double()
    inv_freq = 1.0 / 500.0 ** (torch.arange(0, 10, 2, dtype=torch.float64) / 10)
    angle = torch.arange(40)[:, None] * torch.cat([inv_freq, inv_freq])
    model.model.rotary_emb.forward = lambda x, position_ids: (angle.cos()[None], angle.sin()[None])
    with torch.no_grad():
        logits_TV = policy(tokens_T, layout).hidden_TE @ policy.head_weight.T
        expected_TV = model(tokens_T[None]).logits[0]
    # transformers' RMSNorm rounds through fp32 even in fp64, so the bound is the norm's
    assert close(logits_TV, expected_TV, 1e-6)
