"""Model folders of drafts: config.json + safetensors, written in one step, read with checks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchspec.errors import ConfigError, RunError
from torchspec.files import replacing_folder

WEIGHTS_NAME = "model.safetensors"


def write_model_folder(
    folder: str | Path, config: Mapping[str, Any], weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """Write config.json and model.safetensors beside ``folder``, then rename the complete copy into place.

    Floating tensors are stored as ``dtype``, integer ones as they are. A failure (full disk, no permission)
    leaves what was in ``folder`` and removes the half-written copy.

    Raises:
        RunError: with the folder and the cause.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(folder)
    stored = {name: _storable(tensor, dtype) for name, tensor in weights}
    text = json.dumps({**config, "torch_dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
    try:
        with replacing_folder(folder) as new:
            save_file(stored, new / WEIGHTS_NAME, metadata={"format": "pt"})
            (new / "config.json").write_text(text)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"The draft could not be saved to {folder}: {error}. What was there before is untouched; "
            "free space or choose another folder, and save again."
        ) from error


def _storable(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu()
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().clone()


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a draft folder.

    Raises:
        ConfigError: the folder or the file is missing, or the file is not a JSON object.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"The draft folder {folder} does not exist.")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"The draft folder {folder} has no config.json.")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, not a JSON object.")
    return config


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a folder's *.safetensors files, on the CPU.

    Raises:
        ConfigError: no safetensors file, a corrupt file, or one tensor in two files.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"The draft folder {folder} has no *.safetensors file (other formats are not read).")
    weights: dict[str, Tensor] = {}
    for path in paths:
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}. The file is damaged or cut short; save or copy it again."
            ) from error
        if twice := sorted(set(tensors) & set(weights)):
            raise ConfigError(f"{twice[0]} is in more than one *.safetensors file of {folder}.")
        weights.update(tensors)
    return weights


def check_census(
    found: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    folder: str | Path,
    ignored: Iterable[str] = (),
) -> None:
    """Compare tensor names and shapes both ways. vLLM leaves missing draft tensors uninitialised without a
    word.

    Raises:
        ConfigError: names every missing, unknown or misshaped tensor.
    """
    missing = sorted(set(expected) - set(found))
    unknown = sorted(set(found) - set(expected) - set(ignored))
    wrong = [
        f"{name} is {list(found[name].shape)} and should be {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in found and tuple(found[name].shape) != tuple(shape)
    ]
    problems = []
    if missing:
        problems.append("missing: " + ", ".join(missing))
    if unknown:
        problems.append("unknown: " + ", ".join(unknown))
    if wrong:
        problems.append("wrong shape: " + ", ".join(wrong))
    if problems:
        raise ConfigError(
            f"The draft weights in {folder} do not fit its config.json and the policy; " + "; ".join(problems) + "."
        )
