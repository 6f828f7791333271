"""The policy: torchtitan's decoder, walked layer by layer so that taps can be read between layers.

Legend: T rows of a pack, E hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from torchspec.context_parallel.layout import PackedZigzag
from torchspec.policy.shape import PolicyShape
from torchspec.policy.titan import hf_names, rope_tables_for


@dataclass
class PolicyOutput:
    """hidden_TE: after the final norm, the input of the head. taps: tap id -> detached [T, E], never modified later."""

    hidden_TE: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)


class Policy(nn.Module):
    """A dense decoder with fp32 (master) parameters that computes in ``compute_dtype``.

    Weights are cast where they are used; gradients arrive in the master dtype. No logits are made here: the head belongs to
    the losses, which read ``head_weight``.

    Args:
        decoder: torchtitan's model, see ``torchspec.policy.titan``.
        shape: its numbers.
        compute_dtype: dtype of forward and backward.
        activation_checkpoint: recompute each layer in the backward.
    """

    def __init__(
        self, decoder: nn.Module, shape: PolicyShape, *, compute_dtype: torch.dtype, activation_checkpoint: bool = False
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.activation_checkpoint = activation_checkpoint

    @property
    def head_weight(self) -> Tensor:
        """Master weight of the output head [V, E] (the embedding itself where they are tied)."""
        return self.decoder.lm_head.weight

    @property
    def embed_weight(self) -> Tensor:
        """Master weight of the embedding [V, E]."""
        return self.decoder.tok_embeddings.weight

    def forward(self, tokens_T: Tensor, layout: PackedZigzag, tap_ids: tuple[int, ...] = ()) -> PolicyOutput:
        """Run the layers on packed documents.

        Args:
            tokens_T: int64.
            layout: the documents.
            tap_ids: residual streams to read: i is what enters layer i (0 = embedding rows, L = after the last layer, before
                the final norm).
        """
        last = self.shape.num_layers
        if any(not 0 <= i <= last for i in tap_ids):
            raise ValueError(f"Tap ids are 0 to {last} for {last} layers; got {tap_ids}.")
        h_1TE = embedding(tokens_T[None], self.embed_weight).to(self.compute_dtype)
        rope = rope_tables_for(self.shape, layout, self.compute_dtype)
        taps = {}
        for i, layer in enumerate(self.decoder.layers.values()):
            if i in tap_ids:
                taps[i] = h_1TE.detach()[0]
            if self.activation_checkpoint and torch.is_grad_enabled():
                h_1TE = checkpoint(self._cast_call, layer, h_1TE, layout, rope, use_reentrant=False)
            else:
                h_1TE = self._cast_call(layer, h_1TE, layout, rope)
        if last in tap_ids:
            taps[last] = h_1TE.detach()[0]
        return PolicyOutput(self._cast_call(self.decoder.norm, h_1TE)[0], taps)

    def _cast_call(self, module: nn.Module, *args: object) -> Tensor:
        """``module(*args)`` with its weights in the compute dtype; the module itself where that is theirs already."""
        weights = dict(module.named_parameters())
        if all(weight.dtype == self.compute_dtype for weight in weights.values()):
            return module(*args)
        return functional_call(module, {name: w.to(self.compute_dtype) for name, w in weights.items()}, args)

    def hf_weights(self, include_tied_head: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, detached master tensor) of every weight.

        Args:
            include_tied_head: give ``lm_head.weight`` also where it is the embedding: a live vLLM engine keeps a packed copy
                of it that must be renewed.
        """
        parameters = dict(self.decoder.named_parameters(remove_duplicate=False))
        for hf_name, name in hf_names(self.shape).items():
            yield hf_name, parameters[name].detach()
        if include_tied_head and self.shape.tie_word_embeddings:
            yield "lm_head.weight", self.head_weight.detach()
