"""The EAGLE-3 checkpoint as vLLM 0.32 reads it: config.json, tensor names, and the way back.

Source of the contract: vllm/model_executor/models/llama_eagle3.py (read at 0.32.0). The module tree of
``Eagle3Draft`` carries the checkpoint's names (``midlayer.self_attn.q_proj.weight``...), so that a tensor has
one name everywhere. There is no embed_tokens: vLLM shares the policy's, which the draft is trained with too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchspec.draft.eagle3.shape import Eagle3Shape, check_tap_ids, shape_from_config
from torchspec.draft.folder import check_census, read_config, read_weights
from torchspec.errors import ConfigError
from torchspec.rope import check_rope_scaling

if TYPE_CHECKING:
    from torchspec.draft.config import DraftConfig
    from torchspec.draft.eagle3.model import Eagle3Draft
    from torchspec.policy.shape import PolicyShape

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
UNSUPPORTED = {
    # config.json entry -> the value under which it does nothing
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "logit_scale": 1.0,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "use_aux_hidden_state": True,
}


def hf_config(shape: Eagle3Shape) -> dict[str, Any]:
    """config.json of a draft. Tap ids are always written: vLLM's fallback would feed it other layers."""
    rope = {"rope_theta": shape.rope_theta, **(shape.rope_scaling or {"rope_type": "default"})}
    config = {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_parameters": rope,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "norm_before_residual": shape.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(shape.tap_ids),
    }
    if shape.rope_scaling is not None:
        config["rope_scaling"] = shape.rope_scaling  # the spelling of transformers 4
    if len(shape.tap_ids) != 3:
        # vLLM assumes 3 when the ids stand at the top level
        config["num_aux_hidden_states"] = len(shape.tap_ids)
    return config


def expected_tensors(shape: Eagle3Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint and its shape."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors = {
        "fc.weight": (hidden, len(shape.tap_ids) * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (key, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (key, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (shape.draft_vocab_size, hidden),
    }
    if shape.has_draft_vocab:
        tensors["d2t"] = (shape.draft_vocab_size,)
    return tensors


def hf_weights(draft: Eagle3Draft) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the whole checkpoint, gathered where a tensor is sharded, in the master dtype.

    Raises:
        RuntimeError: the module tree and the checkpoint's census differ (a programming error).
    """
    state = draft.state_dict()
    expected = expected_tensors(draft.shape)
    if set(state) != set(expected):
        raise RuntimeError(f"The draft's tensors are not the checkpoint's: {sorted(set(state) ^ set(expected))}.")
    for name in expected:
        tensor = state[name].detach()
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shape_from_hf(
    found: Mapping[str, Any], config: DraftConfig, policy: PolicyShape, folder: str | Path
) -> Eagle3Shape:
    """The shape that a checkpoint's config.json declares, checked against the policy and the [draft] table.

    The context length is the policy's, whatever the file says: a stale one would end drafting there.

    Raises:
        ConfigError: a feature that this draft does not have, or a value that does not fit, with both values.
    """
    eagle = found.get("eagle_config") or {}
    _refuse_unsupported(found, eagle, folder)
    own = shape_from_config(replace(config, tap_ids=_tap_ids(found, eagle, config, policy, folder)), policy)
    rope = dict(found.get("rope_parameters") or found.get("rope_scaling") or {})
    hidden, heads = found.get("hidden_size"), found.get("num_attention_heads")
    head_dim = found.get("head_dim") or (hidden // heads if hidden and heads else None)
    declared = {
        "hidden_size": hidden,
        "vocab_size": found.get("vocab_size"),
        "num_heads": heads,
        "num_kv_heads": found.get("num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate_size": found.get("intermediate_size"),
        "draft_vocab_size": found.get("draft_vocab_size") or found.get("vocab_size"),
    }
    if absent := [name for name, value in declared.items() if not isinstance(value, int)]:
        raise ConfigError(f"config.json of the draft in {folder} gives no whole number for {', '.join(absent)}.")
    for name in ("hidden_size", "vocab_size"):
        if declared[name] != getattr(own, name):
            raise ConfigError(
                f"The draft in {folder} has {name} {declared[name]}, the policy "
                f"{getattr(own, name)}: it was made for another "
                "policy. Name a draft of this policy in draft.path, or leave it empty."
            )
    settings = {
        "num_heads": "num_heads",
        "num_kv_heads": "num_kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "intermediate_size",
        "draft_vocab_size": "vocab_size",
    }
    for name, setting in settings.items():
        wanted = getattr(config, setting)
        if wanted and wanted != declared[name]:
            raise ConfigError(
                f"draft.{setting} is {wanted}, but the draft in {folder} has {declared[name]}; leave the setting at 0."
            )
    norm_before_residual = bool(found.get("norm_before_residual", False))
    if config.norm_before_residual and not norm_before_residual:
        raise ConfigError(
            f"draft.norm_before_residual is true, but the draft in {folder} was trained without it; leave it out."
        )
    return replace(
        own,
        **declared,
        norm_before_residual=norm_before_residual,
        norm_eps=float(found.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or found.get("rope_theta") or 10000.0),
        rope_scaling=check_rope_scaling(rope),
    )


def _refuse_unsupported(found: Mapping[str, Any], eagle: Mapping[str, Any], folder: str | Path) -> None:
    architectures = found.get("architectures") or []
    if not set(architectures) & set(ARCHITECTURES):
        raise ConfigError(
            f"The draft in {folder} has architectures {list(architectures)}; eagle3 reads {', '.join(ARCHITECTURES)}."
        )
    for name, harmless in UNSUPPORTED.items():
        value = eagle.get(name, found.get(name))
        if value is not None and value != harmless:
            raise ConfigError(
                f"The draft in {folder} has {name} = {value!r}; this EAGLE-3 draft supports {harmless!r} only."
            )
    target = found.get("target_hidden_size")
    if target is not None and target != found.get("hidden_size"):
        raise ConfigError(
            f"The draft in {folder} is {found.get('hidden_size')} wide for a policy {target} "
            "wide; equal widths are supported only."
        )


def _tap_ids(
    found: Mapping[str, Any],
    eagle: Mapping[str, Any],
    config: DraftConfig,
    policy: PolicyShape,
    folder: str | Path,
) -> tuple[int, ...]:
    """Tap ids of the file, or of the config where the file has none; both present must agree."""
    ids = found.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    if not ids and not config.tap_ids:
        raise ConfigError(
            f"The draft in {folder} does not say which tap ids it was trained on (eagle_aux_hidden_state_layer_ids): "
            "set draft.tap_ids to them."
        )
    if not ids:
        return check_tap_ids(config.tap_ids, policy.num_layers)
    # sorted as vLLM does: fc's columns ascend whatever the list's order
    ids = check_tap_ids(sorted(ids), policy.num_layers)
    if config.tap_ids and tuple(config.tap_ids) != ids:
        raise ConfigError(
            f"draft.tap_ids is {list(config.tap_ids)}, but the draft in {folder} was trained on {list(ids)}."
        )
    return ids


def read_checkpoint(
    folder: str | Path, config: DraftConfig, policy: PolicyShape
) -> tuple[Eagle3Shape, dict[str, Tensor]]:
    """Shape and state dict of a draft folder, after the census both ways.

    ``layers.0.`` is accepted for ``midlayer.`` and ``t2d`` is dropped, as vLLM does.

    Raises:
        ConfigError: missing, corrupt, unknown, misshaped, or made for another policy.
    """
    shape = shape_from_hf(read_config(folder), config, policy, folder)
    found = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in read_weights(folder).items()}
    if "embed_tokens.weight" in found:
        raise ConfigError(
            f"The draft in {folder} carries its own embed_tokens.weight. A TorchSpec draft shares the policy's "
            "embedding: remove the tensor if it is a copy of the policy's."
        )
    found.pop("t2d", None)
    expected = expected_tensors(shape)
    check_census(found, expected, folder)
    if shape.has_draft_vocab:
        check_d2t(found["d2t"], shape.vocab_size)
    return shape, found


def check_d2t(d2t_Vd: Tensor, vocab_size: int) -> None:
    """Refuse a d2t that is not int64 or whose targets (i + d2t[i]) repeat or leave the vocabulary."""
    if d2t_Vd.dtype != torch.int64:
        raise ConfigError(f"The draft's d2t is {d2t_Vd.dtype}; it must be int64 offsets (target id = i + d2t[i]).")
    targets_Vd = torch.arange(len(d2t_Vd), device=d2t_Vd.device) + d2t_Vd
    if bool((targets_Vd < 0).any()) or bool((targets_Vd >= vocab_size).any()):
        raise ConfigError(
            f"The draft's d2t points to token {int(targets_Vd.min())}..{int(targets_Vd.max())}, outside the policy's "
            f"vocabulary of {vocab_size}; it must hold offsets (target id = i + d2t[i])."
        )
    if len(targets_Vd.unique()) != len(targets_Vd):
        raise ConfigError("The draft's d2t names a policy token twice; it must hold offsets (target id = i + d2t[i]).")
