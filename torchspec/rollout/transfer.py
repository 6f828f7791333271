"""New weights for a running engine: what it must be sent (the census), and the in-process way to send it.

vLLM's own weight-transfer API does the work (start_weight_update / update_weights / finish_weight_update, and
start_draft_weight_update for the draft); its backends are all made for CUDA across processes, so a small one is
registered here that hands tensors over by reference. It reloads layer by layer, as vLLM's own backends do: on a CPU
the linear weights are packed and the parameters emptied, so writing into them would fail.

The census. vLLM is silent about a tensor that it is not sent: a norm stays 1, a draft vocabulary stays the identity, a
tied head stays at its old packed copy. So the names and shapes of the folders that the engine was built from are the
contract of every later refit, and at construction they are compared with the parameters that the engine holds.

Two traps that this file closes (vllm 0.32.0, v1/spec_decode/llm_base_proposer.py, _maybe_share_lm_head and
_maybe_share_embeddings): a draft whose lm_head or embed_tokens is equal to the policy's at loading time gets the
policy's own module in its place. A draft that starts with a copy of the policy's head would then overwrite the policy's
head at the first refit. ``loadable_draft`` keeps them apart.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from torchspec.rollout.engine import EngineError, read_json

BACKEND = "torchspec_local"
HEAD, EMBED = "lm_head.weight", "embed_tokens.weight"
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
Shapes = dict[str, tuple[int, ...]]
Weights = list[tuple[str, Tensor]]


# -- the census ---------------------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder: those of its index, else all.

    Raises:
        EngineError: there are none.
    """
    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file():
        files = [Path(folder) / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    else:
        files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} holds no *.safetensors file; the engine loads Hugging Face safetensors folders.")
    return files


def read_shapes(folder: Path) -> Shapes:
    """Name and shape of every tensor in a folder, from the file headers. Tensors that vLLM skips are left out."""
    from safetensors import safe_open

    shapes: Shapes = {}
    for path in weight_files(folder):
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except Exception as error:  # safetensors raises its own type, without a path
            raise EngineError(f"{path} is not a readable safetensors file: {error}.") from error
    return {name: shape for name, shape in shapes.items() if not skipped_by_vllm(name)}


def skipped_by_vllm(name: str) -> bool:
    return "rotary_emb.inv_freq" in name or name == "t2d"


def read_weights(folder: Path) -> Weights:
    """Every tensor of a folder that vLLM loads."""
    from safetensors.torch import load_file

    return [(n, t) for path in weight_files(folder) for n, t in load_file(str(path)).items() if not skipped_by_vllm(n)]


def policy_contract(folder: Path, tied: bool) -> Shapes:
    """What a refit of the policy must send. With tied embeddings vLLM keeps a packed copy of the head beside the
    embedding, so the head is part of it although the folder has none."""
    shapes = read_shapes(folder)
    if tied:
        shapes[HEAD] = shapes[f"model.{EMBED}"]
    return shapes


def check_census(model: str, weights: Iterable[tuple[str, Tensor]], contract: Shapes) -> Weights:
    """The weights as a list, detached, if their names and shapes are exactly the contract's.

    Raises:
        EngineError: what is missing, unknown, sent twice or misshaped, all of it in one sentence.
    """
    sent: dict[str, Tensor] = {}
    faults = []
    for name, tensor in weights:
        if skipped_by_vllm(name):
            continue
        if name in sent:
            faults.append(f"{name} comes twice")
        sent[name] = tensor.detach()
    faults += _listed("missing", sorted(contract.keys() - sent.keys()))
    faults += _listed("unknown to the engine", sorted(sent.keys() - contract.keys()))
    faults += [
        f"{name} has shape {list(sent[name].shape)} instead of {list(contract[name])}"
        for name in sorted(sent.keys() & contract.keys())
        if tuple(sent[name].shape) != contract[name]
    ]
    if faults:
        raise EngineError(
            f"The {model}'s weights are not those that the engine was built with: {'; '.join(faults)}. "
            "Nothing was sent."
        )
    return list(sent.items())


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return [f"{', '.join(names[:6])}{more} {'is' if len(names) == 1 else 'are'} {what}"]


def with_tied_head(weights: Iterable[tuple[str, Tensor]]) -> Weights:
    """Add the tied head where the sender left it out; refuse one that differs from the embedding."""
    weights = list(weights)
    named = dict(weights)
    embed = named.get(f"model.{EMBED}")
    if embed is None:
        return weights  # the census names it
    head = named.get(HEAD)
    if head is None:
        return [*weights, (HEAD, embed)]
    if head.data_ptr() != embed.data_ptr() and not torch.equal(head, embed):
        raise EngineError(f"The policy's embeddings are tied, but {HEAD} differs from model.{EMBED}. Nothing was sent.")
    return weights


# -- what the engine holds ----------------------------------------------------------------------------------------


@dataclass
class Held:
    """Parameter names inside the engine, and what its draft shares with its policy."""

    policy: set[str] = field(default_factory=set)
    draft: set[str] = field(default_factory=set)
    shares_head: bool = False
    shares_embed: bool = False


def inspect_engine(llm: Any) -> Held:
    """Ask vLLM's worker (in this process) for the parameter names of its models."""

    def look(worker: Any) -> Held:
        policy, draft = worker.model_runner.get_model(), worker.get_draft_model()
        held = Held(policy=_unpacked(policy))
        if draft is not None:
            held.draft = _unpacked(draft)
            held.shares_head = getattr(draft, "lm_head", None) is policy.lm_head
            held.shares_embed = getattr(draft.model, "embed_tokens", None) is policy.model.embed_tokens
        return held

    return llm.collective_rpc(look)[0]


def _unpacked(model: torch.nn.Module) -> set[str]:
    names = set()
    for name, _ in model.named_parameters():
        packed = next((key for key in PACKED if f".{key}." in name), None)
        names |= {name.replace(packed, part) for part in PACKED[packed]} if packed else {name}
    return names


def check_loaded(
    held: Held, policy: Shapes, draft: Shapes | None, policy_folder: Path, draft_folder: Path | None
) -> None:
    """Compare the folders with what the engine holds after loading them: every parameter must have come from a file.

    Raises:
        EngineError: vLLM holds a parameter that no file gave it (it would be random or a default), or it made the
            draft share a tensor with the policy that the draft's folder brings itself.
    """
    missing = sorted(held.policy - policy.keys())
    if missing:
        raise EngineError(f"{policy_folder} does not hold the whole policy: {_listed('missing', missing)[0]}.")
    if draft is None:
        return
    files = {eagle_name(name) for name in draft}
    shared = {HEAD} if held.shares_head else set()
    shared |= {f"model.{EMBED}"} if held.shares_embed else set()
    missing = sorted(held.draft - files - shared)
    if missing:
        raise EngineError(
            f"{draft_folder} does not hold the whole draft: {_listed('missing', missing)[0]} (names as inside vLLM)."
        )
    wrong = sorted(shared & files)
    if wrong:
        raise EngineError(
            f"vLLM made the draft share {' and '.join(wrong)} with the policy although {draft_folder} "
            "brings its own; a refit of the draft would overwrite the policy."
        )


def eagle_name(name: str) -> str:
    """The name inside vLLM's EAGLE models of a draft tensor's checkpoint name (llama_eagle3.py, load_weights)."""
    if name == "d2t":
        return "draft_id_to_target_id"
    return name if name.startswith("lm_head") else "model." + name.replace("midlayer.", "layers.0.")


@contextmanager
def loadable_draft(policy_folder: Path, draft_folder: Path, dtype: torch.dtype) -> Iterator[Path]:
    """The folder to load the draft from: its own, or, where its head or embedding equals the policy's in the engine's
    dtype, a temporary twin in which one element differs. Load, and then send the true weights."""
    equal = [name for name in (HEAD, EMBED) if _equals_policy(policy_folder, draft_folder, name, dtype)]
    if not equal:
        yield draft_folder
        return
    from safetensors.torch import save_file

    with TemporaryDirectory(prefix="torchspec-draft-") as folder:
        twin = Path(folder)
        tensors = dict(read_weights(draft_folder))
        for name in equal:
            tensors[name] = tensors[name].clone()
            tensors[name][0, 0] += 1 + tensors[name][0, 0].abs()
        save_file(tensors, str(twin / "model.safetensors"))
        shutil.copy(draft_folder / "config.json", twin / "config.json")
        yield twin


def _equals_policy(policy_folder: Path, draft_folder: Path, name: str, dtype: torch.dtype) -> bool:
    ours = _read_one(draft_folder, name)
    if ours is None:
        return False
    theirs = _read_one(policy_folder, HEAD) if name == HEAD else _read_one(policy_folder, f"model.{EMBED}")
    if theirs is None and name == HEAD:  # tied
        theirs = _read_one(policy_folder, f"model.{EMBED}")
    return theirs is not None and theirs.shape == ours.shape and torch.equal(ours.to(dtype), theirs.to(dtype))


def _read_one(folder: Path, name: str) -> Tensor | None:
    from safetensors import safe_open

    for path in weight_files(folder):
        with safe_open(str(path), framework="pt") as file:
            if name in file.keys():
                return file.get_tensor(name)
    return None


# -- the way there ------------------------------------------------------------------------------------------------


def register_backend() -> str:
    """Make vLLM know the in-process backend; returns its name for WeightTransferConfig. May be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if not getattr(register_backend, "done", False):
        WeightTransferEngineFactory.register_engine(BACKEND, _backend_class())
        register_backend.done = True
    return BACKEND


def _backend_class() -> type:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        """Nothing to agree on: sender and receiver are one process."""

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        """Checkpoint names and tensors, by reference."""

        weights: Weights = field(default_factory=list)

    class LocalWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
        """Reload the current target (policy or draft) layer by layer from tensors of this process."""

        init_info_cls, update_info_cls = InitInfo, UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            """Nothing to do in one process."""

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            self.model.load_weights(update_info.weights)

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """Nothing is held."""

    return LocalWeightTransfer


@torch.no_grad()
def send(llm: Any, weights: Weights, *, draft: bool) -> None:
    """Replace one model's weights, all of them, through vLLM's weight-transfer API."""
    if draft:
        llm.start_draft_weight_update()
    else:
        llm.start_weight_update()
    llm.update_weights({"update_info": {"weights": weights}})
    llm.finish_weight_update()
