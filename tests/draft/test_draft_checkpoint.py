"""The checkpoint: what is written, byte-equal round trip, the census both ways, and what is refused."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from draft_oracle import policy_shape, random_draft
from safetensors.torch import load_file, save_file

from torchspec.draft.base import build_draft
from torchspec.draft.config import DraftConfig
from torchspec.draft.eagle3 import Eagle3Draft
from torchspec.draft.eagle3.shape import check_tap_ids, default_tap_ids
from torchspec.errors import ConfigError, RunError

VARIANTS = {
    "plain": {},
    "draft vocabulary": {"vocab_size": 5},
    "norm before residual": {"norm_before_residual": True},
    "four taps": {"tap_ids": (0, 1, 3, 6)},
    "own sizes": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "intermediate_size": 14},
}


def saved(tmp_path, **config):
    """A random fp32 draft and the folder that it was saved to."""
    draft = random_draft(1, dtype=torch.float32, **config)
    if draft.d2t is not None:
        draft.init_from_policy(torch.randn(11, 12), None, torch.arange(11) % 7)
    draft.save(tmp_path / "draft")
    return draft, tmp_path / "draft"


def edit(path, **entries):
    """Change or (None) remove entries of a config.json."""
    config = json.loads((path / "config.json").read_text()) | entries
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def refuse(path, words, shape=None, **config):
    with pytest.raises(ConfigError, match=words):
        Eagle3Draft.load(path, DraftConfig(**config), shape or policy_shape())


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_round_trip_is_byte_equal(tmp_path, config):
    draft, path = saved(tmp_path, **config)
    again = Eagle3Draft.load(path, DraftConfig(), policy_shape())
    assert again.shape == draft.shape
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in draft.state_dict().items())
    again.save(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "draft"]


def test_config_json_of_four_taps_and_a_draft_vocabulary(tmp_path):
    scaling = {"rope_type": "linear", "factor": 4.0}
    shape = policy_shape(rope_theta=5e5, rope_scaling=scaling, max_position_embeddings=4096)
    draft = Eagle3Draft.build(DraftConfig(tap_ids=(0, 1, 3, 6), vocab_size=5), shape, seed=0)
    draft.save(tmp_path / "draft", torch.bfloat16)
    assert json.loads((tmp_path / "draft" / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 12,
        "intermediate_size": 10,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 5e5,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0},
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "vocab_size": 11,
        "draft_vocab_size": 5,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3, 6],
        "num_aux_hidden_states": 4,
        "torch_dtype": "bfloat16",
    }
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": [12, 48],
        "midlayer.input_layernorm.weight": [12],
        "midlayer.hidden_norm.weight": [12],
        "midlayer.self_attn.q_proj.weight": [12, 24],
        "midlayer.self_attn.k_proj.weight": [4, 24],
        "midlayer.self_attn.v_proj.weight": [4, 24],
        "midlayer.self_attn.o_proj.weight": [12, 12],
        "midlayer.post_attention_layernorm.weight": [12],
        "midlayer.mlp.gate_proj.weight": [10, 12],
        "midlayer.mlp.up_proj.weight": [10, 12],
        "midlayer.mlp.down_proj.weight": [12, 10],
        "norm.weight": [12],
        "lm_head.weight": [5, 12],
        "d2t": [5],
    }
    assert tensors["d2t"].dtype == torch.int64
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in tensors.items() if name != "d2t")


def test_three_taps_need_no_count(tmp_path):
    draft, _ = saved(tmp_path)
    assert draft.hf_config()["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert "num_aux_hidden_states" not in draft.hf_config()


def test_census_names_what_is_missing_unknown_and_misshaped(tmp_path):
    _, path = saved(tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["extra.weight"] = torch.zeros(1)
    tensors["norm.weight"] = torch.zeros(13)
    del tensors["fc.weight"]
    save_file(tensors, file)
    refuse(
        path,
        r"missing: fc.weight; unknown: extra.weight; wrong shape: norm.weight is \[13\] and should be \[12\]",
    )


def test_every_tensor_is_needed(tmp_path):
    _, path = saved(tmp_path, vocab_size=5)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        save_file({k: v for k, v in tensors.items() if k != name}, path / "model.safetensors")
        refuse(path, f"missing: {name}")


def test_other_spellings_of_published_drafts_load(tmp_path):
    """layers.0 for midlayer, t2d beside d2t, ids in eagle_config and unsorted, legacy rope."""
    draft, path = saved(tmp_path, vocab_size=5)
    tensors = load_file(path / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(tensors | {"t2d": torch.zeros(11, dtype=torch.bool)}, path / "model.safetensors")
    edit(
        path,
        eagle_aux_hidden_state_layer_ids=None,
        rope_parameters=None,
        architectures=["Eagle3LlamaForCausalLM"],
        eagle_config={"eagle_aux_hidden_state_layer_ids": [5, 1, 3], "use_aux_hidden_state": True},
    )
    again = Eagle3Draft.load(path, DraftConfig(), policy_shape())
    assert again.shape == draft.shape
    assert torch.equal(again.midlayer.mlp.up_proj.weight, draft.midlayer.mlp.up_proj.weight)


def test_context_length_is_the_policys_and_rope_the_files(tmp_path):
    _, path = saved(tmp_path)
    shape = policy_shape(max_position_embeddings=32768, rope_theta=7.0)
    draft = Eagle3Draft.load(path, DraftConfig(), shape)
    assert draft.shape.max_position_embeddings == 32768
    assert draft.shape.rope_theta == 100.0


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"hidden_size": 16}, "has hidden_size 16, the policy 12"),
        ({"vocab_size": 99}, "has vocab_size 99, the policy 11"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, "has 7, which the policy's 6 layers do not have"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 3]}, "names a tap twice"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "does not say which tap ids"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "has architectures"),
        ({"norm_output": True}, "has norm_output = True"),
        ({"eagle_config": {"norm_before_fc": True}}, "has norm_before_fc = True"),
        ({"num_hidden_layers": 2}, "has num_hidden_layers = 2"),
        ({"num_attention_heads": "3"}, "no whole number for num_heads"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"target_hidden_size": 64}, "for a policy 64 wide"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, entries, words):
    _, path = saved(tmp_path)
    edit(path, **entries)
    refuse(path, words)


def test_settings_that_contradict_the_file_are_refused(tmp_path):
    _, path = saved(tmp_path)
    refuse(path, r"draft.tap_ids is \[1, 2, 4\]", tap_ids=(1, 2, 4))
    refuse(path, "draft.num_heads is 6", num_heads=6)
    refuse(path, "draft.vocab_size is 7", vocab_size=7)
    refuse(path, "draft.norm_before_residual is true", norm_before_residual=True)


def test_an_embedding_of_its_own_is_refused(tmp_path):
    _, path = saved(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": torch.zeros(11, 12)}, path / "model.safetensors")
    refuse(path, "its own embed_tokens.weight")


def test_damaged_folders_give_a_sentence(tmp_path):
    _, path = saved(tmp_path)
    refuse(tmp_path / "nowhere", "does not exist")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refuse(path, "model.safetensors cannot be read: .* damaged or cut short")
    (path / "model.safetensors").write_bytes(b"")
    refuse(path, "model.safetensors cannot be read")
    (path / "model.safetensors").unlink()
    refuse(path, "no \\*.safetensors file")
    (path / "config.json").write_text("{")
    refuse(path, "is not valid JSON")
    (path / "config.json").write_text("[]")
    refuse(path, "not a JSON object")
    (path / "config.json").unlink()
    refuse(path, "has no config.json")


def test_d2t_is_checked(tmp_path):
    _, path = saved(tmp_path, vocab_size=5)
    good = load_file(path / "model.safetensors")
    for d2t, words in [
        (torch.full((5,), 7), "outside the policy's"),
        (torch.tensor([0, -1, 0, 0, 0]), "names a policy token twice"),
        (torch.zeros(5), "must be int64"),
    ]:
        save_file(good | {"d2t": d2t}, path / "model.safetensors")
        refuse(path, words)


def test_a_failed_save_keeps_the_old_draft(tmp_path, monkeypatch):
    draft, path = saved(tmp_path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    for step in ("fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, full_disk)
            with pytest.raises(RunError, match="could not be saved to .*No space left"):
                random_draft(2, dtype=torch.float32).save(path)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]
    second = random_draft(2, dtype=torch.float32)
    second.save(path)
    assert torch.equal(load_file(path / "model.safetensors")["fc.weight"], second.fc.weight)
    assert not torch.equal(draft.fc.weight, second.fc.weight)
    shutil.rmtree(path)


def test_head_and_draft_vocabulary_come_from_the_policy():
    head_VE = torch.randn(11, 12)
    whole = Eagle3Draft.build(DraftConfig(), policy_shape(), seed=0)
    whole.init_from_policy(head_VE)
    assert torch.equal(whole.lm_head.weight, head_VE) and whole.d2t is None

    small = Eagle3Draft.build(DraftConfig(vocab_size=4), policy_shape(), seed=0)
    counts_V = torch.tensor([0, 9, 2, 2, 0, 0, 7, 0, 1, 2, 8])
    small.init_from_policy(head_VE, None, counts_V)
    kept = torch.tensor([1, 2, 6, 10])  # of the three tokens seen twice, the lowest id
    assert torch.equal(torch.arange(4) + small.d2t, kept)
    assert torch.equal(small.lm_head.weight, head_VE[kept])
    assert torch.equal(small.state_dict()["d2t"], torch.tensor([1, 1, 4, 7]))
    with pytest.raises(ConfigError, match="token counts of that length"):
        small.init_from_policy(head_VE)
    with pytest.raises(ConfigError, match="head is"):
        small.init_from_policy(head_VE[:5], None, counts_V)


def test_default_tap_ids():
    assert [default_tap_ids(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 32)] == [
        (1,),
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 4),
        (1, 3, 5),
        (2, 3, 4),
        (2, 4, 5),
        (2, 16, 29),
    ]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ((3, 1), "not ascending"),
        ((1, 1), "twice"),
        ((-1, 2), "has -1"),
        ((2, 5), "has 5"),
        ((), "no tap ids"),
    ],
)
def test_tap_ids_are_checked(ids, words):
    with pytest.raises(ConfigError, match=words):
        check_tap_ids(ids, 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ttt_steps": 0}, "at least one pass"),
        ({"vocab_size": 12}, "more than the policy's 11"),
        ({"num_kv_heads": 2}, "does not divide its num_heads"),
        ({"head_dim": 5}, "an even one"),
        ({"num_heads": 5, "num_kv_heads": 1}, "does not divide the hidden size"),
        ({"tap_ids": (1, 9)}, "which the policy's 6 layers do not have"),
        ({"pass_weights": (1.0,), "ttt_steps": 2}, "1 numbers for 2 passes"),
        ({"args": {"depth": 2}}, "draft.args has depth"),
        ({"algorithm": "eagle9"}, "not registered: use eagle3"),
        ({"algorithm": "json:JSONDecoder"}, "not a subclass"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        build_draft(DraftConfig(**settings), policy_shape(), seed=0)


def test_build_draft_loads_a_path_and_sets_the_compute_dtype(tmp_path):
    draft, path = saved(tmp_path)
    loaded = build_draft(DraftConfig(path=str(path)), policy_shape(), seed=0, compute_dtype=torch.bfloat16)
    assert torch.equal(loaded.fc.weight, draft.fc.weight) and loaded.fc.weight.dtype == torch.float32
    assert loaded.compute_dtype == torch.bfloat16
