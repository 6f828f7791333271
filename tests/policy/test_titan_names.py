"""Fails when torchtitan moves what torchspec/policy/titan.py uses: read again, then raise the pin here and
there."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import re
import subprocess
import sys

import pytest
import torch
from policy_oracle import hf_model, policy_of

from torchspec.policy import titan

READ_VERSION = "0.3.0"


def parameters_of(function):
    return list(inspect.signature(function).parameters)


def test_version():
    assert importlib.metadata.version("torchtitan") == READ_VERSION


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_modules_and_their_forwards(architecture):
    from torchtitan.models.common.attention import GQAttention
    from torchtitan.models.common.decoder import Decoder

    model_class, block_class = titan._DEFINITIONS[architecture]
    assert issubclass(model_class, Decoder)
    assert parameters_of(block_class.forward) == ["self", "x", "attention_masks", "positions"]
    assert parameters_of(GQAttention.forward) == ["self", "x_BLD", "attention_masks", "positions"]
    # what passes through a layer arrives in the two parts that are ours
    source = inspect.getsource(GQAttention.forward)
    assert re.search(r"self\.rope\(\s*xq_BLNH, xk_BLNH, positions\s*\)", source)
    assert re.search(
        r"self\.inner_attention\(.*attention_masks=attention_masks.*scale=.*enable_gqa=", source, re.DOTALL
    )


def test_config_helpers():
    assert {
        "dim",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "inner_attention",
        "rope",
        "qk_norm",
        "fuse_qkv",
    } < set(parameters_of(titan.make_gqa_config))
    assert inspect.signature(titan.make_gqa_config).parameters["fuse_qkv"].default is False
    assert {"dim", "hidden_dim", "w1_param_init", "w2w3_param_init"} <= set(parameters_of(titan.make_ffn_config))
    names = {field.name for field in dataclasses.fields(titan.Qwen3Model.Config)}
    assert {
        "dim",
        "vocab_size",
        "tok_embeddings",
        "norm",
        "lm_head",
        "layers",
        "enable_weight_tying",
    } <= names


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_names_are_torchtitans_own_adapters(tmp_path, architecture):
    """Our table of Hugging Face names against the adapters that torchtitan ships, parameter by parameter."""
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    policy = policy_of(hf_model(architecture), tmp_path)
    adapter_class = {"qwen3": Qwen3StateDictAdapter, "llama": Llama3StateDictAdapter}[architecture]
    adapter = adapter_class(titan.decoder_config(policy.shape), None)
    ours = {titan.hf_name(name) for name, _ in policy.model.named_parameters()}
    assert set(adapter.to_hf(policy.model.state_dict())) == ours
    to_hf = {ours: theirs for theirs, ours in adapter.from_hf_map.items() if ours}
    for name, _ in policy.model.named_parameters():
        pattern = re.sub(r"layers\.\d+", "layers.{}", name)
        assert re.sub(r"layers\.\d+", "layers.{}", titan.hf_name(name)) == to_hf[pattern]


def test_no_other_file_imports_torchtitan():
    from pathlib import Path

    package = Path(titan.__file__).parents[1]
    found = [p.name for p in package.rglob("*.py") if re.search(r"^\s*(from|import) torchtitan", p.read_text(), re.M)]
    assert found == ["titan.py"]


def test_imports_stay_light():
    """torchspec.policy's other files load no torchtitan; titan.py loads neither vLLM nor transformers nor
    draws numbers."""
    code = (
        "import sys, torch; state = torch.get_rng_state(); threads = torch.get_num_threads();"
        "import torchspec.policy.hf, torchspec.policy.model, torchspec.policy.shape;"
        "assert not any(m.split('.')[0] in ('torchtitan', 'vllm', 'transformers') for m in sys.modules);"
        "import torchspec.policy.titan;"
        "assert not any(m.split('.')[0] in ('vllm', 'transformers') for m in sys.modules);"
        "assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads();"
        "assert torch.get_default_dtype() == torch.float32"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_threads_can_be_set_after_vllm_took_the_function_away(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    try:
        titan.set_num_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        titan.set_num_threads(before)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the shim acts on machines without an accelerator")
def test_torchtitan_believes_in_the_cpu():
    from torchtitan.tools import utils

    assert utils.device_type == "cpu" and utils.device_module.is_available()
