"""Hugging Face folders of policies: read with checks, written in one step.

A folder is config.json, generation_config.json (optional), tokenizer files, and model.safetensors or several
of them with model.safetensors.index.json.  transformers and vLLM load what ``save_policy`` writes as it is.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchspec.errors import ConfigError, RunError
from torchspec.files import replacing_folder
from torchspec.policy.model import Policy
from torchspec.policy.shape import PolicyShape, hf_config, shape_from_hf

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Source:
    """What a folder says about its policy, weights apart."""

    shape: PolicyShape
    config: dict[str, Any]
    generation_config: dict[str, Any] | None


def read_folder(folder: Path) -> Source:
    """config.json and generation_config.json of a policy's folder.

    Raises:
        ConfigError: the folder or config.json is missing or broken, or declares a model that torchspec cannot
            train.
    """
    if not folder.is_dir():
        raise ConfigError(f"policy.path {str(folder)!r} is not a folder; give one with config.json and {WEIGHTS}.")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"The policy folder {folder} has no config.json.")
    config = _read_json(path)
    generation = folder / "generation_config.json"
    return Source(shape_from_hf(config, str(path)), config, _read_json(generation) if generation.is_file() else None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not a JSON object.")
    return value


@torch.no_grad()
def load_weights(policy: Policy, folder: Path) -> None:
    """Copy a folder's weights into the policy, in the policy's dtype; nothing is copied before every name
    fits.

    A tied policy's folder may hold ``lm_head.weight`` too when it equals the embedding.

    Raises:
        ConfigError: a missing or damaged file; a missing, unknown or misshaped tensor, or one that is not
            floating point.
    """
    parameters = policy.hf_parameters()
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(_open(path)) for path in _weight_files(folder)}
        where = {name: file for file in files.values() for name in file.keys()}
        _check_index(folder, where)
        tied_head = where.pop("lm_head.weight", None) if policy.shape.tie_word_embeddings else None
        _check_census(where, policy.hf_shapes, folder)
        for name, parameter in parameters.items():
            parameter.copy_(where[name].get_tensor(name))
        if tied_head is not None and not torch.equal(
            tied_head.get_tensor("lm_head.weight"),
            where["model.embed_tokens.weight"].get_tensor("model.embed_tokens.weight"),
        ):
            raise ConfigError(
                f"config.json in {folder} says tie_word_embeddings, and its lm_head.weight differs from "
                "model.embed_tokens.weight; set tie_word_embeddings to false, or remove lm_head.weight."
            )


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / INDEX, folder / WEIGHTS
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ConfigError(f"{index} names {missing[0]}, which is not in the folder; the checkpoint is incomplete.")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    raise ConfigError(f"The policy folder {folder} has neither {WEIGHTS} nor {INDEX} (other formats are not read).")


def _weight_map(index: Path) -> dict[str, str]:
    found = _read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
        raise ConfigError(f"{index} has no weight_map from tensor names to file names.")
    return found


def _check_index(folder: Path, where: dict[str, Any]) -> None:
    index = folder / INDEX
    if index.is_file():
        for name, file in _weight_map(index).items():
            if name not in where:
                raise ConfigError(f"{index} says that {file} holds {name}, and it does not; copy the checkpoint again.")


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged or cut short ({error}); copy or download it again.") from error


def _check_census(where: dict[str, Any], expected: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Names, shapes and dtypes of all tensors, both ways."""
    found = {name for name in where if not name.endswith("rotary_emb.inv_freq")}
    problems = [f"missing {name}" for name in sorted(set(expected) - found)]
    problems += [f"unknown {name}" for name in sorted(found - set(expected))]
    for name in sorted(found & set(expected)):
        piece = where[name].get_slice(name)
        if tuple(piece.get_shape()) != expected[name]:
            problems.append(f"{name} is {list(piece.get_shape())} and should be {list(expected[name])}")
        elif piece.get_dtype() not in _FLOATS:
            problems.append(f"{name} is stored as {piece.get_dtype()} and should be one of {', '.join(_FLOATS)}")
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise ConfigError(f"The weights in {folder} do not fit its config.json: {'; '.join(problems[:6])}{more}.")


def save_policy(
    policy: Policy,
    folder: Path | str,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    weights: Iterable[tuple[str, torch.Tensor]] | None = None,
) -> None:
    """Write the policy as a Hugging Face folder, complete or not at all.

    It is made beside ``folder``, flushed to the disk and renamed into place.

    Args:
        policy: a tied head is not stored apart.
        folder: what was there is replaced.
        tokenizer: an object with ``save_pretrained``, a folder whose tokenizer files are copied, or None.
        dtype: of the stored weights; a folder read and saved in its own dtype has the same bytes.
        shard_bytes: weights beyond this go into several files with an index.
        weights: of the whole model, where ``policy`` is a part of it; None: the policy's.

    Raises:
        RunError: the disk refused; what was in ``folder`` is still there.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    try:
        with replacing_folder(folder) as new:
            _write_configs(policy, new, tokenizer, dtype)
            _write_tokenizer(tokenizer, new)
            _write_weights(
                policy.hf_weights(include_tied_head=False) if weights is None else weights, new, dtype, shard_bytes
            )
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"The policy could not be saved to {folder}: {error}. What was there before is untouched; free some space "
            "or choose another folder, and save again."
        ) from error


def _write_configs(policy: Policy, new: Path, tokenizer: Any, dtype: torch.dtype) -> None:
    ids = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ids = {name: value for name, value in ids.items() if value is not None}
    # a stale "dtype" or "rope_scaling" of the source would contradict what is written here
    carried = {k: v for k, v in policy.hf_config.items() if k not in ("dtype", "rope_scaling", "_name_or_path")}
    name = str(dtype).removeprefix("torch.")
    _write_json(new / "config.json", {**ids, **carried, **hf_config(policy.shape), "torch_dtype": name})
    generation = policy.generation_config if policy.generation_config is not None else ids
    if generation:
        _write_json(new / "generation_config.json", generation)


def _write_tokenizer(tokenizer: Any, new: Path) -> None:
    if tokenizer is None:
        return
    if isinstance(tokenizer, (str, Path)):
        for name in _TOKENIZER_FILES:
            if (Path(tokenizer) / name).is_file():
                shutil.copyfile(Path(tokenizer) / name, new / name)
    else:
        tokenizer.save_pretrained(new)


def _write_weights(
    weights: Iterable[tuple[str, torch.Tensor]], new: Path, dtype: torch.dtype, shard_bytes: int
) -> None:
    """One pass over ``weights``: a shard is written as soon as it is full, and named when their number is known."""
    shard: dict[str, torch.Tensor] = {}
    parts: list[list[str]] = []
    size = total = 0

    def write() -> None:
        from safetensors.torch import save_file

        parts.append(list(shard))
        save_file(shard, new / f"part-{len(parts)}", metadata={"format": "pt"})
        shard.clear()

    for name, tensor in weights:
        num_bytes = tensor.numel() * dtype.itemsize
        if shard and size + num_bytes > shard_bytes:
            write()
            size = 0
        shard[name] = tensor.to("cpu", dtype).contiguous()
        size, total = size + num_bytes, total + num_bytes
    write()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        file = WEIGHTS if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        (new / f"part-{number}").rename(new / file)
        weight_map |= dict.fromkeys(names, file)
    if len(parts) > 1:
        _write_json(new / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
