"""The only file that touches torchtitan's moving parts: its dense Qwen3 and Llama definitions, read in torchtitan 0.3.0.

Two of their parts are replaced, both through torchtitan's own config seams:

- ``inner_attention`` by ``torchspec::branch_attention`` without branches, so that policy and draft share one attention,
  packed documents included;
- ``rope`` by one that reads tables made once per forward (rows of any position, every scaling that the draft knows), in
  Hugging Face's half-split layout for both architectures, so that no weight is permuted on load or save.

The models are containers here: ``torchspec/policy/model.py`` walks their layers. Splitting them into pipeline stages and
choosing the attention by ``layout.cp_size`` belong in this file too.

Legend: T rows of a pack, H query heads, G key/value heads, D head dim; B = 1 and L = T inside torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import RoPE
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.module import Module

from torchspec.attention import branch_attention
from torchspec.context_parallel.layout import PackedZigzag
from torchspec.policy.shape import PolicyShape
from torchspec.rope import apply_rope, rope_tables

TITAN_VERSION = "0.3.0"
"""The version whose names and signatures are used below."""

set_num_threads = torch.set_num_threads
"""Bound before vLLM is built: its CPU worker replaces torch's own by a function that does nothing."""

INIT_STD = 0.02


class BranchInnerAttention(Module):
    """torchtitan's inner attention: packed causal attention of the documents in ``attention_masks``, our layout."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, *, attention_masks: PackedZigzag, scale, enable_gqa
    ) -> Tensor:
        layout = attention_masks
        if layout.cp_size != 1:
            raise ValueError("The policy's attention under context parallelism is not built yet; use cp_size = 1.")
        out_THD, _ = branch_attention(
            q_BLHD[0],
            k_BLGD[0],
            v_BLGD[0],
            [],
            [],
            layout.cu_seqlens,
            layout.max_seqlen,
            scale if scale is not None else q_BLHD.shape[-1] ** -0.5,
        )
        return out_THD[None]


class TableRoPE(RoPE):
    """Rotation by tables made once per forward; they arrive in the place of torchtitan's ``positions``."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # RoPE's own would build a cache of max_seq_len rows in every layer
        self.config = config

    def forward(self, query: Tensor, key: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return apply_rope(query[0], *positions)[None], apply_rope(key[0], *positions)[None]


def rope_tables_for(shape: PolicyShape, layout: PackedZigzag, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, D/2] each, at the layout's positions."""
    return rope_tables(layout.positions_T, shape.head_dim, shape.rope_theta, shape.rope_scaling, dtype=dtype)


def _layer(shape: PolicyShape):
    qwen = shape.architecture == "qwen3"

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=shape.norm_eps, param_init={})

    attention: GQAttention.Config = make_gqa_config(
        dim=shape.hidden_size,
        n_heads=shape.num_heads,
        n_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        wqkv_param_init={},
        wo_param_init={},
        inner_attention=BranchInnerAttention.Config(),
        rope=TableRoPE.Config(dim=shape.head_dim, max_seq_len=shape.max_position_embeddings, theta=shape.rope_theta),
        fuse_qkv=False,
        qk_norm=norm(shape.head_dim) if qwen else None,
    )
    return (Qwen3TransformerBlock if qwen else Llama3TransformerBlock).Config(
        attention_norm=norm(shape.hidden_size),
        ffn_norm=norm(shape.hidden_size),
        attention=attention,
        feed_forward=make_ffn_config(
            dim=shape.hidden_size, hidden_dim=shape.intermediate_size, w1_param_init={}, w2w3_param_init={}
        ),
    )


def build_decoder(shape: PolicyShape, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """torchtitan's model of this shape with uninitialised parameters; the embedding is the head where they are tied."""
    model_class = Qwen3Model if shape.architecture == "qwen3" else Llama3Model
    config = model_class.Config(
        dim=shape.hidden_size,
        vocab_size=shape.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=shape.hidden_size, param_init={}
        ),
        norm=RMSNorm.Config(normalized_shape=shape.hidden_size, eps=shape.norm_eps, param_init={}),
        lm_head=Linear.Config(in_features=shape.hidden_size, out_features=shape.vocab_size, param_init={}),
        layers=[_layer(shape) for _ in range(shape.num_layers)],
        enable_weight_tying=shape.tie_word_embeddings,
    )
    with torch.device("meta"):
        decoder = config.build()
    decoder = decoder.to(dtype).to_empty(device=device)
    if shape.tie_word_embeddings:
        decoder.tok_embeddings.weight = decoder.lm_head.weight  # moving the model made two of the one
    return decoder


@torch.no_grad()
def init_decoder(decoder: nn.Module, seed: int) -> None:
    """Normal matrices (std 0.02) and unit norms, drawn on the CPU from a generator of its own in parameter order."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * INIT_STD)


def hf_names(shape: PolicyShape) -> dict[str, str]:
    """Hugging Face tensor name -> torchtitan parameter name, without the head of a tied model."""
    names = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight"}
    parts = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attention.qkv_linear.wq",
        "self_attn.k_proj": "attention.qkv_linear.wk",
        "self_attn.v_proj": "attention.qkv_linear.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    if shape.architecture == "qwen3":
        parts |= {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
    for i in range(shape.num_layers):
        names |= {f"model.layers.{i}.{hf}.weight": f"layers.{i}.{titan}.weight" for hf, titan in parts.items()}
    if not shape.tie_word_embeddings:
        names["lm_head.weight"] = "lm_head.weight"
    return names
