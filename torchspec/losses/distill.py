"""Fused multi-pass distillation: the draft's K losses, their gradients and metrics in one sweep over the
teacher's rows.

Legend: T student rows, R rows of the teacher's table, n rows of a chunk, m of them that pass k uses, b rows
of a block, E hidden, V policy vocabulary, D draft vocabulary, K passes.

For each chunk of teacher rows the policy's logits are computed once and serve all K passes; for each pass the
draft's logits of the rows that this chunk teaches become, in place, the gradient of the loss with respect to
them, and that at once the gradients of the hidden rows and of the head. Head-sized matrix products: one per
chunk for the teacher, three per pass. Nothing of size [T, V] exists; what lives beyond the gradients
themselves is two or three chunks of logits.

The gradients are made in the forward, so everything that scales them (pass weights, global counts) must be
known before; the incoming gradient only scales. The sweep is an opaque operator
(``torchspec::distill_sweep``): ``torch.compile`` does not look inside and does not break on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchspec.losses.anchors import gate_anchors, teacher_anchors, teacher_table
from torchspec.losses.logits import LogitTransform, accumulate_dtype, register_vocab_group
from torchspec.losses.objectives import OBJECTIVES
from torchspec.losses.sweep import NonFiniteTeacher, distill_sweep

__all__ = [
    "DistillOutput",
    "LogitTransform",
    "NonFiniteTeacher",
    "distill_loss",
    "distill_metrics",
    "gate_anchors",
    "register_vocab_group",
    "teacher_anchors",
    "teacher_table",
]


class DistillOutput(NamedTuple):
    """The loss and the sums behind the metrics. Add the sums over microbatches and ranks, then
    ``distill_metrics``.
    """

    loss: Tensor
    """Scalar sum_k alpha_k sum_rows loss / sum_k alpha_k count_k; gradient to the student's hidden rows and
    head only.
    """
    loss_sum_K: Tensor
    """fp64 sum of each pass's row losses."""
    count_K: Tensor
    """fp64 rows that counted in each pass (here, not globally)."""
    top1_sum_K: Tensor
    """fp64 rows whose most likely draft token is the policy's."""
    accept_sum_K: Tensor
    """fp64 sum of the acceptance probability of each row's proposal."""
    accept_len_sum: Tensor
    """fp64 sum over full windows of the expected number of accepted tokens, by the joint prefix."""
    accept_len_count: Tensor
    """fp64 full windows: student rows that count in every pass."""
    entropy_sum: Tensor
    """fp64 sum of the policy's entropy over the teacher rows of pass 0."""

    def sums(self) -> dict[str, Tensor]:
        """The additive fields, detached, by name."""
        return {name: getattr(self, name) for name in self._fields if name != "loss"}


class _DistillFunction(torch.autograd.Function):
    """Runs the sweep in the forward and hands its gradients out, scaled, in the backward."""

    @staticmethod
    def forward(ctx, options, optional, teacher_hidden, teacher_head, anchors, weight_K, student_head, *student_hidden):
        need_hidden = any(ctx.needs_input_grad[7:])
        need_head = ctx.needs_input_grad[6]
        stats_4K, scalars_3, grad_hidden, grad_head = distill_sweep(
            teacher_hidden,
            teacher_head,
            list(student_hidden),
            student_head,
            anchors,
            weight_K,
            *optional,
            need_hidden=need_hidden,
            need_head=need_head,
            **options,
        )
        ctx.save_for_backward(grad_head, *grad_hidden)
        ctx.need = (need_hidden, need_head)
        ctx.mark_non_differentiable(stats_4K, scalars_3)
        loss = (stats_4K[0] * weight_K).sum().to(accumulate_dtype(teacher_hidden.dtype))
        return loss, stats_4K, scalars_3

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_head, *grad_hidden = ctx.saved_tensors
        need_hidden, need_head = ctx.need
        # In place: the sweep's buffers are the gradients, a second copy of them would double the memory.
        # Autograd's version check turns a second backward through the same loss into an error.
        head = grad_head.mul_(grad_loss) if need_head else None
        passes = len(ctx.needs_input_grad) - 7
        hidden = [g.mul_(grad_loss) for g in grad_hidden] if need_hidden else [None] * passes
        return None, None, None, None, None, None, head, *hidden


def distill_loss(
    teacher_hidden_RE: Tensor,
    teacher_head_VE: Tensor,
    student_hidden: list[Tensor],
    student_head_DE: Tensor,
    anchors_KR: Tensor,
    counts_K: Tensor,
    *,
    pass_weights: tuple[float, ...] = (),
    objective: str = "forward_kl",
    temperature: float = 1.0,
    sampling_temperature: float = 1.0,
    draft_sampling: str = "greedy",
    d2t: Tensor | None = None,
    target_ids_R: Tensor | None = None,
    position_gate: bool = False,
    chunk_rows: int = 1024,
    teacher_transform: LogitTransform | None = None,
    student_transform: LogitTransform | None = None,
    vocab_group: str = "",
) -> DistillOutput:
    """The draft's loss over all passes, equal to the dense computation but without any logits tensor.

    Args:
        teacher_hidden_RE: the policy's final-normed rows (input of its head); never differentiated.
        teacher_head_VE: the policy's head, or this rank's slice of its rows; never differentiated. Cast to
            the dtype of ``teacher_hidden_RE`` if it has another. Padding rows of a vocabulary: pass the head
            without them.
        student_hidden: K tensors [T, E], the draft's final-normed rows of each pass.
        student_head_DE: the draft's head (D = V without ``d2t``), or this rank's slice.
        anchors_KR: int64; the student row that a teacher row teaches in each pass, -1 for none
            (``teacher_anchors``).
        counts_K: rows that count in each pass over the whole optimizer step: all microbatches and ranks.
        pass_weights: alpha_k; empty is all ones.
        objective: see ``torchspec.losses.objectives``.
        temperature: of teacher and student inside the objective (no temperature^2 factor).
        sampling_temperature: temperature of the rollouts, for entropy and acceptance; 0 is greedy.
        draft_sampling: how the engine drafts, for the acceptance: "greedy" p(argmax q), "probabilistic" sum
            min(p, q).
        d2t: int64 [D], the draft token i stands for the policy token i + d2t[i]. The target is then the
            policy's softmax over those tokens alone. The metrics use the full vocabulary.
        target_ids_R: int64, the token that follows teacher row r (x[r+1]); for "hard_ce" only. Rows whose
            token is not in the draft's vocabulary give no loss.
        position_gate: leave out rows whose most likely policy token is not in the draft's vocabulary. The
            counts must leave them out too: take them from ``gate_anchors``.
        chunk_rows: teacher rows whose logits exist at one time.
        vocab_group: name from ``register_vocab_group``; the heads are then split by rows over that group, the
            hidden rows are the same on all its ranks, and the results too. Every rank must call.

    One backward only: the gradients are scaled in place.

    Raises:
        ValueError: arguments that do not fit each other, with the numbers.
        NonFiniteTeacher: a policy row that teaches has logits that are NaN or infinite; names the row of
            ``teacher_hidden_RE``. All ranks of ``vocab_group`` raise together; other ranks do not know of it.
    """
    transforms = (teacher_transform or LogitTransform(), student_transform or LogitTransform())
    options = {
        "objective": objective,
        "temperature": float(temperature),
        "sampling_temperature": float(sampling_temperature),
        "probabilistic": draft_sampling == "probabilistic",
        "position_gate": position_gate,
        "chunk_rows": chunk_rows,
        "vocab_group": vocab_group,
    }
    for name, transform in zip(("teacher", "student"), transforms):
        options |= {f"{name}_scale": float(transform.scale), f"{name}_softcap": float(transform.softcap)}
    optional = (d2t, target_ids_R, transforms[0].bias)
    _check_options(options, draft_sampling, target_ids_R, transforms[1])
    _check_shapes(teacher_hidden_RE, teacher_head_VE, student_hidden, student_head_DE, anchors_KR)
    _check_vocabulary(teacher_head_VE, student_head_DE, d2t, vocab_group)
    weight_K = _pass_scales(pass_weights, counts_K, anchors_KR)
    teacher = (teacher_hidden_RE.detach(), teacher_head_VE.detach())
    loss, stats_4K, scalars_3 = _DistillFunction.apply(
        options, optional, *teacher, anchors_KR, weight_K, student_head_DE, *student_hidden
    )
    return DistillOutput(loss, *stats_4K.unbind(0), *scalars_3.unbind(0))


def _pass_scales(pass_weights: tuple[float, ...], counts_K: Tensor, anchors_KR: Tensor) -> Tensor:
    """[K] fp64: alpha_k / sum_j alpha_j count_j, 0 when nothing counts anywhere."""
    passes = anchors_KR.shape[0]
    if tuple(counts_K.shape) != (passes,):
        raise ValueError(f"counts_K must hold one number for each of {passes} passes; got {tuple(counts_K.shape)}.")
    if pass_weights and len(pass_weights) != passes:
        raise ValueError(f"pass_weights has {len(pass_weights)} numbers for {passes} passes.")
    weights = tuple(pass_weights) or (1.0,) * passes
    alpha_K = torch.tensor(weights, dtype=torch.float64, device=anchors_KR.device)
    total = (alpha_K * counts_K.to(alpha_K)).sum()
    return torch.where(total > 0, alpha_K / total.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def _check_options(options: dict, draft_sampling: str, target_ids: Tensor | None, student: LogitTransform) -> None:
    objective, tau = options["objective"], options["sampling_temperature"]
    if objective not in OBJECTIVES:
        known = ", ".join(sorted(OBJECTIVES))
        raise ValueError(f"Distillation objective {objective!r} is unknown; choose one of {known}.")
    if objective == "hard_ce" and target_ids is None:
        raise ValueError("Objective hard_ce needs target_ids_R, the token that follows each teacher row.")
    if options["temperature"] <= 0 or tau < 0:
        raise ValueError(
            f"temperature must be above 0, sampling_temperature 0 or more; got {options['temperature']}, {tau}."
        )
    if draft_sampling not in ("greedy", "probabilistic"):
        raise ValueError(f"draft_sampling is {draft_sampling!r}; choose greedy or probabilistic.")
    if student.bias is not None:
        raise ValueError("A bias on the draft's head is not supported: no served draft format has one.")


def _check_shapes(teacher_hidden, teacher_head, student_hidden, student_head, anchors) -> None:
    passes, rows = len(student_hidden), teacher_hidden.shape[0]
    if passes == 0:
        raise ValueError("student_hidden is empty; it needs one [T, E] tensor for each pass.")
    if tuple(anchors.shape) != (passes, rows):
        raise ValueError(f"anchors_KR must be [{passes} passes, {rows} rows]; got {tuple(anchors.shape)}.")
    for name, hidden, head in (
        ("teacher", teacher_hidden, teacher_head),
        *(("student", h, student_head) for h in student_hidden),
    ):
        if hidden.shape[1] != head.shape[1]:
            raise ValueError(f"The {name}'s hidden {tuple(hidden.shape)} and head {tuple(head.shape)} differ in width.")


def _check_vocabulary(teacher_head, student_head, d2t, vocab_group) -> None:
    draft = student_head.shape[0]
    if d2t is None and draft != teacher_head.shape[0]:
        raise ValueError(
            f"Without d2t both heads need the same vocabulary; teacher {teacher_head.shape[0]}, student {draft}."
        )
    if d2t is not None and not vocab_group and d2t.numel() != draft:
        raise ValueError(f"d2t has {d2t.numel()} entries for a draft vocabulary of {draft}.")


def distill_metrics(sums: dict[str, Tensor]) -> dict[str, float]:
    """The step's metrics under their names in metrics.jsonl, from sums over all microbatches and ranks.

    ``draft/expected_accept_len`` is 1 + the expected number of accepted draft tokens, as ``spec/accept_len``
    counts it; it is absent when no document is long enough for a full window of K predictions.
    """
    count = sums["count_K"].double().clamp_min(1).tolist()
    out: dict[str, float] = {}
    for k, n in enumerate(count):
        out[f"draft/loss_pass_{k}"] = float(sums["loss_sum_K"][k]) / n
        out[f"draft/top1_pass_{k}"] = float(sums["top1_sum_K"][k]) / n
        out[f"draft/expected_accept_pass_{k}"] = float(sums["accept_sum_K"][k]) / n
    windows = float(sums["accept_len_count"])
    if windows:
        out["draft/expected_accept_len"] = 1 + float(sums["accept_len_sum"]) / windows
    out["draft/teacher_entropy"] = float(sums["entropy_sum"]) / count[0]
    return out
