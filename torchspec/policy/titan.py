"""The only file that touches torchtitan: its dense Qwen3 and Llama definitions, built from our PolicyShape.

Read at torchtitan 0.3.0 (pinned; ``tests/policy/test_titan_names.py`` fails when a name used here moves).
Used of it: ``models.qwen3.model``, ``models.llama3.model``, parts of ``models.common``,
``protocols.module.Module`` and ``tools.utils`` (which believes in CUDA on a machine without it).

Two parts are ours, put in through torchtitan's own configs:
- inner attention: ``packed_attention``, which serves packed documents and any number of context-parallel
  ranks, on CPU too (torchtitan's FlexAttention has no CPU backward).  The layout passes through the layers as
  ``attention_masks``.
- rotary embedding: Hugging Face's half-split layout and every rope scaling that vLLM serves, by the formulas
  that the draft uses, so that a parameter *is* its Hugging Face tensor in both architectures.  Its tables are
  made once per forward for the rows at hand and pass through the layers as ``positions``; torchtitan's own
  would hold max_position_embeddings rows in every layer.

``Policy`` walks the layers; what changes under context parallelism is in ``packed_attention``, and a pipeline
stage is this decoder with the parts of other stages set to None.

Legend: T rows, E hidden, V vocabulary, L layers, H/G query/key heads, D head dim, F = D/2 rotary frequencies.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# vLLM's CPU worker replaces torch.set_num_threads by a no-op when an engine is built, hence the reference
# taken here
_set_num_threads = torch.set_num_threads

from torchtitan.tools import utils as _titan_utils  # noqa: E402


def _without_accelerator() -> None:
    """torchtitan assumes CUDA where it finds no accelerator; tell it CPU before its other modules read
    that."""
    if torch.accelerator.is_available():
        return
    _titan_utils.device_type = "cpu"
    _titan_utils.device_module = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
        get_device_name=lambda *_: "cpu",
        empty_cache=lambda: None,
        memory_stats=lambda *_: {},
        reset_peak_memory_stats=lambda *_: None,
    )


_without_accelerator()

from torchtitan.models.common import Embedding, Linear, RMSNorm, RoPE  # noqa: E402
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config  # noqa: E402
from torchtitan.models.common.param_init import skip_param_init  # noqa: E402
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock  # noqa: E402
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

from torchspec.context_parallel.layout import PackedZigzag  # noqa: E402
from torchspec.context_parallel.trunk import packed_attention  # noqa: E402
from torchspec.policy.config import PolicyConfig  # noqa: E402
from torchspec.policy.model import Policy, PolicyPart  # noqa: E402
from torchspec.policy.shape import PolicyShape, check_vocabulary, shape_from_config  # noqa: E402
from torchspec.rope import apply_rope  # noqa: E402

_DEFINITIONS = {
    "qwen3": (Qwen3Model, Qwen3TransformerBlock),
    "llama": (Llama3Model, Llama3TransformerBlock),
}
_TOP_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.qkv_linear.wq.weight": "self_attn.q_proj.weight",
    "attention.qkv_linear.wk.weight": "self_attn.k_proj.weight",
    "attention.qkv_linear.wv.weight": "self_attn.v_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}
_NO_INIT = {"weight": skip_param_init}  # weights are drawn by init_weights or read from a folder


def set_num_threads(num_threads: int) -> None:
    """torch.set_num_threads that still works after a vLLM engine has been built in this process."""
    _set_num_threads(num_threads)


class PackedAttention(Module):
    """torchtitan's inner attention slot, filled with packed causal attention over a layout."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Nothing to configure."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_1THD: Tensor,
        k_1TGD: Tensor,
        v_1TGD: Tensor,
        *,
        attention_masks: PackedZigzag,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        """[1, T, H, D]; ``attention_masks`` is the layout.  GQA follows from the shapes and is never
        expanded."""
        return packed_attention(q_1THD[0], k_1TGD[0], v_1TGD[0], attention_masks, scale=scale).unsqueeze(0)


class TableRoPE(RoPE):
    """Rotation by cos and sin tables [T, F], which arrive as ``positions``; holds nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        """torchtitan's fields, of which none is read."""

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # RoPE's own would build its cache
        self.config = config

    def forward(self, query: Tensor, key: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated query [1, T, H, D] and key [1, T, G, D], in their dtypes."""
        return apply_rope(query[0], *positions).unsqueeze(0), apply_rope(key[0], *positions).unsqueeze(0)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        """No cache to make."""


def _norm(shape: PolicyShape, size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=shape.norm_eps, param_init=_NO_INIT)


def _layer_config(shape: PolicyShape) -> Any:
    _, block_class = _DEFINITIONS[shape.architecture]
    return block_class.Config(
        attention_norm=_norm(shape, shape.hidden_size),
        ffn_norm=_norm(shape, shape.hidden_size),
        attention=make_gqa_config(
            dim=shape.hidden_size,
            n_heads=shape.num_heads,
            n_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            wqkv_param_init=_NO_INIT,
            wo_param_init=_NO_INIT,
            inner_attention=PackedAttention.Config(),
            rope=TableRoPE.Config(dim=shape.head_dim, max_seq_len=shape.max_position_embeddings),
            qk_norm=_norm(shape, shape.head_dim) if shape.architecture == "qwen3" else None,
        ),
        feed_forward=make_ffn_config(
            dim=shape.hidden_size,
            hidden_dim=shape.intermediate_size,
            w1_param_init=_NO_INIT,
            w2w3_param_init=_NO_INIT,
        ),
    )


def decoder_config(shape: PolicyShape) -> Any:
    """torchtitan's model config (``Qwen3Model.Config`` or ``Llama3Model.Config``) of the shape."""
    model_class, _ = _DEFINITIONS[shape.architecture]
    return model_class.Config(
        dim=shape.hidden_size,
        vocab_size=shape.vocab_size,
        enable_weight_tying=shape.tie_word_embeddings,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=shape.hidden_size, param_init=_NO_INIT
        ),
        norm=_norm(shape, shape.hidden_size),
        lm_head=Linear.Config(in_features=shape.hidden_size, out_features=shape.vocab_size, param_init=_NO_INIT),
        layers=[_layer_config(shape) for _ in range(shape.num_layers)],
    )


def hf_name(name: str) -> str:
    """Hugging Face name of a torchtitan decoder's parameter; the same for dense Qwen3 and Llama."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, index, rest = name.split(".", 2)
    return f"model.layers.{index}.{_LAYER_NAMES[rest]}"


def empty_policy(
    shape: PolicyShape,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    activation_checkpoint: bool = False,
    part: PolicyPart | None = None,
) -> Policy:
    """A policy, or the ``part`` of it that this rank holds, whose weights are uninitialised memory; the global
    generators are not touched."""
    with torch.device("meta"):  # torch's own layers would draw their initial values from the global generator
        decoder = decoder_config(shape).build()
    hf_shapes = {hf_name(name): tuple(p.shape) for name, p in decoder.named_parameters()}
    if part is not None:
        _keep_only(decoder, part)
    decoder.to(dtype).to_empty(device=device)
    if shape.tie_word_embeddings and None not in (decoder.tok_embeddings, decoder.lm_head):
        # to_empty gave each of the two names its own memory
        decoder.tok_embeddings.weight = decoder.lm_head.weight
    return Policy(
        decoder,
        shape,
        {name: hf_name(name) for name, _ in decoder.named_parameters()},
        hf_shapes,
        compute_dtype=compute_dtype or dtype,
        activation_checkpoint=activation_checkpoint,
    )


def _keep_only(decoder: torch.nn.Module, part: PolicyPart) -> None:
    for index in list(decoder.layers):
        if int(index) not in part.layers:
            del decoder.layers[index]
    if not part.embed:
        decoder.tok_embeddings = None
    if not part.head:
        decoder.norm = decoder.lm_head = None


@torch.no_grad()
def init_weights(policy: Policy, seed: int) -> None:
    """Draw the weights, each tensor from a generator of its own: the same for any split of the model and any
    device.

    Norms are 1.  Matrices are normal with std 0.64 / sqrt(E), which is the usual 0.02 at E = 1024 and larger
    for a tiny model, which would learn slowly from 0.02; the two that write into the residual stream are
    divided by sqrt(2 L).
    """
    std = 0.64 * policy.shape.hidden_size**-0.5
    for name, parameter in policy.hf_parameters().items():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        values = torch.empty(parameter.shape, dtype=torch.float32)
        values.normal_(0.0, std / (2 * policy.shape.num_layers) ** 0.5 if writes else std, generator=generator)
        parameter.copy_(values)


def read_shape(config: PolicyConfig, vocab_size: int | None) -> PolicyShape:
    """The shape of the [policy] table's model: of ``config.path``, or of the sizes in the table.

    Raises:
        ConfigError: what of the folder or the table cannot work.
    """
    if not config.path:
        return shape_from_config(config, vocab_size)
    from torchspec.policy.hf import read_folder

    shape = read_folder(Path(config.path)).shape
    check_vocabulary(shape, vocab_size)
    return shape


def build_policy(
    config: PolicyConfig,
    *,
    vocab_size: int | None,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    part: PolicyPart | None = None,
) -> Policy:
    """The policy of the [policy] table: read from ``config.path``, or random.

    Args:
        config: the table.
        vocab_size: number of the tokenizer's ids; the default of ``config.vocab_size`` and its least value.
        seed: of the random weights.
        device, dtype: of the master weights.
        compute_dtype: of the forward; None: the master dtype.
        part: what this rank of a pipeline holds; None: everything.

    Raises:
        ConfigError: what of the folder or the table cannot work.
    """
    from torchspec.policy.hf import load_weights, read_folder

    policy = empty_policy(
        read_shape(config, vocab_size),
        device=device,
        dtype=dtype,
        compute_dtype=compute_dtype,
        activation_checkpoint=config.activation_checkpoint,
        part=part,
    )
    if not config.path:
        init_weights(policy, seed)
        return policy
    source = read_folder(Path(config.path))
    policy.hf_config, policy.generation_config = source.config, source.generation_config
    load_weights(policy, Path(config.path))
    return policy
