"""What every draft is: an abstract module, and the registry that finds a draft class by name.

A draft lives beside the policy and never touches it: taps, embedding rows, teacher hidden states and the
teacher's head reach it detached. To add one, subclass ``Draft`` and either register it below or name it in
the config as ``module:Class`` or ``path/to/file.py:Class``.

Legend: T tokens in a pack, E hidden size, V policy vocabulary, Vd draft vocabulary, K passes.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from torchspec.errors import ConfigError

if TYPE_CHECKING:
    from torchspec.context_parallel.layout import PackedZigzag
    from torchspec.draft.config import DraftConfig
    from torchspec.losses.distill import DistillOutput
    from torchspec.policy.shape import PolicyShape

REGISTRY: dict[str, str] = {"eagle3": "torchspec.draft.eagle3:Eagle3Draft"}
"""Short names of drafts -> 'module:Class'."""


class Draft(nn.Module, abc.ABC):
    """A speculator that is trained on the policy's taps and served by vLLM.

    Attributes:
        vllm_method: ``method`` of vLLM's speculative_config for this draft.
        tap_ids: ascending tap ids that ``forward`` consumes, in that order.
        num_passes: K, passes of the unroll.
        compute_dtype: dtype of forward and backward; parameters stay in their own dtype (fp32 masters) and
            are cast at use, which is a no-op when the two are equal.
        d2t: int64 buffer [Vd] with target_id = i + d2t[i], or None when the draft speaks the policy's
            vocabulary.
    """

    vllm_method: ClassVar[str]
    tap_ids: tuple[int, ...]
    num_passes: int
    compute_dtype: torch.dtype
    d2t: Tensor | None

    @classmethod
    @abc.abstractmethod
    def build(
        cls,
        config: DraftConfig,
        shape: PolicyShape,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Draft:
        """Random weights from a generator of the draft's own (the global one is neither read nor moved)."""

    @classmethod
    @abc.abstractmethod
    def load(
        cls,
        folder: str | Path,
        config: DraftConfig,
        shape: PolicyShape,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Draft:
        """A draft from a Hugging Face folder; ConfigError with a sentence when it does not fit the policy."""

    @abc.abstractmethod
    def init_from_policy(
        self,
        head_weight_VE: Tensor,
        embed_weight_VE: Tensor | None = None,
        token_counts_V: Tensor | None = None,
    ) -> None:
        """Start the draft's own head from the policy's, and choose the draft vocabulary by token counts."""

    @abc.abstractmethod
    def forward(self, taps: list[Tensor], embed_TE: Tensor, layout: PackedZigzag) -> list[Tensor]:
        """The whole K-pass unroll: taps [T,E] in tap_ids order -> K final-normed hidden states [T,E]."""

    @property
    @abc.abstractmethod
    def head_weight(self) -> Tensor:
        """Output head [Vd,E], the master weight."""

    @abc.abstractmethod
    def count_rows(self, layout: PackedZigzag, mask_T: Tensor) -> Tensor | None:
        """int64 [K]: rows that count in each pass of a microbatch, equal to ``targets(...).counts_K``.

        None where only the policy's rows can tell (a gate): the trainer then keeps all microbatches' taps
        until the targets of all are known.
        """

    @abc.abstractmethod
    def targets(
        self,
        policy_hidden_TE: Tensor,
        policy_head_VE: Tensor,
        tokens_T: Tensor,
        mask_T: Tensor,
        layout: PackedZigzag,
        *,
        chunk_rows: int = 1024,
    ) -> Any:
        """What the policy teaches in one microbatch, with ``counts_K``: int64 [K], rows that count in each
        pass.

        mask_T is 1 where x[t] is a trained token. The loss wants counts_K summed over the microbatches and
        ranks of the optimizer step.
        """

    @abc.abstractmethod
    def loss(
        self,
        student_hidden: list[Tensor],
        targets: Any,
        policy_head_VE: Tensor,
        counts_K: Tensor,
        *,
        sampling_temperature: float = 1.0,
        draft_sampling: str = "greedy",
        chunk_rows: int = 1024,
    ) -> DistillOutput:
        """Distillation loss of one microbatch, divided by the step's counts; gradient to the draft only."""

    @abc.abstractmethod
    def propose(
        self,
        tokens_T: Tensor,
        taps: list[Tensor],
        embed_weight_VE: Tensor,
        layout: PackedZigzag,
        num_tokens: int,
    ) -> Tensor:
        """Greedy proposals [T, num_tokens] after every prefix, the draft's own argmax fed back as served."""

    @abc.abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """The config.json that vLLM reads."""

    @abc.abstractmethod
    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the served draft under its checkpoint name, full and in the master dtype.

        Of a sharded draft (DTensor parameters) all ranks iterate together.
        """

    def save(
        self,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        weights: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        """Write config.json and model.safetensors as one atomic step; dtype None keeps the master dtype.

        ``weights``: an iterator of ``hf_weights`` that other ranks follow, of a draft that they share; None: a new one.
        """
        from torchspec.draft.folder import write_model_folder

        write_model_folder(
            folder,
            self.hf_config(),
            self.hf_weights() if weights is None else weights,
            dtype or next(self.parameters()).dtype,
        )


def load_draft_class(name: str) -> type[Draft]:
    """The class behind a registered name, 'module:Class' or 'path/to/file.py:Class'.

    Raises:
        ConfigError: an unknown short name, or an object that is not a Draft subclass.
    """
    from torchspec.plugins import load_object

    if ":" not in name and name not in REGISTRY:
        raise ConfigError(
            f"draft.algorithm is {name!r}, which is not registered: use {', '.join(sorted(REGISTRY))}, "
            "or name your own class as 'module:Class' or 'path/to/file.py:Class'."
        )
    found = load_object(REGISTRY.get(name, name))
    if not (isinstance(found, type) and issubclass(found, Draft)):
        raise ConfigError(f"draft.algorithm {name!r} is {found!r}, not a subclass of torchspec.draft.base.Draft.")
    return found


def build_draft(
    config: DraftConfig,
    shape: PolicyShape,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
) -> Draft:
    """The configured draft: loaded where config.path names a folder, else random (then ``init_from_policy``).

    Args:
        config: the [draft] table.
        shape: the policy that it follows.
        seed: of the random weights.
        device: where the parameters live.
        dtype: master dtype of the parameters.
        compute_dtype: dtype of forward and backward; None takes dtype.
    """
    draft_class = load_draft_class(config.algorithm)
    if config.path:
        draft = draft_class.load(config.path, config, shape, device=device, dtype=dtype)
    else:
        draft = draft_class.build(config, shape, seed=seed, device=device, dtype=dtype)
    draft.compute_dtype = compute_dtype or dtype
    if config.compile:
        # Only the forward: hooks of an FSDP root stay outside of the graph.
        draft.forward = torch.compile(draft.forward, fullgraph=True)
    return draft
