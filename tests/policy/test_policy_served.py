"""vLLM loads a saved policy as it is and says what the trainer's policy says, token by token and in
log-probabilities."""

from __future__ import annotations

import gc

import pytest
import torch

from torchspec.context_parallel.layout import PackedZigzag
from torchspec.policy.hf import save_policy
from torchspec.policy.shape import PolicyShape
from torchspec.policy.titan import empty_policy

pytestmark = pytest.mark.vllm

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
PROMPTS = [[5, 17, 3, 60, 9], [70, 8], list(range(40))]


@pytest.mark.parametrize(
    ("architecture", "tied", "scaling"),
    [("llama", True, LLAMA3), ("qwen3", False, YARN), ("qwen3", True, None)],
)
def test_greedy_tokens_and_logprobs(tmp_path, monkeypatch, architecture, tied, scaling):
    """Grouped-query ratio 3 and a head dim that is not hidden / heads."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    shape = PolicyShape(
        architecture=architecture,
        hidden_size=96,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=80,
        vocab_size=96,
        rope_theta=5e3,
        rope_scaling=scaling,
        norm_eps=3e-6,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    policy = empty_policy(shape, device="cpu")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.ndim == 1 else parameter.normal_(0.0, 0.15)
    save_policy(policy, tmp_path / "policy")

    threads, rng = torch.set_num_threads, torch.get_rng_state()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(tmp_path / "policy"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False, logprobs=0)
    results = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
    monkeypatch.setattr(torch, "set_num_threads", threads)  # the engine put a no-op there
    torch.set_rng_state(rng)
    del llm
    gc.collect()

    for prompt, result in zip(PROMPTS, results):
        tokens = list(result.outputs[0].token_ids)
        logprobs = torch.tensor([step[t].logprob for step, t in zip(result.outputs[0].logprobs, tokens)])
        sequence = torch.tensor(prompt + tokens[:-1])
        with torch.no_grad():
            hidden_TE = policy(sequence, PackedZigzag([len(sequence)])).hidden_TE[len(prompt) - 1 :]
            logp_TV = (hidden_TE @ policy.head_weight.T).log_softmax(-1)
        assert logp_TV.argmax(-1).tolist() == tokens
        assert (logp_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0] - logprobs).abs().max() < 1e-4
