"""What a config may not say. Torch-free: it runs before anything heavy is imported and before any process
group is made.

Every fault is one sentence with the setting, its value and what would work; all faults are reported together.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from torchspec.config import Config
from torchspec.errors import ConfigError
from torchspec.pipeline.schedule import SPLIT_BACKWARD, rank_of_stages

# Settings with a smallest value.
AT_LEAST = {
    "seed": 0,
    "policy.hidden_size": 1,
    "policy.num_layers": 1,
    "policy.num_heads": 1,
    "policy.num_kv_heads": 1,
    "policy.head_dim": 2,
    "policy.intermediate_size": 1,
    "policy.vocab_size": 0,
    "policy.max_position_embeddings": 2,
    "draft.ttt_steps": 1,
    "draft.vocab_size": 0,
    "draft.num_heads": 0,
    "draft.num_kv_heads": 0,
    "draft.head_dim": 0,
    "draft.intermediate_size": 0,
    "draft.every": 1,
    "draft.extra_steps": 0,
    "environment.eval_items": 1,
    "environment.questions_per_prompt": 1,
    "rollout.sampling.max_tokens": 1,
    "rollout.num_speculative_tokens": 0,
    "rollout.max_model_len": 2,
    "rollout.max_num_seqs": 1,
    "rollout.max_num_batched_tokens": 0,
    "rollout.kv_cache_mb": 1,
    "rollout.threads": 0,
    "rl.prompts_per_step": 1,
    "rl.updates_per_rollout": 1,
    "rl.loss_norm_constant": 0,
    "rl.clip_high": 0,
    "rl.kl_coef": 0,
    "rl.tis_cap": 0,
    "train.steps": 1,
    "train.tokens_per_microbatch": 2,
    "train.num_threads": 0,
    "train.logprob_chunk_rows": 1,
    "train.max_skipped_steps": 0,
    "parallelism.context_parallel_degree": 1,
    "parallelism.trunk_budget_mb": 1,
    "pipeline.ranks": 1,
    "pipeline.stages_per_rank": 0,
    "pipeline.draft_cost": 0,
    "pipeline.tap_slots": 0,
    "draft.stage": -1,
    "warm_start.steps": 0,
    "warm_start.batch_size": 1,
    "eval.every": 0,
    "eval.items": 1,
    "eval.sampling.temperature": 0,
    "eval.sampling.max_tokens": 0,
    "eval.sampling.top_k": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 0,
    "metrics.samples_per_step": 0,
    "metrics.print_samples": 0,
    **{
        f"{model}.optimizer.{name}": 0
        for model in ("policy", "draft")
        for name in ("lr", "weight_decay", "max_grad_norm", "warmup_steps")
    },
}
AT_MOST = {"seed": 2**63 - 1, "train.num_threads": 1024, "rollout.threads": 1024}
ABOVE_ZERO = (
    "policy.rope_theta",
    "policy.norm_eps",
    "draft.temperature",
    "draft.loss_weight",
    "environment.scorer_timeout_s",
    "rollout.deadline_s",
    "parallelism.timeout_s",
    "pipeline.deadline_s",
    "warm_start.lr",
    "policy.optimizer.eps",
    "draft.optimizer.eps",
)
FP32_ON_GPU = (
    "train.compute_dtype = 'float32' on a GPU: flash attention there serves bfloat16; set train.compute_dtype to "
    "'bfloat16' or 'auto' (the master weights stay float32), or device to 'cpu'."
)
SHARES = ("environment.max_failed_share", "policy.optimizer.min_lr_ratio", "draft.optimizer.min_lr_ratio")


def validate(config: Config, *, check_files: bool = True) -> None:
    """Raise ConfigError with a sentence for every setting that cannot work, alone or with the others.

    ``check_files`` = False leaves out whether the folders and files named in the config exist.
    """
    faults = [
        *_ranges(config),
        *_policy(config),
        *_draft(config),
        *_sampling(config),
        *_engine(config),
        *_rl(config),
        *_environment(config),
        *_plugins(config),
        *_process(config),
        *_pipeline(config),
    ]
    if check_files:
        faults += _files(config)
    if faults:
        raise ConfigError("\n".join(faults))


def without_effect(config: Config) -> list[str]:
    """Settings of a pipeline that this run does not use, because pipeline.ranks is 1."""
    if config.pipeline.ranks > 1:
        return []
    plain = Config()
    names = ["pipeline.schedule", "pipeline.stages_per_rank", "pipeline.layers", "pipeline.draft_cost"]
    names += ["pipeline.tap_slots", "draft.stage", "draft.schedule"]
    return [name for name in names if _get(config, name) != _get(plain, name)]


def on_gpu(config: Config) -> bool:
    """Whether the run will take a GPU, as far as one can tell without torch: 'auto' looks for an NVIDIA
    driver."""
    if config.device == "auto":
        return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
    return config.device == "cuda"


def _get(config: Config, name: str):
    value = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _ranges(config: Config) -> Iterator[str]:
    for name, most in AT_MOST.items():
        if _get(config, name) > most:
            yield f"{name} = {_get(config, name)} is too large; it must be {most} or less."
    for name, least in AT_LEAST.items():
        if _get(config, name) < least:
            yield f"{name} = {_get(config, name)} is too small; it must be {least} or more."
    for name in ABOVE_ZERO:
        if not _get(config, name) > 0:
            yield f"{name} = {_get(config, name)} must be above 0."
    for name in SHARES:
        if not 0 <= _get(config, name) <= 1:
            yield f"{name} = {_get(config, name)} is a share; it must lie between 0 and 1."
    for model in ("policy", "draft"):
        betas = _get(config, f"{model}.optimizer.betas")
        if not all(0 <= beta < 1 for beta in betas):
            yield (
                f"{model}.optimizer.betas = {list(betas)}: each must be 0 or more and less than 1, for"
                " example [0.9, 0.95]."
            )


def _policy(config: Config) -> Iterator[str]:
    policy = config.policy
    if policy.path:  # config.json decides
        longest = _declared(Path(policy.path) / "config.json").get("max_position_embeddings")
        if isinstance(longest, int) and config.rollout.max_model_len > longest:
            yield (
                f"rollout.max_model_len = {config.rollout.max_model_len} is longer than max_position_embeddings ="
                f" {longest} in the config.json of policy.path; lower the first."
            )
        return
    yield from _heads("policy", policy.num_heads, policy.num_kv_heads, policy.head_dim, on_gpu(config))
    if config.rollout.max_model_len > policy.max_position_embeddings:
        yield (
            f"rollout.max_model_len = {config.rollout.max_model_len} is longer than"
            f" policy.max_position_embeddings = {policy.max_position_embeddings}; lower the first or raise"
            " the second."
        )


def _declared(file: Path) -> dict:
    """What a config.json says; nothing where it does not read (its reader will say why)."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _heads(owner: str, heads: int, kv_heads: int, head_dim: int, gpu: bool) -> Iterator[str]:
    if kv_heads > 0 and heads % kv_heads:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        yield (
            f"{owner}.num_kv_heads = {kv_heads} does not divide {owner}.num_heads = {heads}; it can be one of"
            f" {divisors}."
        )
    if head_dim % 2:
        yield f"{owner}.head_dim = {head_dim} is odd; rotary embeddings pair its halves, so it must be even."
    elif 0 < head_dim < 32 and not gpu:
        yield (f"{owner}.head_dim = {head_dim} is too small for vLLM's attention on a CPU; it must be 32 or more.")


def _draft(config: Config) -> Iterator[str]:
    draft, policy = config.draft, config.policy
    if not draft.enabled:
        return
    weights = draft.pass_weights
    if weights and len(weights) != draft.ttt_steps:
        yield (
            f"draft.pass_weights = {list(weights)} has {len(weights)} values, but draft.ttt_steps ="
            f" {draft.ttt_steps}; give one weight per pass, or none for equal weights."
        )
    if weights and (min(weights) < 0 or not max(weights) > 0):
        yield (f"draft.pass_weights = {list(weights)}: no weight may be negative and at least one must be above 0.")
    taps = draft.tap_ids
    if list(taps) != sorted(set(taps)) or any(tap < 0 for tap in taps):
        yield (f"draft.tap_ids = {list(taps)} must ascend without repeats from 0 or more, for example [1, 2, 3].")
    if not policy.path:
        if taps and max(taps) > policy.num_layers:
            yield (
                f"draft.tap_ids = {list(taps)} goes beyond the policy's {policy.num_layers} layers; "
                f"ids run from 0 (embeddings) to {policy.num_layers} (after the last layer)."
            )
        if draft.num_heads or draft.num_kv_heads or draft.head_dim:  # else they are the policy's, checked there
            yield from _heads(
                "draft",
                draft.num_heads or policy.num_heads,
                draft.num_kv_heads or policy.num_kv_heads,
                draft.head_dim or policy.head_dim,
                on_gpu(config),
            )
        if policy.vocab_size and draft.vocab_size > policy.vocab_size:
            yield (
                f"draft.vocab_size = {draft.vocab_size} is larger than policy.vocab_size ="
                f" {policy.vocab_size}; 0 takes the policy's whole vocabulary."
            )
    elif draft.num_heads and draft.num_kv_heads:
        yield from _heads("draft", draft.num_heads, draft.num_kv_heads, draft.head_dim, on_gpu(config))


def _sampling(config: Config) -> Iterator[str]:
    for name, sampling in (
        ("rollout.sampling", config.rollout.sampling),
        ("eval.sampling", config.eval.sampling),
    ):
        if sampling.temperature > 2:
            yield f"{name}.temperature = {sampling.temperature} is above 2, the most that vLLM samples at."
        if sampling.min_p != 0:
            yield (f"{name}.min_p = {sampling.min_p} does not work with speculative decoding in vLLM; only 0 does.")
        if sampling.logit_bias:
            yield (
                f"{name}.logit_bias = {sampling.logit_bias} does not work with speculative decoding in vLLM;"
                " leave it empty."
            )
        if any(token < 0 for token in sampling.stop_token_ids):
            yield (
                f"{name}.stop_token_ids = {list(sampling.stop_token_ids)} holds a negative number; token ids"
                " start at 0."
            )
    train, evaluation = config.rollout.sampling, config.eval.sampling
    if not train.temperature > 0:
        yield (
            f"rollout.sampling.temperature = {train.temperature} must be above 0: a greedy rollout gives"
            " every sample of a group the same reward, so that nothing is learned. Only eval.sampling may be"
            " greedy."
        )
    if train.top_p != 1:
        yield (
            f"rollout.sampling.top_p = {train.top_p} would sample from another distribution than the one"
            " being trained; only 1.0 works here (eval.sampling.top_p is free)."
        )
    if train.top_k != 0:
        yield (
            f"rollout.sampling.top_k = {train.top_k} would sample from another distribution than the one"
            " being trained; only 0 works here (eval.sampling.top_k is free)."
        )
    if not 0 < evaluation.top_p <= 1:
        yield f"eval.sampling.top_p = {evaluation.top_p} must be above 0 and at most 1."


def _engine(config: Config) -> Iterator[str]:
    rollout = config.rollout
    # The draft runs ahead of the text by its tokens and one more.
    lookahead = rollout.num_speculative_tokens + 1 if config.draft.enabled and rollout.num_speculative_tokens else 0
    for name, tokens in (
        ("rollout.sampling.max_tokens", rollout.sampling.max_tokens),
        ("eval.sampling.max_tokens", config.eval.sampling.max_tokens),
    ):
        if tokens + lookahead >= rollout.max_model_len:
            ahead = f" and the draft's lookahead of {lookahead}" if lookahead else ""
            yield (
                f"{name} = {tokens} leaves no room for a prompt{ahead} in rollout.max_model_len ="
                f" {rollout.max_model_len}; lower the first or raise the last."
            )
    budget = rollout.max_num_batched_tokens
    need = max(rollout.max_model_len, rollout.max_num_seqs * (lookahead or 1))
    if 0 < budget < need:
        yield (
            f"rollout.max_num_batched_tokens = {budget} is too small: a whole prompt (rollout.max_model_len ="
            f" {rollout.max_model_len}) and {lookahead or 1} tokens for each of rollout.max_num_seqs ="
            f" {rollout.max_num_seqs} requests must fit; 0 sizes it by itself."
        )
    if rollout.sleep and not on_gpu(config):
        yield "rollout.sleep = true frees GPU memory, and this run has no GPU; only false works here."
    if not 0 < rollout.gpu_memory_utilization < 1:
        yield (
            f"rollout.gpu_memory_utilization = {rollout.gpu_memory_utilization} is the engine's share of the"
            " GPU; it must lie between 0 and 1, for example 0.4."
        )


def _rl(config: Config) -> Iterator[str]:
    rl, longest = config.rl, config.rollout.max_model_len
    if rl.samples_per_prompt < 2:
        yield (
            f"rl.samples_per_prompt = {rl.samples_per_prompt} leaves nothing to compare: the advantage of a"
            " sample is its reward against the others of its prompt; it must be 2 or more."
        )
    if rl.updates_per_rollout > 0 and rl.prompts_per_step % rl.updates_per_rollout:
        fits = [n for n in range(1, rl.prompts_per_step + 1) if rl.prompts_per_step % n == 0]
        yield (
            f"rl.updates_per_rollout = {rl.updates_per_rollout} does not divide rl.prompts_per_step = "
            f"{rl.prompts_per_step} into equal parts; it can be one of {fits}."
        )
    if not 0 <= rl.clip_low <= 1:
        yield f"rl.clip_low = {rl.clip_low} must lie between 0 and 1: the ratio's floor is 1 - clip_low."
    degree = max(1, config.parallelism.context_parallel_degree)
    multiple = 1 if degree == 1 else 2 * degree
    rows = -(-longest // multiple) * multiple
    if config.train.tokens_per_microbatch < rows:
        padded = f" ({rows} rows over {degree} context-parallel ranks)" if rows > longest else ""
        yield (
            f"train.tokens_per_microbatch = {config.train.tokens_per_microbatch} is less than"
            f" rollout.max_model_len = {longest}{padded}: the longest sequence would not fit a microbatch; raise the"
            " first or lower the second."
        )


def _environment(config: Config) -> Iterator[str]:
    environment = config.environment
    name = environment.name
    if name == "jsonl":
        if not environment.path:
            yield (
                "environment.path is empty, and environment.name = 'jsonl' reads its items from that file; name one."
            )
        if ":" not in environment.scorer and environment.scorer not in ("exact", "contains", "numeric"):
            yield (
                f"environment.scorer = '{environment.scorer}' is unknown; it can be exact, contains, numeric"
                " or your own 'module:function'."
            )
    elif ":" not in name or not all(name.rpartition(":")[::2]):
        yield (
            f"environment.name = '{name}' is unknown; it can be 'reasoning_gym:TASK', 'jsonl', 'module:Class'"
            " or 'path/to/file.py:Class'."
        )
    if not environment.tokenizer and not config.policy.path:
        yield (
            "environment.tokenizer is empty and so is policy.path, so that there is no tokenizer; "
            "set environment.tokenizer = 'char' or to a tokenizer's folder."
        )
    if config.eval.items > environment.eval_items:
        yield (
            f"eval.items = {config.eval.items} is more than environment.eval_items ="
            f" {environment.eval_items}; lower the first or raise the second."
        )


def _plugins(config: Config) -> Iterator[str]:
    if ":" not in config.trainer:
        yield (f"trainer = '{config.trainer}' does not name a class; write 'module:Class' or 'path/to/file.py:Class'.")
    if config.draft.algorithm != "eagle3" and ":" not in config.draft.algorithm:
        yield (
            f"draft.algorithm = '{config.draft.algorithm}' is unknown; it can be eagle3, 'module:Class' or "
            "'path/to/file.py:Class'."
        )


def _process(config: Config) -> Iterator[str]:
    world, degree, stages = (
        int(os.environ.get("WORLD_SIZE") or 1),
        config.parallelism.context_parallel_degree,
        config.pipeline.ranks,
    )
    if degree >= 1 and stages >= 1 and world % (degree * stages):
        product = (
            f"pipeline.ranks = {stages} times parallelism.context_parallel_degree = {degree}"
            if stages > 1
            else f"parallelism.context_parallel_degree = {degree}"
        )
        yield (
            f"{product} does not divide the {world} rank(s) of this run; start them with `torchrun --nproc-per-node N "
            "--module torchspec.train train CONFIG.toml`."
        )
    if config.parallelism.shard and stages > 1:
        yield (
            f"parallelism.shard = true with pipeline.ranks = {stages}: the stages of a pipeline are not sharded; use"
            " one of the two."
        )
    elif config.parallelism.shard and world == 1:
        yield (
            "parallelism.shard = true has but one rank to shard over; start several with `torchrun --nproc-per-node N"
            " --module torchspec.train train CONFIG.toml`, or set it to false."
        )
    if config.device == "cuda" and config.train.compute_dtype == "float32":
        yield FP32_ON_GPU
    timeout, rollout = config.parallelism.timeout_s, config.rollout.deadline_s
    if world > 1 and 0 < timeout < rollout:
        yield (
            f"parallelism.timeout_s = {timeout} is less than rollout.deadline_s = {rollout}: ranks that have sampled "
            "their share wait for the slowest one, and would give up while it is still in time; raise the first or "
            "lower the second."
        )
    if config.rl.prompts_per_step < world:
        yield (
            f"rl.prompts_per_step = {config.rl.prompts_per_step} is less than the {world} ranks of this run,"
            " and each samples a share of the prompts; raise it."
        )


def _pipeline(config: Config) -> Iterator[str]:
    pipeline, draft = config.pipeline, config.draft
    if pipeline.ranks <= 1:
        return
    try:
        num_stages = len(rank_of_stages(pipeline.schedule, pipeline.ranks, pipeline.stages_per_rank))
    except ConfigError as error:
        yield f"pipeline.stages_per_rank = {pipeline.stages_per_rank}: {error}"
        return
    if draft.enabled and draft.stage >= num_stages:
        yield f"draft.stage = {draft.stage}: the pipeline has the stages 0 to {num_stages - 1}; -1 is the last."
    elif draft.enabled and draft.stage not in (-1, num_stages - 1) and draft.schedule == "inline":
        yield (
            f"draft.stage = {draft.stage} with draft.schedule = 'inline': the teacher's rows come from stage "
            f"{num_stages - 1}, after this stage's forward; use draft.schedule = 'deferred', or draft.stage = -1."
        )
    if config.policy.activation_checkpoint and pipeline.schedule in SPLIT_BACKWARD:
        yield (
            f"policy.activation_checkpoint = true with pipeline.schedule = '{pipeline.schedule}': its backward comes "
            "in two parts, and each would run the layers again; use 1F1B, Interleaved1F1B, GPipe or LoopedBFS, or no "
            "recomputation."
        )
    layers = list(pipeline.layers)
    if layers and (len(layers) != num_stages or min(layers) < 1):
        yield f"pipeline.layers = {layers} must give at least one layer to each of the {num_stages} stages."
    if not config.policy.path:
        if layers and sum(layers) != config.policy.num_layers:
            yield (
                f"pipeline.layers = {layers} add up to {sum(layers)}, and policy.num_layers ="
                f" {config.policy.num_layers}."
            )
        if config.policy.num_layers < num_stages:
            yield (
                f"policy.num_layers = {config.policy.num_layers} cannot be cut into the {num_stages} stages of"
                f" pipeline.ranks = {pipeline.ranks} with {pipeline.schedule}; each needs a layer."
            )


def _files(config: Config) -> list[str]:
    faults = []
    for name in ("policy.path", "draft.path"):
        path = _get(config, name)
        if path and not (Path(path) / "config.json").is_file():
            faults.append(f"{name} = '{path}' is not a Hugging Face folder: there is no {Path(path) / 'config.json'}.")
    tokenizer = config.environment.tokenizer
    if tokenizer not in ("", "char") and not Path(tokenizer).is_dir():
        faults.append(
            f"environment.tokenizer = '{tokenizer}' is no folder; it can be one, 'char', or empty for the policy's."
        )
    path = config.environment.path
    if config.environment.name == "jsonl" and path and not Path(path).is_file():
        faults.append(f"environment.path = '{path}': there is no such file.")
    return faults
