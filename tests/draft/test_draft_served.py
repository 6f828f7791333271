"""The draft that vLLM serves is the trained one: its proposals equal ``Eagle3Draft.propose`` token for token.

A random Qwen3 policy and drafts, both written by TorchSpec. Each prompt is decoded greedily by vLLM with
speculation; a wrapper around the proposer notes, at every verification, the position of the last verified
row, the token sampled after it and what was proposed. The trainer's side recomputes all of it from the
finished sequence, with its own policy and the same draft modules.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from torchspec.context_parallel.layout import PackedZigzag
from torchspec.draft.base import build_draft
from torchspec.draft.config import DraftConfig
from torchspec.policy.config import PolicyConfig
from torchspec.policy.hf import save_policy
from torchspec.policy.titan import build_policy

pytestmark = pytest.mark.vllm

VOCAB, LAYERS, NUM_TOKENS = 96, 5, 3
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
VARIANTS = {
    "three taps": ({}, {}),
    "draft vocabulary, norm before residual, taps 0 1 3 L": (
        {"vocab_size": 40, "norm_before_residual": True, "tap_ids": (0, 1, 3, LAYERS)},
        {},
    ),
    "one tap, own heads, llama3 rope": (
        {"tap_ids": (2,), "num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 48},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    ),
    "trained, two taps, yarn rope": ({"tap_ids": (1, 4)}, {"rope_scaling": YARN}),
}
PROMPTS = [[5, 17, 3, 60, 9, 11, 2], [70, 8], [33, 41, 12, 90, 7, 7, 7, 52, 1, 0, 95]]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The trainer's policy, its folder, and what vLLM says greedily without speculation."""
    patch = pytest.MonkeyPatch()
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    config = PolicyConfig(
        hidden_size=96,
        num_layers=LAYERS,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=80,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    policy = build_policy(config, vocab_size=None, seed=3, device="cpu", dtype=torch.float32)
    randomise(policy, 3, spread=0.15)
    folder = tmp_path_factory.mktemp("served") / "policy"
    save_policy(policy, folder)
    plain = [tokens for tokens, _ in decode(folder)]
    yield SimpleNamespace(policy=policy, folder=folder, plain=plain)
    patch.undo()


@torch.no_grad()
def randomise(model, seed, spread=0.0):
    """Norms between 0.5 and 1.5 (ones would hide a misplaced one); with spread, new matrices too."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif spread:
            parameter.normal_(0.0, spread, generator=generator)


def decode(policy_folder, draft_folder=None):
    """Per prompt: greedy tokens, and each call's (last verified position, sampled token, proposals)."""
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    calls, results, propose = [], [], SpecDecodeBaseProposer.propose

    def noted(
        self,
        num_speculative_tokens,
        target_token_ids,
        target_positions,
        target_hidden_states,
        next_token_ids,
        token_indices_to_sample,
        common_attn_metadata,
        *args,
        **kwargs,
    ):
        rows = token_indices_to_sample
        row = int(common_attn_metadata.query_start_loc[1] - 1 if rows is None else rows[0])
        position, sampled = int(target_positions[row]), int(next_token_ids[0])
        out = propose(
            self,
            num_speculative_tokens,
            target_token_ids,
            target_positions,
            target_hidden_states,
            next_token_ids,
            token_indices_to_sample,
            common_attn_metadata,
            *args,
            **kwargs,
        )
        calls.append((position, sampled, out[0].tolist()))
        return out

    speculation = {"method": "eagle3", "model": str(draft_folder), "num_speculative_tokens": NUM_TOKENS}
    llm = LLM(
        model=str(policy_folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=16 << 20,
        skip_tokenizer_init=True,
        speculative_config=speculation if draft_folder else None,
    )
    params = SamplingParams(temperature=0.0, max_tokens=36, ignore_eos=True, detokenize=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpecDecodeBaseProposer, "propose", noted)
        for prompt in PROMPTS:  # one at a time, so that every call is known to be this prompt's
            calls.clear()
            output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]
            results.append((list(output.token_ids), list(calls)))
    del llm
    gc.collect()
    return results


@torch.no_grad()
def policy_rows(policy, tokens_T, layout, tap_ids):
    """Taps in order and final-normed rows of the trainer's policy, [T,E] each."""
    out = policy(tokens_T, layout, tap_ids)
    return [out.taps[i] for i in tap_ids], out.hidden_TE


def train(draft, served, steps=60):
    """A few distillation steps on the policy's own greedy text, so that proposals get accepted."""
    documents = [prompt + answer for prompt, answer in zip(PROMPTS, served.plain, strict=True)]
    tokens_T, layout = torch.tensor(sum(documents, [])), PackedZigzag([len(one) for one in documents])
    taps, hidden_TE = policy_rows(served.policy, tokens_T, layout, draft.tap_ids)
    embed_TE, head_VE = served.policy.embed_weight[tokens_T].detach(), served.policy.head_weight
    targets = draft.targets(hidden_TE, head_VE, tokens_T, torch.ones_like(tokens_T), layout)
    optimizer = torch.optim.Adam(draft.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        draft.loss(draft(taps, embed_TE, layout), targets, head_VE, targets.counts_K).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", VARIANTS)
def test_served_proposals_are_the_trained_drafts(served, tmp_path, name):
    settings, rope = VARIANTS[name]
    shape = replace(served.policy.shape, **rope)
    draft = build_draft(DraftConfig(**settings), shape, seed=7)
    randomise(draft, 8)
    draft.init_from_policy(served.policy.head_weight, None, torch.randperm(VOCAB))
    if "trained" in name:
        train(draft, served)
    draft.save(tmp_path / "draft")

    results = decode(served.folder, tmp_path / "draft")

    compared = accepted = 0
    for prompt, plain, (tokens, calls) in zip(PROMPTS, served.plain, results, strict=True):
        assert tokens == plain, "greedy text with speculation differs from the text without"
        tokens_T = torch.tensor(prompt + tokens)
        layout = PackedZigzag([len(tokens_T)])
        taps, _ = policy_rows(served.policy, tokens_T, layout, draft.tap_ids)
        expected_TN = draft.propose(tokens_T, taps, served.policy.embed_weight, layout, NUM_TOKENS)
        assert expected_TN[-1].tolist() == [-1] * NUM_TOKENS
        for position, sampled, proposals in calls:
            if position + 1 >= len(tokens_T):
                continue  # the token sampled last lies past max_tokens
            assert sampled == tokens_T[position + 1]
            assert proposals == expected_TN[position].tolist()
            compared += 1
            accepted += proposals[0] == (tokens_T.tolist() + [-1])[position + 2]
    # An accepted token saves a call: all compared calls together make the 3 x 36 tokens.
    assert compared >= (3 if "trained" in name else 3 * 36 * 2 // 3)
    if "trained" in name:
        assert accepted > 0.5 * compared
