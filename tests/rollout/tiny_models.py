"""Small random policies and EAGLE-3 drafts in the form that vLLM loads, for the tests of the rollout room.

The policies are Hugging Face's own Qwen3, so that the oracle of every test is Hugging Face's forward in fp32. The
drafts are written tensor by tensor after the checkpoint contract of vLLM's LlamaForCausalLMEagle3.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 4, 2, 32, 3


def make_policy(folder: Path, *, vocab: int, tied: bool, seed: int, eos: int | list[int] | None = None, moved: int = 0):
    """Write a random Qwen3 policy; returns the Hugging Face model (fp32, eval). ``moved`` > 0 is the seed of a small
    random change of every tensor, as if trained on.

    All embeddings share a large common part, so that some tokens are likely whatever came before: a draft that knows
    only these (draft_for) has a good part of its tokens accepted.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        rope_theta=10000.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["Qwen3ForCausalLM"],
    )
    model = Qwen3ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
        common = torch.randn(HIDDEN, generator=generator)
        model.model.embed_tokens.weight.add_(0.4 * common)
        model.model.norm.weight.mul_(2.5)  # peaked distributions
        if moved:
            change(dict(model.named_parameters()), moved)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    save_file(dict(hf_weights(model, tied_head=False)), str(folder / "model.safetensors"))
    (folder / "generation_config.json").write_text(json.dumps({} if eos is None else {"eos_token_id": eos}))
    return model


def change(tensors: dict[str, torch.Tensor], seed: int) -> None:
    """Move every floating-point tensor by 5 % of its size, in place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.add_(0.05 * tensor.std() * torch.randn(tensor.shape, generator=generator))


def hf_weights(model, *, tied_head: bool = True) -> list[tuple[str, torch.Tensor]]:
    """All tensors under their Hugging Face names; with tied_head the tied lm_head.weight too, as a refit needs it."""
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings and not tied_head:
        weights.pop("lm_head.weight", None)
    return [(name, tensor.contiguous()) for name, tensor in weights.items()]


@torch.no_grad()
def hf_logprobs(model, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """log p of each response token in fp32, by Hugging Face's forward of the whole sequence."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def draft_tensors(
    *,
    vocab: int,
    draft_vocab: int = 0,
    own_head: bool = True,
    own_embed: bool = False,
    seed: int,
    std: float = 0.15,
    offset: int = 0,
) -> dict[str, torch.Tensor]:
    """Random tensors of an EAGLE-3 draft with three taps. A draft_vocab keeps every (vocab // draft_vocab)-th token,
    beginning with ``offset``."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return std * torch.randn(shape, generator=generator)

    q_rows, kv_rows, e = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, HIDDEN
    tensors = {
        "fc.weight": random(e, 3 * e),
        "midlayer.hidden_norm.weight": 1 + random(e),
        "midlayer.input_layernorm.weight": 1 + random(e),
        "midlayer.self_attn.q_proj.weight": random(q_rows, 2 * e),
        "midlayer.self_attn.k_proj.weight": random(kv_rows, 2 * e),
        "midlayer.self_attn.v_proj.weight": random(kv_rows, 2 * e),
        "midlayer.self_attn.o_proj.weight": random(e, q_rows),
        "midlayer.post_attention_layernorm.weight": 1 + random(e),
        "midlayer.mlp.gate_proj.weight": random(96, e),
        "midlayer.mlp.up_proj.weight": random(96, e),
        "midlayer.mlp.down_proj.weight": random(e, 96),
        "norm.weight": 1 + random(e),
    }
    if own_head:
        tensors["lm_head.weight"] = random(draft_vocab or vocab, e)
    if own_embed:
        tensors["embed_tokens.weight"] = random(vocab, e)
    if draft_vocab:
        kept = kept_tokens(vocab, draft_vocab, offset)
        tensors["d2t"] = kept - torch.arange(draft_vocab)
    return tensors


def kept_tokens(vocab: int, draft_vocab: int, offset: int) -> torch.Tensor:
    return torch.arange(draft_vocab) * (vocab // draft_vocab) + offset


def draft_for(
    policy, *, vocab: int, draft_vocab: int = 0, own_embed: bool = False, seed: int, offset: int = 0
) -> dict[str, torch.Tensor]:
    """A draft with some skill: it sees the residual stream before the last layer, and has about the policy's final
    norm and head."""
    tensors = draft_tensors(
        vocab=vocab, draft_vocab=draft_vocab, own_embed=own_embed, seed=seed, std=0.05, offset=offset
    )
    tensors["fc.weight"][:, 2 * HIDDEN :] += torch.eye(HIDDEN)
    tensors["norm.weight"] *= policy.model.norm.weight.detach()
    head = policy.lm_head.weight.detach()
    kept = kept_tokens(vocab, draft_vocab, offset) if draft_vocab else slice(None)
    tensors["lm_head.weight"] = head[kept] + 0.2 * tensors["lm_head.weight"]
    return tensors


def write_draft(folder: Path, tensors: dict[str, torch.Tensor], *, vocab: int, draft_vocab: int = 0) -> Path:
    """Write tensors and the matching config.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "vocab_size": vocab,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "tie_word_embeddings": False,
    }
    if draft_vocab:
        config["draft_vocab_size"] = draft_vocab
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def read_draft(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(str(Path(folder) / "model.safetensors")).items())
