"""The policy as the rest of TorchSpec sees it: packed tokens and a layout in, final hidden rows and taps out.

Legend: T rows of this rank, E hidden, V vocabulary, L layers, F rotary frequencies.  torchtitan's layers want
    a batch
dimension: [1, T, E].

Tap ``i`` is the residual stream that enters decoder layer ``i``: 0 the embedding rows, L the output of the
last layer before the final norm.  Taps are that stream without a graph (``detach``), and nothing here writes
into them later.  The forward does the same arithmetic whether taps are asked for or not, so the policy's
gradients are bit-equal.

The output is the input of the head.  Logits [T, V] are made nowhere here; the losses make them chunk by
chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchspec.context_parallel.layout import PackedZigzag
from torchspec.policy.shape import PolicyShape
from torchspec.rope import rope_tables


@dataclass
class PolicyOutput:
    """``hidden_TE`` after the final norm, in the compute dtype; ``taps`` by tap id, each [T, E], detached."""

    hidden_TE: Tensor
    taps: dict[int, Tensor]


@dataclass(frozen=True)
class PolicyPart:
    """What of a policy one rank or one pipeline stage holds: some layers, the embedding, the final norm with the
    head."""

    layers: tuple[int, ...]
    embed: bool
    head: bool


class Policy(nn.Module):
    """A decoder of ``torchspec.policy.titan`` with master weights in one dtype and compute in another.

    Args:
        decoder: has ``tok_embeddings``, ``layers`` (ModuleDict keyed by the layer's index), ``norm`` and
            ``lm_head``. A pipeline stage's has None for what it does not hold, and keeps the indices of the
            whole model.
        shape: of the whole model.
        hf_names: name of each parameter of ``decoder`` -> its name in a Hugging Face checkpoint.
        compute_dtype: weights are cast to it module by module, where they are used; gradients arrive in the
            master dtype.  The embedding is looked up in the master dtype and its rows are cast, so that the
            gradients of a token's many occurrences are summed in the master dtype.
        activation_checkpoint: recompute each layer in the backward, except the attention op's output.

    Attributes:
        hf_shapes: of the whole model, Hugging Face name -> shape.
        hf_config, generation_config: what config.json and generation_config.json of the folder that the
            policy came from hold ({} and None for a policy built from sizes); carried on by ``save_policy``.
    """

    def __init__(
        self,
        decoder: nn.Module,
        shape: PolicyShape,
        hf_names: Mapping[str, str],
        hf_shapes: Mapping[str, tuple[int, ...]],
        *,
        compute_dtype: torch.dtype,
        activation_checkpoint: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.shape, self.compute_dtype = decoder, shape, compute_dtype
        self.activation_checkpoint = activation_checkpoint
        self._hf_names, self.hf_shapes = dict(hf_names), dict(hf_shapes)
        if shape.tie_word_embeddings:  # the name of a last stage's own copy; else the embedding comes first
            self._hf_names["lm_head.weight"] = "model.embed_tokens.weight"
        self.hf_config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] | None = None

    def forward(self, tokens_T: Tensor, layout: PackedZigzag, tap_ids: tuple[int, ...] = ()) -> PolicyOutput:
        """Run this rank's rows of a pack.

        Args:
            tokens_T: int64 [T].
            layout: of the pack; attention never crosses its documents.
            tap_ids: from 0 to L.

        Raises:
            ValueError: another number of rows than the layout's, or a tap id that the model does not have.
        """
        num_layers = self.shape.num_layers
        if tokens_T.shape[0] != layout.num_tokens:
            raise ValueError(f"The layout has {layout.num_tokens} rows; got tokens of shape {tuple(tokens_T.shape)}.")
        if wrong := [i for i in tap_ids if not 0 <= i <= num_layers]:
            raise ValueError(f"Tap id {wrong[0]} does not exist in a policy of {num_layers} layers.")
        taps: dict[int, Tensor] = {}
        x_1TE = self.decode(self.embed(tokens_T), layout, tap_ids, taps)
        return PolicyOutput(x_1TE[0], taps)

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Embedding rows [1, T, E] of int64 tokens, in the compute dtype."""
        return self.model.tok_embeddings(tokens_T).to(self.compute_dtype).unsqueeze(0)

    def decode(
        self, x_1TE: Tensor, layout: PackedZigzag, tap_ids: tuple[int, ...] = (), taps: dict[int, Tensor] | None = None
    ) -> Tensor:
        """The layers (and the final norm) that are here: rows [1, T, E] -> rows [1, T, E]; fills ``taps``."""
        rope = self._rope_tables(layout)
        for index, layer in self.model.layers.items():
            if int(index) in tap_ids:
                taps[int(index)] = x_1TE.detach()[0]
            x_1TE = self._run_layer(layer, x_1TE, layout, rope)
        if self.model.norm is not None:
            if self.shape.num_layers in tap_ids:
                taps[self.shape.num_layers] = x_1TE.detach()[0]
            x_1TE = self._cast_call(self.model.norm, x_1TE)
        return x_1TE

    def stage(self, part: PolicyPart) -> Policy:
        """The part of this policy that a pipeline stage runs, over the same modules and parameters."""
        model, decoder = self.model, nn.Module()
        decoder.tok_embeddings = model.tok_embeddings if part.embed else None
        decoder.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in part.layers})
        decoder.norm, decoder.lm_head = (model.norm, model.lm_head) if part.head else (None, None)
        return Policy(
            decoder,
            self.shape,
            self._hf_names,
            self.hf_shapes,
            compute_dtype=self.compute_dtype,
            activation_checkpoint=self.activation_checkpoint,
        )

    def tap_points(self) -> dict[int, nn.Module]:
        """Tap id -> the module here whose first positional input is the tap."""
        points: dict[int, nn.Module] = {int(index): layer for index, layer in self.model.layers.items()}
        return points | ({self.shape.num_layers: self.model.norm} if self.model.norm is not None else {})

    def _rope_tables(self, layout: PackedZigzag) -> tuple[Tensor, Tensor]:
        """cos and sin [T, F], once for all layers; in fp32, or fp64 where compute is."""
        shape = self.shape
        return rope_tables(
            layout.positions_T, shape.head_dim, shape.rope_theta, shape.rope_scaling, dtype=self.compute_dtype
        )

    def _run_layer(self, layer: nn.Module, x_1TE: Tensor, layout: PackedZigzag, rope: tuple[Tensor, Tensor]) -> Tensor:
        if not (self.activation_checkpoint and torch.is_grad_enabled()):
            return self._cast_call(layer, x_1TE, layout, rope)
        # the attention's output is kept: under context parallel recomputing it would gather the keys once
        # more
        keep = [torch.ops.torchspec.branch_attention.default]
        return checkpoint(
            self._cast_call,
            layer,
            x_1TE,
            layout,
            rope,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(create_selective_checkpoint_contexts, keep),
        )

    def _cast_call(self, module: nn.Module, *args: Any) -> Tensor:
        """``module(*args)`` with its weights in the compute dtype; their gradients come back in the master
        dtype."""
        if hasattr(module, "unshard"):
            return module(*args)  # FSDP gathers the weights in the compute dtype
        weights = dict(module.named_parameters())
        if all(w.dtype == self.compute_dtype for w in weights.values()):
            return module(*args)
        return torch.func.functional_call(module, {k: w.to(self.compute_dtype) for k, w in weights.items()}, args)

    @property
    def embed_weight(self) -> Tensor:
        """Token embedding [V, E], the master parameter."""
        return self.model.tok_embeddings.weight

    @property
    def head_weight(self) -> Tensor:
        """Output head [V, E], the master parameter; the embedding itself when tied."""
        return self.model.lm_head.weight

    def hf_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters under their Hugging Face names, each once: a tied head is ``model.embed_tokens.weight``
        only."""
        return {self._hf_names[name]: p for name, p in self.model.named_parameters()}

    def hf_weights(self, include_tied_head: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole detached tensor in the master dtype): the parameters' own memory where
        unsharded.

        With ``include_tied_head`` a tied head comes as ``lm_head.weight`` too: vLLM packs a copy of the head,
        which a refit without that name would leave stale.
        """
        tied = self.shape.tie_word_embeddings and include_tied_head
        for name, parameter in self.hf_parameters().items():
            tensor = parameter.detach()
            tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            yield name, tensor
            if tied and name == "model.embed_tokens.weight":
                yield "lm_head.weight", tensor
