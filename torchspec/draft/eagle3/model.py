"""The EAGLE-3 draft: one Llama decoder layer, unrolled K passes over a pack of documents in one forward.

Row t of a document (x its tokens, p(t) its position), pass k:

    input    embedding of x[t+1+k], beside fc(cat(taps[t])) for k = 0, else beside what pass k-1 gave at row t
             (before the final norm)
    rope     p(t) + k, for the query and for the key that this pass adds
    keys     the trunk (pass 0) at rows 0..t of the document, plus the branch: row t of passes 1..k
    output   the hidden state whose head predicts x[t+2+k]

One document of four tokens, K = 3. Each row of the table is a query, 1 marks a key it sees:

              trunk (pass 0)   branch of pass 1   branch of pass 2
              r0 r1 r2 r3      r0 r1 r2 r3        r0 r1 r2 r3
    pass 0 r0  1  .  .  .       .  .  .  .         .  .  .  .
           r3  1  1  1  1       .  .  .  .         .  .  .  .
    pass 1 r0  1  .  .  .       1  .  .  .         .  .  .  .
           r2  1  1  1  .       .  .  1  .         .  .  .  .
    pass 2 r0  1  .  .  .       1  .  .  .         1  .  .  .
           r2  1  1  1  .       .  .  1  .         .  .  1  .

This is what the served draft computes when it proposes after row t: trunk rows of verified tokens, then its
own guesses.

Legend: T tokens in a pack, E hidden size, H query heads, G key/value heads, D head dim, V policy vocabulary,
Vd draft vocabulary, K passes, N proposed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchspec.context_parallel.trunk import Trunk
from torchspec.draft.base import Draft
from torchspec.draft.eagle3 import export
from torchspec.draft.eagle3.loss import Targets, eagle3_count_rows, eagle3_loss, eagle3_targets
from torchspec.draft.eagle3.shape import Eagle3Shape, shape_from_config
from torchspec.errors import ConfigError
from torchspec.rope import apply_rope, rope_tables

if TYPE_CHECKING:
    from torchspec.context_parallel.layout import PackedZigzag
    from torchspec.draft.config import DraftConfig
    from torchspec.losses.distill import DistillOutput
    from torchspec.policy.shape import PolicyShape

ARGMAX_ROWS = 1024
"""Rows whose logits exist at one time in ``propose``."""


class Linear(nn.Module):
    """Bias-free linear map whose fp32 master weight [out,in] is cast to the input's dtype at use.

    The cast is part of each call, so that the bf16 gradients of several passes are summed in the master's
    fp32.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight [E], cast at use."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections of the attention. Their input is [embedding, hidden], 2E wide; no bias, no q/k norm."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = Linear(2 * shape.hidden_size, shape.num_heads * shape.head_dim)
        self.k_proj = Linear(2 * shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.v_proj = Linear(2 * shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.num_heads * shape.head_dim, shape.hidden_size)

    def project(self, x_T2E: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query [T,H,D], rotated key [T,G,D], value [T,G,D]."""
        q_THD, k_TGD, v_TGD = (
            projection(x_T2E).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return apply_rope(q_THD, *rope), apply_rope(k_TGD, *rope), v_TGD


class MLP(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T,E] -> [T,E]."""
        return self.down_proj(F.silu(self.gate_proj(x_TE)) * self.up_proj(x_TE))


class DecoderLayer(nn.Module):
    """The draft's one layer; with ``norm_before_residual`` the residual carries the normed hidden state."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.norm_before_residual = shape.norm_before_residual
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, embed_TE: Tensor, hidden_TE: Tensor, rope: tuple[Tensor, Tensor], trunk: Trunk) -> Tensor:
        """One pass: embedding rows, fed-back hidden rows -> hidden rows before the final norm; [T,E]."""
        normed_TE = self.hidden_norm(hidden_TE)
        residual_TE = normed_TE if self.norm_before_residual else hidden_TE
        x_T2E = torch.cat((self.input_layernorm(embed_TE), normed_TE), dim=-1)
        attended_THD = trunk.attend(*self.self_attn.project(x_T2E, rope))
        residual_TE = residual_TE + self.self_attn.o_proj(attended_THD.flatten(-2))
        return residual_TE + self.mlp(self.post_attention_layernorm(residual_TE))


class Eagle3Draft(Draft):
    """EAGLE-3 (arXiv 2503.01840) with training-time test over packed documents, as told at the top.

    Attributes:
        shape: sizes and options.
        fc, midlayer, norm, lm_head, d2t: named as in the checkpoint.
    """

    vllm_method = "eagle3"

    def __init__(self, shape: Eagle3Shape, config: DraftConfig) -> None:
        super().__init__()
        if config.ttt_steps < 1:
            raise ConfigError(f"draft.ttt_steps is {config.ttt_steps}; the unroll needs at least one pass.")
        if config.pass_weights and len(config.pass_weights) != config.ttt_steps:
            raise ConfigError(
                f"draft.pass_weights has {len(config.pass_weights)} numbers for "
                f"{config.ttt_steps} passes (draft.ttt_steps); "
                "give one per pass, or none."
            )
        if config.args:
            raise ConfigError(f"draft.args has {', '.join(sorted(config.args))}; eagle3 takes no free settings.")
        self.shape = shape
        self.config = config
        self.tap_ids = shape.tap_ids
        self.num_passes = config.ttt_steps
        self.compute_dtype = torch.float32
        self.fc = Linear(len(shape.tap_ids) * shape.hidden_size, shape.hidden_size)
        self.midlayer = DecoderLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = Linear(shape.hidden_size, shape.draft_vocab_size)
        offsets_Vd = torch.zeros(shape.draft_vocab_size, dtype=torch.int64) if shape.has_draft_vocab else None
        self.register_buffer("d2t", offsets_Vd)

    @classmethod
    def build(
        cls,
        config: DraftConfig,
        shape: PolicyShape,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Eagle3Draft:
        """Random weights (normal, std 1/sqrt(inputs); norms 1), drawn on the CPU: the device does not matter.

        Raises:
            ConfigError: a setting that cannot work.
        """
        draft = cls(shape_from_config(config, shape), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in draft.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        draft.compute_dtype = dtype
        return draft.to(device=device, dtype=dtype)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        config: DraftConfig,
        shape: PolicyShape,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Eagle3Draft:
        """A draft from its checkpoint: sizes, options and tap ids are the file's, the rest is the config's.

        Raises:
            ConfigError: the folder cannot be read, or does not fit the policy or the config.
        """
        resolved, weights = export.read_checkpoint(folder, config, shape)
        draft = cls(resolved, config).to(dtype)
        draft.load_state_dict(weights)
        draft.compute_dtype = dtype
        return draft.to(device)

    @torch.no_grad()
    def init_from_policy(
        self,
        head_weight_VE: Tensor,
        embed_weight_VE: Tensor | None = None,
        token_counts_V: Tensor | None = None,
    ) -> None:
        """Copy the policy's head (its rows of the draft vocabulary) into the draft's own.

        Args:
            head_weight_VE: the policy's output head.
            embed_weight_VE: not used; EAGLE-3 reads embedding rows of the policy in every forward.
            token_counts_V: how often each token occurs in sample data; with a draft vocabulary, the Vd most
                frequent ones are kept (of equal counts the lower ids), in ascending order.

        Raises:
            ConfigError: a head of another shape, or a draft vocabulary without counts.
        """
        expected = (self.shape.vocab_size, self.shape.hidden_size)
        if tuple(head_weight_VE.shape) != expected:
            raise ConfigError(
                f"The policy's head is {list(head_weight_VE.shape)}, the draft was built for {list(expected)}."
            )
        if self.d2t is None:
            self.lm_head.weight.copy_(head_weight_VE)
            return
        if token_counts_V is None or tuple(token_counts_V.shape) != expected[:1]:
            raise ConfigError(
                f"draft.vocab_size is {self.shape.draft_vocab_size} of {expected[0]} tokens, so token counts of that "
                "length from sample data are needed to choose them; none of that shape were given."
            )
        order_V = torch.argsort(token_counts_V.to(self.d2t.device), descending=True, stable=True)
        targets_Vd = order_V[: self.shape.draft_vocab_size].sort().values
        self.d2t.copy_(targets_Vd - torch.arange(len(targets_Vd), device=targets_Vd.device))
        self.lm_head.weight.copy_(head_weight_VE[targets_Vd.to(head_weight_VE.device)])

    @property
    def head_weight(self) -> Tensor:
        """Output head [Vd,E], the master weight; the loss casts it and returns its gradient unrounded."""
        return self.lm_head.weight

    def forward(self, taps: list[Tensor], embed_TE: Tensor, layout: PackedZigzag) -> list[Tensor]:
        """The whole unroll, in one call so that an FSDP root gathers the weights once.

        Args:
            taps: one [T,E] per tap id, in ascending order of the ids, detached.
            embed_TE: the policy's embedding rows of x[t], detached.
            layout: the pack's documents.

        Returns:
            K tensors [T,E] in the compute dtype: the final-normed hidden states that ``head_weight`` reads.
        """
        hidden_TE, trunk, outputs = self._first_hidden(taps), Trunk(layout), []
        for k in range(self.num_passes):
            hidden_TE = self._pass(k, layout.shift(embed_TE, 1 + k), hidden_TE, trunk)
            outputs.append(self.norm(hidden_TE))
        return outputs

    def _first_hidden(self, taps: list[Tensor]) -> Tensor:
        if len(taps) != len(self.tap_ids):
            raise ValueError(
                f"The draft reads {len(self.tap_ids)} taps {list(self.tap_ids)}, but was given {len(taps)}."
            )
        return self.fc(torch.cat([tap_TE.to(self.compute_dtype) for tap_TE in taps], dim=-1))

    def _pass(self, k: int, embed_TE: Tensor, hidden_TE: Tensor, trunk: Trunk) -> Tensor:
        """Pass k on embedding rows of x[t+1+k]; returns hidden rows before the final norm."""
        shape = self.shape
        rope = rope_tables(
            trunk.layout.positions_T + k,
            shape.head_dim,
            shape.rope_theta,
            shape.rope_scaling,
            dtype=self.compute_dtype,
        )
        return self.midlayer(embed_TE.to(self.compute_dtype), hidden_TE, rope, trunk)

    def count_rows(self, layout: PackedZigzag, mask_T: Tensor) -> Tensor | None:
        """Rows of each pass that count, [K]; see ``torchspec.draft.eagle3.loss.eagle3_count_rows``."""
        return eagle3_count_rows(self, layout, mask_T)

    def targets(self, *batch: Any, **options: Any) -> Targets:
        """Teacher rows and counts of a microbatch; arguments as
        ``torchspec.draft.eagle3.loss.eagle3_targets``."""
        return eagle3_targets(self, *batch, **options)

    def loss(self, *batch: Any, **options: Any) -> DistillOutput:
        """Distillation of the K passes; arguments as ``torchspec.draft.eagle3.loss.eagle3_loss``."""
        return eagle3_loss(self, *batch, **options)

    @torch.no_grad()
    def propose(
        self,
        tokens_T: Tensor,
        taps: list[Tensor],
        embed_weight_VE: Tensor,
        layout: PackedZigzag,
        num_tokens: int,
    ) -> Tensor:
        """What the served draft proposes after every prefix: the same modules, its own argmax fed back.

        Row t answers for the prefix x[0..t+1] of its document: the engine has the policy's taps of rows 0..t
        and the token x[t+1] just sampled, and proposes x[t+2], x[t+3], ...
        (vllm/v1/spec_decode/llm_base_proposer.py, 0.32.0).

        Args:
            tokens_T: int64 token ids.
            taps: as in ``forward``.
            embed_weight_VE: the policy's embedding matrix.
            layout: the pack's documents.
            num_tokens: N, which may exceed the K passes of training.

        Returns:
            int64 [T,N] of policy token ids; -1 in the last row of each document, where x[t+1] does not exist.
        """
        if num_tokens < 1:
            raise ValueError(f"propose makes at least one token a row; num_tokens is {num_tokens}.")
        hidden_TE, trunk, columns = self._first_hidden(taps), Trunk(layout), []
        token_T = layout.shift(tokens_T, 1)
        for k in range(num_tokens):
            hidden_TE = self._pass(k, embed_weight_VE[token_T], hidden_TE, trunk)
            token_T = self._argmax(self.norm(hidden_TE))
            columns.append(token_T)
        has_next_T = layout.shift(torch.ones_like(tokens_T), 1) == 1
        return torch.stack(columns, dim=1).masked_fill(~has_next_T[:, None], -1)

    def _argmax(self, normed_TE: Tensor) -> Tensor:
        """Most likely policy token of each row, a block of rows at a time."""
        head_VdE = self.head_weight.to(self.compute_dtype)
        index_T = torch.cat([(rows @ head_VdE.T).argmax(dim=-1) for rows in normed_TE.split(ARGMAX_ROWS)])
        return index_T if self.d2t is None else index_T + self.d2t[index_T]

    def hf_config(self) -> dict[str, Any]:
        """config.json for vLLM, tap ids included."""
        return export.hf_config(self.shape)

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, full tensor), after a census of the names."""
        return export.hf_weights(self)
