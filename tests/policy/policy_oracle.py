"""Random Hugging Face models, the oracle of the policy's tests, and the policies read from their folders."""

from __future__ import annotations

import torch

from torchspec.context_parallel.layout import PackedZigzag
from torchspec.policy.config import PolicyConfig
from torchspec.policy.titan import build_policy

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS = {
    "default": {"rope_type": "default"},
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
VOCAB, LAYERS = 53, 3


def hf_model(architecture="qwen3", *, tied=False, scaling="default", seed=None, vocab=VOCAB, **changes):
    """A random fp32 model of Hugging Face: E = 48, 6 query heads on 2 key heads (ratio 3), head dim 10."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[architecture]
    sizes = dict(
        vocab_size=vocab,
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        max_position_embeddings=256,
        rms_norm_eps=3e-6,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 500.0, **SCALINGS[scaling]},
        bos_token_id=None,
        eos_token_id=7,
        pad_token_id=None,
    )
    config = config_class(**{**sizes, **changes})
    config._attn_implementation = "eager"
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(torch.seed() if seed is None else seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else 0.15 * noise)
    return model


def policy_of(model, folder, *, compute_dtype=None, dtype=torch.float32, **config):
    """The policy that build_policy reads from the folder to which Hugging Face saves the model."""
    model.save_pretrained(folder)
    return build_policy(
        PolicyConfig(path=str(folder), **config),
        vocab_size=None,
        seed=0,
        device="cpu",
        dtype=dtype,
        compute_dtype=compute_dtype,
    )


def pack(*lengths, vocab=VOCAB):
    """Fresh random tokens [T] and the layout of their documents."""
    return torch.randint(vocab, (sum(lengths),)), PackedZigzag(lengths)


def gradients(policy):
    """A copy of the gradients under Hugging Face names (an untied head may have none); the policy's are
    cleared."""
    found = {name: p.grad.clone() for name, p in policy.hf_parameters().items() if p.grad is not None}
    policy.zero_grad()
    return found
