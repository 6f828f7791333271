"""Folders in and out: byte-equal round trip, what transformers reads back, and every way that a folder can be
wrong."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil

import pytest
import torch
from policy_oracle import SCALINGS, hf_model, pack, policy_of
from safetensors.torch import load_file, save_file

from torchspec.errors import ConfigError, RunError
from torchspec.policy.config import PolicyConfig
from torchspec.policy.hf import INDEX, WEIGHTS, read_folder, save_policy
from torchspec.policy.titan import build_policy


def load(folder, vocab_size=None):
    return build_policy(PolicyConfig(path=str(folder)), vocab_size=vocab_size, seed=0, device="cpu")


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit(folder, **entries):
    """Change or (None) remove entries of config.json."""
    config = json.loads((folder / "config.json").read_text()) | entries
    config = {k: v for k, v in config.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def folder(tmp_path):
    hf_model().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "tied", "scaling"),
    [
        ("qwen3", True, "default"),
        ("qwen3", False, "yarn"),
        ("llama", False, "llama3"),
        ("llama", True, "linear"),
    ],
)
def test_round_trip_is_byte_equal_and_transformers_reads_it(tmp_path, architecture, tied, scaling, dtype):
    """transformers -> policy -> folder: the same weight file; -> policy -> folder again: the same files
    altogether."""
    from transformers import AutoModelForCausalLM

    model = hf_model(architecture, tied=tied, scaling=scaling)
    with torch.no_grad():
        # rounded apart: .to(bfloat16) on the model would round the oracle's rotary table too
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    policy = policy_of(copy.deepcopy(model).to(dtype), tmp_path / "source")
    save_policy(policy, tmp_path / "first", dtype=dtype)
    save_policy(load(tmp_path / "first"), tmp_path / "second", dtype=dtype)
    assert (tmp_path / "source" / WEIGHTS).read_bytes() == (tmp_path / "first" / WEIGHTS).read_bytes()
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")
    assert read_folder(tmp_path / "first").shape == policy.shape

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "first", attn_implementation="eager", dtype=torch.float32)
    assert type(again) is type(model)
    assert again.config.rope_parameters == {"rope_theta": 500.0, **SCALINGS[scaling]}
    assert again.generation_config.eos_token_id == 7
    tokens_T, layout = pack(80)
    with torch.no_grad():
        expected_TV = model(tokens_T[None]).logits[0]
        assert torch.equal(again(tokens_T[None]).logits[0], expected_TV)
        logits_TV = policy(tokens_T, layout).hidden_TE @ policy.head_weight.T
    assert (logits_TV - expected_TV).abs().max() < 1e-5 * max(1.0, expected_TV.abs().max().item())


def test_a_folder_without_the_entries_of_transformers_5(folder):
    """rope_theta and rope_scaling at the top level, no head_dim of Llama: the spelling before
    rope_parameters."""
    edit(folder, rope_parameters=None, rope_theta=77.0, rope_scaling={"type": "linear", "factor": 2.0})
    shape = read_folder(folder).shape
    assert shape.rope_theta == 77.0 and shape.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    edit(folder, head_dim=None)
    assert read_folder(folder).shape.head_dim == 128  # Qwen3Config's default
    edit(folder, model_type="llama", architectures=["LlamaForCausalLM"], rope_scaling=None)
    assert read_folder(folder).shape.head_dim == 8 and read_folder(folder).shape.rope_scaling is None


def test_shards(tmp_path, folder):
    """Several files with an index, in and out; transformers reads ours, we read transformers'."""
    from transformers import AutoModelForCausalLM

    policy = load(folder)
    save_policy(policy, tmp_path / "shards", shard_bytes=30_000)
    names = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert all(path.stat().st_size < 32_000 for path in (tmp_path / "shards").glob("*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert (tmp_path / "theirs" / INDEX).is_file()
    for again in (load(tmp_path / "shards"), load(tmp_path / "theirs")):
        for (name, tensor), (_, expected) in zip(again.hf_weights(), policy.hf_weights(), strict=True):
            assert torch.equal(tensor, expected), name
    (tmp_path / "shards" / names[1]).unlink()
    with pytest.raises(ConfigError, match=f"names {names[1]}, which is not in the folder"):
        load(tmp_path / "shards")


def test_an_index_that_lies(tmp_path, folder):
    save_policy(load(folder), tmp_path / "shards", shard_bytes=30_000)
    index = json.loads((tmp_path / "shards" / INDEX).read_text())
    index["weight_map"]["ghost.weight"] = next(iter(index["weight_map"].values()))
    (tmp_path / "shards" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="holds ghost.weight, and it does not"):
        load(tmp_path / "shards")
    (tmp_path / "shards" / INDEX).write_text("{}")
    with pytest.raises(ConfigError, match="has no weight_map"):
        load(tmp_path / "shards")


def test_tokenizer_and_generation_config_travel(tmp_path, folder):
    from torchspec.data.tokenizer import char_tokenizer

    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "temperature": 0.6}))
    save_policy(load(folder), tmp_path / "object", tokenizer=char_tokenizer())
    assert json.loads((tmp_path / "object" / "generation_config.json").read_text())["eos_token_id"] == [7, 9]
    assert json.loads((tmp_path / "object" / "config.json").read_text())["eos_token_id"] == 7
    save_policy(load(folder), tmp_path / "copy", tokenizer=tmp_path / "object")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "object" / name).read_bytes()
    # a policy without a past takes the end token from its tokenizer
    fresh = build_policy(PolicyConfig(num_layers=1), vocab_size=200, seed=0, device="cpu")
    save_policy(fresh, tmp_path / "fresh", tokenizer=char_tokenizer())
    for name in ("config.json", "generation_config.json"):
        found = json.loads((tmp_path / "fresh" / name).read_text())
        assert found["eos_token_id"] == char_tokenizer().eos_token_id


def test_other_entries_travel_and_stale_ones_do_not(tmp_path, folder):
    """config.json keeps what the shape does not decide; an old dtype or rope spelling would contradict the
    new one."""
    edit(folder, dtype="bfloat16", rope_scaling={"type": "linear", "factor": 2.0}, my_note="kept")
    save_policy(load(folder), tmp_path / "policy")
    found = json.loads((tmp_path / "policy" / "config.json").read_text())
    assert found["my_note"] == "kept" and found["torch_dtype"] == "float32"
    assert "dtype" not in found and "rope_scaling" not in found


def test_a_disk_without_room_leaves_the_earlier_folder(tmp_path, folder):
    """A real failure of write(): no file of this process may grow past 20 kB."""
    policy = load(folder)
    save_policy(policy, tmp_path / "policy")
    before = files_of(tmp_path / "policy")
    with torch.no_grad():
        policy.embed_weight.add_(1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(RunError, match="could not be saved to .*policy: .*untouched; free some space"):
            save_policy(policy, tmp_path / "policy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files_of(tmp_path / "policy") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["policy", "source"]
    save_policy(policy, tmp_path / "policy")
    assert torch.equal(load(tmp_path / "policy").embed_weight, policy.embed_weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["policy", "source"]


def test_a_rename_that_fails_puts_the_earlier_folder_back(tmp_path, folder, monkeypatch):
    policy = load(folder)
    save_policy(policy, tmp_path / "policy")
    before, rename = files_of(tmp_path / "policy"), os.rename

    def failing(source, target):
        if ".new-" in str(source):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(RunError, match="Input/output error"):
        save_policy(policy, tmp_path / "policy")
    assert files_of(tmp_path / "policy") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["policy", "source"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"]),
            "model_type 'qwen3_moe'.*Qwen3ForCausalLM",
        ),
        (dict(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        (dict(attention_bias=True), "attention_bias = True; torchspec trains attention_bias = False only"),
        (dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (
            dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
            "type sliding_attention",
        ),
        (
            dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
            "rope scaling 'dynamic'; .*llama3, yarn",
        ),
        (
            dict(rope_parameters={"rope_type": "llama3", "factor": 2.0}),
            "config.json: .*lacks high_freq_factor",
        ),
        (dict(hidden_size=None), "hidden_size = None; a whole number is needed"),
        (dict(num_attention_heads="six"), "num_attention_heads = 'six'"),
        (dict(num_key_value_heads=5), "num_kv_heads .5. does not divide"),
    ],
)
def test_configs_that_are_refused(folder, entries, message):
    edit(folder, **entries)
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_weights_that_do_not_fit(folder):
    tensors = load_file(folder / WEIGHTS)

    def refused(message, **changes):
        changed = {k: v for k, v in {**tensors, **changes}.items() if v is not None}
        save_file(changed, folder / WEIGHTS)
        with pytest.raises(ConfigError, match=message):
            load(folder)

    norm = "model.layers.1.self_attn.q_norm.weight"
    refused(f"do not fit its config.json: missing {norm}", **{norm: None})
    refused(
        "unknown model.layers.0.self_attn.q_proj.bias",
        **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(60)},
    )
    refused(r"model.norm.weight is \[47\] and should be \[48\]", **{"model.norm.weight": torch.ones(47)})
    refused("model.norm.weight is stored as I64", **{"model.norm.weight": torch.ones(48, dtype=torch.int64)})
    refused(
        "and 17 more",
        **{k: None for k in tensors if "proj" in k or "head" in k} | {"model.norm.weight": None},
    )
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}, folder / WEIGHTS)
    load(folder)  # an old spelling that carries nothing


def test_a_tied_head_may_be_stored_when_it_is_the_embedding(tmp_path):
    hf_model(tied=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    assert "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tmp_path / WEIGHTS)
    policy = load(tmp_path)
    assert torch.equal(policy.head_weight, embedding)
    save_file({**tensors, "lm_head.weight": embedding + 1}, tmp_path / WEIGHTS)
    with pytest.raises(ConfigError, match="tie_word_embeddings, and its lm_head.weight differs"):
        load(tmp_path)


def test_folders_and_files_that_are_missing_or_damaged(tmp_path, folder):
    with pytest.raises(ConfigError, match="nowhere' is not a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="tokenizer has 60 token ids and the policy's vocab_size is 53"):
        load(folder, vocab_size=60)
    content = (folder / WEIGHTS).read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"\xff" * 100):
        (folder / WEIGHTS).write_bytes(damaged)
        with pytest.raises(ConfigError, match=f"{WEIGHTS} is damaged or cut short"):
            load(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=f"neither {WEIGHTS} nor {INDEX}"):
        load(folder)
    for text, message in (("{", "cannot be read as JSON"), ("[1]", "holds a list, not a JSON object")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(ConfigError, match="has no config.json"):
        load(folder)
