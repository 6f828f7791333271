"""The policy's own log-probabilities and entropy, a chunk of rows at a time.

Legend: T rows, n rows of a chunk, E hidden, V vocabulary (this rank's slice of the head under TP).

The forward keeps one number a row (the log-sum-exp); the backward makes each chunk's logits again. No [T, V]
tensor exists in either. Two operators, ``torchspec::token_logprobs`` and its backward, that ``torch.compile``
does not look into.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchspec.losses.logits import (
    LogitTransform,
    VocabComm,
    accumulate_dtype,
    block_rows,
    chunk_logits,
    finite_bias,
    row_amax,
    row_dot,
)


def token_logprobs(
    hidden_TE: Tensor,
    head_VE: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_rows: int = 1024,
    need_entropy: bool = False,
    transform: LogitTransform | None = None,
    vocab_group: str = "",
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[target] of each row, and the entropy of that distribution.

    Args:
        hidden_TE: final-normed rows (input of the head). The products run in its dtype, the softmax in fp32
            (fp64 for fp64).
        head_VE: the head; cast to the dtype of ``hidden_TE``. Its gradient is summed over chunks in fp32.
        targets_T: int64 next-token ids; -1 marks a row that is not wanted: it costs nothing, and gives 0 and
            no gradient.
        temperature: above 0.
        need_entropy: False spares an exponential where the entropy is not read; it is then zeros.
        transform: softcap, scale and bias of the policy's head; the bias gets no gradient here.
        vocab_group: name from ``register_vocab_group`` when the head is split by rows over that group. The
            gradient of the hidden rows is then already summed over the group.
    Returns: (logp_T, entropy_T), fp32 or fp64; the entropy is detached.
    Raises: ValueError for a temperature of 0, shapes that do not fit or a target outside the vocabulary.
    """
    if temperature <= 0:
        raise ValueError(
            f"token_logprobs needs a temperature above 0, got {temperature}; greedy sampling has no gradient."
        )
    if hidden_TE.shape[1] != head_VE.shape[1] or targets_T.shape != hidden_TE.shape[:1]:
        raise ValueError(
            f"Shapes do not fit: hidden {tuple(hidden_TE.shape)}, head {tuple(head_VE.shape)}, targets "
            f"{tuple(targets_T.shape)}; need [T, E], [V, E], [T]."
        )
    t = transform or LogitTransform()
    if t.bias is not None and t.bias.requires_grad:
        raise ValueError("A trainable bias of the policy's head is not supported; freeze it.")
    logp, entropy, _ = _forward(
        hidden_TE,
        head_VE,
        targets_T,
        t.bias,
        float(temperature),
        chunk_rows,
        need_entropy,
        float(t.scale),
        float(t.softcap),
        vocab_group,
    )
    return logp, entropy.detach()


class _Head:
    """What forward and backward share: cast head, reductions, wanted rows, one buffer of logits."""

    def __init__(self, hidden, head, targets, bias, temperature, chunk_rows, scale, softcap, vocab_group):
        self.hidden, self.targets, self.temperature = hidden.detach(), targets, temperature
        self.head = head.detach().to(hidden.dtype)
        self.dtype = accumulate_dtype(hidden.dtype)
        self.transform = LogitTransform(scale, softcap, finite_bias(bias, self.dtype))
        self.comm = VocabComm(vocab_group, [head.shape[0], head.shape[0]], hidden.device)
        rows = (targets >= 0).nonzero().squeeze(1)
        if rows.numel() and int(targets.max()) >= self.comm.totals[0]:
            raise ValueError(f"Target {int(targets.max())} is outside the vocabulary of {self.comm.totals[0]}.")
        n = max(1, min(chunk_rows, rows.numel()))
        self.buffer = torch.empty(n, head.shape[0], dtype=self.dtype, device=hidden.device)
        self.chunks = rows.split(n) if rows.numel() else ()

    def blocks(self):
        """(rows_b, logits_bV / temperature), the logits free to be overwritten; a whole chunk is ready at its
        first block.
        """
        for rows in self.chunks:
            z = chunk_logits(self.hidden[rows], self.head, self.transform, self.buffer[: rows.numel()])
            step = block_rows(z.shape[1], z.shape[0], z.device, self.comm.split)
            for start in range(0, rows.numel(), step):
                block = z[start : start + step]
                yield (
                    rows[start : start + step],
                    block if self.temperature == 1.0 else block.div_(self.temperature),
                )


@torch.library.custom_op("torchspec::token_logprobs", mutates_args=())
def _forward(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    chunk_rows: int,
    need_entropy: bool,
    scale: float,
    softcap: float,
    vocab_group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp_T, entropy_T, lse_T)"""
    work = _Head(hidden, head, targets, bias, temperature, chunk_rows, scale, softcap, vocab_group)
    comm = work.comm
    logp, entropy, lse = (torch.zeros(targets.shape[0], dtype=work.dtype, device=hidden.device) for _ in range(3))
    for rows, y in work.blocks():
        picked = comm.pick(y, torch.arange(rows.numel(), device=rows.device), targets[rows], head=0)
        top = comm.max(row_amax(y))
        y.sub_(top[:, None])
        if need_entropy:
            e = y.exp()
            total, weighted = comm.sums(e.sum(-1), row_dot(e, y))
            entropy[rows] = total.log() - weighted / total
        else:
            total = comm.sum(y.exp_().sum(-1))
        lse[rows] = top + total.log()
        logp[rows] = picked - lse[rows]
    return logp, entropy, lse


@_forward.register_fake
def _(hidden, head, targets, bias, temperature, chunk_rows, need_entropy, scale, softcap, vocab_group):
    dtype = accumulate_dtype(hidden.dtype)
    return tuple(hidden.new_empty(targets.shape, dtype=dtype) for _ in range(3))


@torch.library.custom_op("torchspec::token_logprobs_backward", mutates_args=())
def _backward(
    grad: Tensor,
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    temperature: float,
    chunk_rows: int,
    scale: float,
    softcap: float,
    vocab_group: str,
    need_hidden: bool,
    need_head: bool,
) -> tuple[Tensor, Tensor]:
    """(grad_hidden_TE or [0, E], grad_head_VE or [0, E])"""
    work = _Head(hidden, head, targets, bias, temperature, chunk_rows, scale, softcap, vocab_group)
    comm, dtype, offset = work.comm, work.dtype, work.comm.offsets[0]
    grad_hidden = torch.zeros_like(hidden) if need_hidden else hidden.new_zeros(0, hidden.shape[1])
    grad_head = head.new_zeros(head.shape if need_head else (0, head.shape[1]), dtype=dtype)
    for rows in work.chunks:
        h = work.hidden[rows]
        z = chunk_logits(h, work.head, work.transform, work.buffer[: rows.numel()])
        step = block_rows(z.shape[1], z.shape[0], z.device, comm.split)
        for start in range(0, rows.numel(), step):
            y, r = z[start : start + step], rows[start : start + step]
            slope = 1 - (y / softcap).square() if softcap else None
            # d logp / dz = (onehot - softmax) / temperature, times what came in for the row.
            y.div_(temperature).sub_(lse[r][:, None]).exp_()
            c = (grad[r] * (scale / temperature)).to(dtype)
            y.mul_(-c[:, None])
            local = targets[r] - offset
            mine = (local >= 0) & (local < y.shape[1])
            if y.shape[1]:
                y.scatter_add_(1, local.clamp(0, y.shape[1] - 1)[:, None], (c * mine)[:, None])
            if slope is not None:
                y.mul_(slope)
        g = z.to(hidden.dtype)
        if need_head:
            if g.dtype == dtype:
                grad_head.addmm_(g.t(), h)
            else:
                grad_head.add_(torch.mm(g.t(), h))
        if need_hidden:
            grad_hidden[rows] = comm.sum(torch.mm(g, work.head).to(dtype)).to(hidden.dtype)
    return grad_hidden, grad_head.to(head.dtype)


@_backward.register_fake
def _(
    grad,
    hidden,
    head,
    targets,
    lse,
    bias,
    temperature,
    chunk_rows,
    scale,
    softcap,
    vocab_group,
    need_hidden,
    need_head,
):
    return (
        torch.empty_like(hidden) if need_hidden else hidden.new_empty(0, hidden.shape[1]),
        torch.empty_like(head) if need_head else head.new_empty(0, head.shape[1]),
    )


def _setup(ctx, inputs, output):
    hidden, head, targets, bias, temperature, chunk_rows, _, scale, softcap, vocab_group = inputs
    ctx.save_for_backward(hidden, head, targets, output[2], bias)
    ctx.options = (temperature, chunk_rows, scale, softcap, vocab_group)
    ctx.need = ctx.needs_input_grad[:2]
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad_logp, _grad_entropy, _grad_lse):
    if grad_logp is None:
        return (None,) * 10
    hidden, head, targets, lse, bias = ctx.saved_tensors
    grad_hidden, grad_head = _backward(
        grad_logp.contiguous(), hidden, head, targets, lse, bias, *ctx.options, *ctx.need
    )
    return (grad_hidden if ctx.need[0] else None, grad_head if ctx.need[1] else None) + (None,) * 8


_forward.register_autograd(_autograd, setup_context=_setup)
