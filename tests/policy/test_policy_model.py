"""What a forward promises besides its values: taps, dtypes, recomputation, seeds, refusals."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from policy_oracle import LAYERS, gradients, hf_model, pack, policy_of

from torchspec.context_parallel.layout import PackedZigzag
from torchspec.errors import ConfigError
from torchspec.policy.config import PolicyConfig
from torchspec.policy.model import PolicyPart
from torchspec.policy.titan import build_policy

SMALL = dict(hidden_size=48, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=10, intermediate_size=40)
ALL_TAPS = tuple(range(LAYERS + 1))


def random_policy(seed=0, tokenizer_size=53, compute_dtype=None, **config):
    return build_policy(
        PolicyConfig(**{**SMALL, **config}),
        vocab_size=tokenizer_size,
        seed=seed,
        device="cpu",
        compute_dtype=compute_dtype,
    )


def backward(policy, tokens_T, layout, weight_TE, tap_ids=()):
    out = policy(tokens_T, layout, tap_ids)
    (out.hidden_TE.float() * weight_TE).sum().backward()
    return out, gradients(policy)


@pytest.mark.parametrize("activation_checkpoint", [False, True])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_taps_leave_the_gradients_bit_equal_and_are_never_modified(compute_dtype, activation_checkpoint):
    policy = random_policy(compute_dtype=compute_dtype, activation_checkpoint=activation_checkpoint)
    tokens_T, layout = pack(9, 20)
    weight_TE = torch.randn(29, 48)
    out, with_taps = backward(policy, tokens_T, layout, weight_TE, ALL_TAPS)
    after = {i: tap.clone() for i, tap in out.taps.items()}
    plain, without = backward(policy, tokens_T, layout, weight_TE)
    assert plain.taps == {}
    assert torch.equal(out.hidden_TE, plain.hidden_TE)
    for name, grad in with_taps.items():
        assert torch.equal(grad, without[name]), name
    versions = {i: tap._version for i, tap in policy(tokens_T, layout, ALL_TAPS).taps.items()}
    assert versions == dict.fromkeys(ALL_TAPS, 0), "something wrote into a tap"
    for i in ALL_TAPS:
        assert not out.taps[i].requires_grad and out.taps[i].dtype == compute_dtype
        assert torch.equal(out.taps[i], after[i])
    assert torch.equal(out.taps[0], policy.embed_weight[tokens_T].to(compute_dtype))


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_activation_checkpoint_gives_the_same_gradients_and_saves_less(compute_dtype):
    policy = random_policy(compute_dtype=compute_dtype)
    tokens_T, layout = pack(30, 11)
    weight_TE = torch.randn(41, 48)

    def saved_bytes():
        sizes = {}

        def count(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            policy(tokens_T, layout)
        return sum(sizes.values())

    plain, plain_bytes = backward(policy, tokens_T, layout, weight_TE)[1], saved_bytes()
    policy.activation_checkpoint = True
    recomputed, recomputed_bytes = backward(policy, tokens_T, layout, weight_TE)[1], saved_bytes()
    for name, grad in plain.items():
        assert torch.equal(grad, recomputed[name]), name
    assert recomputed_bytes < plain_bytes / 2


def test_recomputation_keeps_the_attention_output(monkeypatch):
    """One run of the kernel per layer, not two: under context parallel the second would move the keys
    again."""
    from torchspec.attention import op

    calls = []
    kernel_for = op.kernel_for

    class Counting:
        def __init__(self, kernel):
            self.kernel = kernel

        def trunk_forward(self, *args):
            calls.append(1)
            return self.kernel.trunk_forward(*args)

        def trunk_backward(self, *args):
            return self.kernel.trunk_backward(*args)

    monkeypatch.setattr(op, "kernel_for", lambda q: Counting(kernel_for(q)))
    policy = random_policy(activation_checkpoint=True)
    tokens_T, layout = pack(12)
    policy(tokens_T, layout).hidden_TE.sum().backward()
    assert len(calls) == LAYERS


@pytest.mark.parametrize("tied", [False, True])
def test_bf16_compute_on_fp32_master_weights(tmp_path, tied):
    """Gradients arrive in fp32 on the master and point where fp32's point; a token's many rows add up in
    fp32."""
    model = hf_model(tied=tied)
    exact = policy_of(model, tmp_path / "a")
    policy = policy_of(model, tmp_path / "b", compute_dtype=torch.bfloat16)
    tokens_T, layout = pack(60, 20)
    weight_TE = torch.randn(80, 48)
    _, expected = backward(exact, tokens_T, layout, weight_TE)
    out, found = backward(policy, tokens_T, layout, weight_TE)
    assert out.hidden_TE.dtype == torch.bfloat16
    for name, grad in found.items():
        assert grad.dtype == torch.float32
        cosine = torch.cosine_similarity(grad.flatten(), expected[name].flatten(), dim=0)
        assert cosine > 0.99, (name, cosine)
    embedding = found["model.embed_tokens.weight"]
    assert not torch.equal(embedding, embedding.bfloat16().float()), "summed in bf16"


def test_building_touches_no_global_state():
    states = (
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_state()[1].copy(),
        torch.get_default_dtype(),
    )
    random_policy()
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == numpy.random.get_state()[1]).all()
    assert states[3] == torch.get_default_dtype()


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_seed_decides_the_weights(architecture):
    first, again, other = (dict(random_policy(s, architecture=architecture).hf_weights()) for s in (3, 3, 4))
    assert set(first) == set(again)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert tensor.ndim == 1 or not torch.equal(tensor, other[name])
        if tensor.ndim == 1:
            assert (tensor == 1).all()
    # every layer has draws of its own
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])
    # tensors do not depend on how many layers there are beside them
    deeper = dict(random_policy(3, architecture=architecture, num_layers=5).hf_weights())
    assert torch.equal(first["model.layers.2.mlp.up_proj.weight"], deeper["model.layers.2.mlp.up_proj.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_hf_weights_name_the_head_also_when_tied(tied):
    policy = random_policy(tie_word_embeddings=tied)
    weights = dict(policy.hf_weights())
    assert torch.equal(weights["lm_head.weight"], policy.head_weight)
    assert (weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()) == tied
    assert ("lm_head.weight" in dict(policy.hf_weights(include_tied_head=False))) != tied
    assert all(t.dtype == torch.float32 and not t.requires_grad for t in weights.values())
    assert len(list(policy.parameters())) == len(weights) - tied


def test_state_dict_restores_a_tied_policy():
    policy, other = random_policy(1), random_policy(2)
    other.load_state_dict(policy.state_dict())
    tokens_T, layout = pack(10)
    assert torch.equal(policy(tokens_T, layout).hidden_TE, other(tokens_T, layout).hidden_TE)
    assert other.head_weight is other.embed_weight


def test_a_stage_without_embedding_or_norm_takes_and_gives_rows():
    """What a pipeline stage does: layers 0 and then 1..2 with the norm are the whole; tap ids stay the
    model's."""
    whole = random_policy()
    first, last = whole.stage(PolicyPart((0,), True, False)), whole.stage(PolicyPart((1, 2), False, True))
    tokens_T, layout = pack(8, 5)
    expected = whole(tokens_T, layout, ALL_TAPS)
    taps = ({}, {})
    rows_1TE = last.decode(first.decode(first.embed(tokens_T), layout, ALL_TAPS, taps[0]), layout, ALL_TAPS, taps[1])
    assert torch.equal(rows_1TE[0], expected.hidden_TE)
    assert set(taps[0]) == set(first.tap_points()) == {0} and set(taps[1]) == set(last.tap_points()) == {1, 2, 3}
    for i, tap in {**taps[0], **taps[1]}.items():
        assert torch.equal(tap, expected.taps[i])
    held = [name for stage in (first, last) for name in stage.hf_parameters()]
    assert set(held) == set(whole.hf_parameters())


def test_refusals_are_sentences():
    policy = random_policy()
    tokens_T, layout = pack(6)
    with pytest.raises(ValueError, match="The layout has 6 rows; got tokens of shape"):
        policy(tokens_T[:5], layout)
    with pytest.raises(ValueError, match="Tap id 4 does not exist in a policy of 3 layers"):
        policy(tokens_T, layout, (1, 4))
    with pytest.raises(ValueError, match="cp_mesh"):
        policy(torch.randint(53, (4,)), PackedZigzag([8], cp_size=2, cp_rank=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_kv_heads=4), "num_kv_heads .4. does not divide its num_heads .6."),
        (dict(head_dim=9), "head_dim is 9; rotary embedding needs an even one"),
        (dict(num_layers=0), "num_layers is 0; it must be a whole number of at least 1"),
        (dict(vocab_size=50), "tokenizer has 53 token ids and the policy's vocab_size is 50"),
        (dict(norm_eps=0.0), "norm_eps is 0.0; it must be a number above 0"),
        (dict(architecture="llama", hidden_size=46), "num_heads .6. must divide its hidden_size .46."),
    ],
)
def test_sizes_that_cannot_work(changes, message):
    with pytest.raises(ConfigError, match=message):
        random_policy(**changes)


def test_the_vocabulary_is_the_tokenizers_unless_larger():
    assert random_policy().shape.vocab_size == 53
    assert random_policy(vocab_size=64).embed_weight.shape == (64, 48)
    with pytest.raises(ConfigError, match="no tokenizer to take it from"):
        random_policy(tokenizer_size=None)
