"""The operator behind ``distill_loss``: one sweep over chunks of teacher rows, with gradients and metrics.

Legend: see ``distill.py``. "probs" and "log_probs" are over the draft's vocabulary; the sampling
distribution, for the metrics, is over the policy's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchspec.losses.anchors import draft_index_of_target
from torchspec.losses.logits import (
    LogitTransform,
    VocabComm,
    accumulate_dtype,
    block_rows,
    chunk_logits,
    finite_bias,
    row_amax,
    row_dot,
    row_max,
    softcap_gradient_,
)
from torchspec.losses.objectives import OBJECTIVES, teacher_form


class NonFiniteTeacher(FloatingPointError):
    """The policy's logits are NaN or infinite in a row that teaches."""

    def __init__(self, rows: list[int], total: int):
        shown = ", ".join(str(row) for row in rows)
        super().__init__(
            f"The policy's logits are NaN or infinite in {total} of the teacher rows, first in row {shown}; "
            "the draft cannot learn from them. Look for a NaN in the policy's weights or hidden states."
        )
        self.rows = rows


class _Options(NamedTuple):
    objective: str
    temperature: float
    sampling_temperature: float
    probabilistic: bool
    position_gate: bool
    chunk_rows: int
    teacher: LogitTransform
    student: LogitTransform


class _TeacherChunk(NamedTuple):
    """What the K passes need of one chunk of n teacher rows."""

    rows: Tensor
    """[n] indices into the teacher's table."""
    logits: Tensor
    """[n, V] raw logits; overwritten by ``target`` where one buffer can serve both."""
    target: Tensor | None
    """[n, D] probabilities or their logarithms at the objective's temperature, by the objective's need."""
    sampling_lse: Tensor
    """[n] log-sum-exp of logits / sampling_temperature (of the logits themselves when that is 0)."""
    argmax: Tensor
    """[n] most likely policy token."""
    entropy: Tensor
    """[n] entropy at the sampling temperature, full vocabulary."""
    keep: Tensor | None
    """[n] bool: rows that the position gate lets through; None without a gate."""


class _Sweep:
    def __init__(
        self,
        teacher_hidden,
        teacher_head,
        student_hidden,
        student_head,
        anchors,
        options: _Options,
        d2t,
        target_ids,
        vocab_group,
    ):
        self.options = options
        self.hidden_RE = teacher_hidden
        self.teacher_head = teacher_head.to(teacher_hidden.dtype)
        self.student_hidden = student_hidden
        self.student_head = student_head.to(student_hidden[0].dtype)
        self.anchors = anchors
        self.dtype = accumulate_dtype(student_hidden[0].dtype)
        self.device = anchors.device
        self.comm = VocabComm(vocab_group, [teacher_head.shape[0], student_head.shape[0]], self.device)
        self.form = teacher_form(options.objective)
        self._map_vocabulary(d2t, target_ids)
        # The target can overwrite the logits when it has their shape and the metrics can be read from it: the
        # same temperature, or greedy sampling, where acceptance is a comparison of tokens.
        same = options.sampling_temperature in (0.0, options.temperature)
        self.in_place = self.policy_ids is None and same and self.form != "none"

    def _map_vocabulary(self, d2t, targets) -> None:
        comm = self.comm
        self.policy_ids = self.draft_of_target = None  # [D] policy token of each draft token, and its inverse [V]
        if d2t is not None:
            if d2t.numel() != comm.totals[1]:
                raise ValueError(f"d2t has {d2t.numel()} entries for a draft vocabulary of {comm.totals[1]}.")
            self.policy_ids = torch.arange(d2t.numel(), device=self.device) + d2t
            if d2t.numel() and not (0 <= int(self.policy_ids.min()) and int(self.policy_ids.max()) < comm.totals[0]):
                raise ValueError("d2t points outside the policy's vocabulary; entry i must hold target_id - i.")
            self.draft_of_target = draft_index_of_target(d2t, comm.totals[0])
        elif comm.totals[0] != comm.totals[1] or comm.offsets[0] != comm.offsets[1]:
            raise ValueError("Without d2t both heads must be split over the ranks in the same way.")
        self.hard_targets = None
        if self.options.objective == "hard_ce":
            self.hard_targets = (
                targets if d2t is None else torch.where(targets >= 0, self.draft_of_target[targets.clamp_min(0)], -1)
            )

    # -- the teacher -----------------------------------------------------------------------------------------

    def _subset(self, logits_nV: Tensor) -> Tensor:
        """[n, D] the teacher's logits at this rank's draft tokens."""
        if self.policy_ids is None:
            return logits_nV
        if not self.comm.split:
            return logits_nV.gather(1, self.policy_ids.expand(logits_nV.shape[0], -1))
        # Draft token and policy token need not live on one rank: every rank fills in what it holds.
        local = self.policy_ids - self.comm.offsets[0]
        mine = ((local >= 0) & (local < logits_nV.shape[1])).nonzero().squeeze(1)
        full = logits_nV.new_zeros(logits_nV.shape[0], self.policy_ids.numel())
        full[:, mine] = logits_nV[:, local[mine]]
        first = self.comm.offsets[1]
        return self.comm.sum(full)[:, first : first + self.student_head.shape[0]].contiguous()

    def teacher(self, rows: Tensor, buffers: dict[str, Tensor]) -> _TeacherChunk:
        o, comm = self.options, self.comm
        n = rows.numel()
        logits = chunk_logits(self.hidden_RE[rows], self.teacher_head, o.teacher, buffers["teacher"][:n])
        target = logits if self.in_place else buffers["target"][:n] if "target" in buffers else None
        argmax = torch.empty(n, dtype=torch.int64, device=self.device)
        lse, entropy = logits.new_empty(n), logits.new_empty(n)
        tau = o.sampling_temperature or 1.0
        for at in _blocks(*logits.shape, self.device, comm.split):
            top, argmax[at] = comm.argmax(*row_max(logits[at]), head=0)
            if target is not None and not self.in_place:
                self._separate_target(logits[at], target[at])
            shifted = (logits[at] - top[:, None]) if tau == 1.0 else (logits[at] - top[:, None]).div_(tau)
            e = shifted.exp()
            total, weighted = comm.sums(e.sum(-1), row_dot(e, shifted))
            lse[at] = top / tau + total.log()
            entropy[at] = total.log() - weighted / total
            if self.in_place:
                self._write_target(logits[at], shifted, e, total)
        if o.sampling_temperature == 0:
            entropy.zero_()
        keep = None
        if o.position_gate and self.draft_of_target is not None:
            keep = self.draft_of_target[argmax] >= 0
        return _TeacherChunk(rows, logits, target, lse, argmax, entropy, keep)

    def _write_target(self, out: Tensor, shifted: Tensor, e: Tensor, total: Tensor) -> None:
        """The target over the logits, from what the metrics have made already."""
        if self.options.sampling_temperature == 0 and self.options.temperature != 1.0:
            # Greedy sampling: the metrics looked at temperature 1, the objective has its own.
            shifted.div_(self.options.temperature)
            torch.exp(shifted, out=e)
            total = self.comm.sum(e.sum(-1))
        if self.form == "probs":
            torch.mul(e, (1 / total)[:, None], out=out)
        else:
            torch.sub(shifted, total.log()[:, None], out=out)

    def _separate_target(self, logits: Tensor, out: Tensor) -> None:
        """The target beside the logits: another vocabulary or another temperature than the metrics'."""
        torch.div(self._subset(logits), self.options.temperature, out=out)
        out.sub_(self.comm.max(row_amax(out))[:, None])
        if self.form == "probs":
            total = self.comm.sum(out.exp_().sum(-1))
            out.mul_((1 / total)[:, None])
        else:
            total = self.comm.sum(out.exp().sum(-1))
            out.sub_(total.log()[:, None])

    # -- the student -----------------------------------------------------------------------------------------

    def student(self, k: int, chunk: _TeacherChunk, buffer_nD: Tensor, need: tuple[bool, bool], weight: float):
        """One pass on one chunk: (anchors_m, loss_m, top1_m, accept_m, counted_m, grad_hidden_mE or None)."""
        o, comm = self.options, self.comm
        taught = self.anchors[k, chunk.rows]
        local = (taught >= 0).nonzero().squeeze(1)  # positions in the chunk of its m rows
        hidden = self.student_hidden[k][taught[local]]
        m, everyone = local.numel(), local.numel() == chunk.rows.numel()
        y = chunk_logits(hidden, self.student_head, o.student, buffer_nD[:m])
        argmax = torch.empty_like(local)
        loss, accept = y.new_empty(m), y.new_empty(m)
        for at in _blocks(*y.shape, self.device, comm.split):
            block, rows = y[at], at if everyone else local[at]
            top, argmax[at] = comm.argmax(*row_max(block), head=1)
            if o.probabilistic and o.sampling_temperature:
                accept[at] = self._overlap(block, top, chunk, rows)
            capped = block.clone() if o.student.softcap and any(need) else None
            given = chunk.target[rows] if chunk.target is not None else self.hard_targets[chunk.rows[rows]]
            if o.temperature != 1.0:
                block.div_(o.temperature)
            loss[at] = OBJECTIVES[o.objective](block, given, top / o.temperature, comm)
            if capped is not None:
                softcap_gradient_(block, capped, o.student.softcap)
        token = argmax if self.policy_ids is None else self.policy_ids[argmax]
        top1 = token == chunk.argmax[local]
        if o.sampling_temperature == 0:
            accept = top1.to(self.dtype)
        elif not o.probabilistic:
            accept = self._chance_of(token, chunk, local)
        counted = torch.ones_like(top1)
        if self.hard_targets is not None:
            counted &= self.hard_targets[chunk.rows[local]] >= 0
        if chunk.keep is not None:
            counted &= chunk.keep[local]
            y.mul_(counted[:, None])
        grad_hidden = self._backward(y, hidden, need, weight * o.student.scale / o.temperature)
        return taught[local], loss, top1, accept, counted, grad_hidden

    def _chance_of(self, token: Tensor, chunk: _TeacherChunk, local: Tensor) -> Tensor:
        """[m] the policy's probability of a proposed token at the sampling temperature."""
        if not self.in_place:
            z = self.comm.pick(chunk.logits, local, token, head=0)
            return torch.exp(z / self.options.sampling_temperature - chunk.sampling_lse[local])
        picked = self.comm.pick(chunk.target, local, token, head=0)
        return picked if self.form == "probs" else picked.exp()

    def _overlap(self, block: Tensor, top: Tensor, chunk: _TeacherChunk, rows) -> Tensor:
        """[b] sum_v min(p, q) at the sampling temperature: what a probabilistic draft has accepted."""
        tau = self.options.sampling_temperature
        q = (block - top[:, None]).div_(tau).exp_()
        q.div_(self.comm.sum(q.sum(-1))[:, None])
        if self.in_place:
            p = chunk.target[rows] if self.form == "probs" else chunk.target[rows].exp()
        else:
            p = self._subset(chunk.logits[rows]).div(tau).sub_(chunk.sampling_lse[rows][:, None]).exp_()
        return self.comm.sum(torch.minimum(p, q).sum(-1))

    def _backward(self, grad_mD: Tensor, hidden_mE: Tensor, need: tuple[bool, bool], weight: float) -> Tensor | None:
        need_hidden, need_head = need
        grad = grad_mD.to(hidden_mE.dtype)
        if need_head and weight and grad.shape[0]:
            if grad.dtype == self.dtype:
                self.grad_head.addmm_(grad.t(), hidden_mE, alpha=weight)
            else:
                self.grad_head.add_(torch.mm(grad.t(), hidden_mE), alpha=weight)
        if not need_hidden:
            return None
        return self.comm.sum(torch.mm(grad, self.student_head).to(self.dtype).mul_(weight))

    # -- the sweep -------------------------------------------------------------------------------------------

    def run(self, weights: list[float], need: tuple[bool, bool]):
        passes, students = len(self.student_hidden), self.student_hidden[0].shape[0]
        stats = torch.zeros(4, passes, dtype=torch.float64, device=self.device)  # loss, count, top-1, accept
        accept_KT = torch.full((passes, students), -1.0, dtype=torch.float64, device=self.device)
        grad_hidden = [torch.zeros_like(h) for h in self.student_hidden] if need[0] else []
        self.grad_head = self.student_head.new_zeros(
            self.student_head.shape if need[1] else (0, self.student_head.shape[1]), dtype=self.dtype
        )
        rows = (self.anchors >= 0).any(0).nonzero().squeeze(1)
        self._check_anchors(students)
        n = max(1, min(self.options.chunk_rows, rows.numel()))
        buffers = self._buffers(n)
        finite_R = torch.ones(rows.numel(), dtype=torch.bool, device=self.device)
        entropy_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for start in range(0, rows.numel(), n):
            chunk = self.teacher(rows[start : start + n], buffers)
            finite_R[start : start + n] = torch.isfinite(chunk.sampling_lse)
            for k in range(passes):
                anchor, loss, top1, accept, counted, grad = self.student(k, chunk, buffers["student"], need, weights[k])
                picked = torch.stack([loss.double(), torch.ones_like(loss).double(), top1.double(), accept.double()])
                stats[:, k] += torch.where(counted, picked, 0.0).sum(1)
                accept_KT[k, anchor] = torch.where(counted, accept.double(), -1.0)
                if grad is not None:
                    grad_hidden[k].index_copy_(0, anchor, grad.to(grad_hidden[k].dtype))
                if k == 0:
                    local = self.anchors[0, chunk.rows] >= 0
                    entropy_sum += chunk.entropy[local].double()[counted].sum()
        if not bool(finite_R.all()):
            bad = rows[~finite_R]
            raise NonFiniteTeacher(bad[:5].tolist(), bad.numel())
        full_T = (accept_KT >= 0).all(0)
        prefix_T = accept_KT.clamp_min(0).cumprod(0).sum(0)
        scalars = torch.stack([prefix_T[full_T].sum(), full_T.sum().double(), entropy_sum])
        return stats, scalars, grad_hidden, self.grad_head

    def _buffers(self, n: int) -> dict[str, Tensor]:
        """Chunks of logits, made once: a fresh allocation of this size is a page fault for each of its
        pages.
        """
        vocab, draft = self.teacher_head.shape[0], self.student_head.shape[0]
        widths = {"teacher": vocab, "student": draft}
        if not self.in_place and self.form != "none":
            widths["target"] = draft
        return {name: torch.empty(n, width, dtype=self.dtype, device=self.device) for name, width in widths.items()}

    def _check_anchors(self, students: int) -> None:
        """Each student row has one teacher row in a pass; gradients are written on that ground, not added."""
        if self.anchors.numel() and int(self.anchors.max()) >= students:
            raise ValueError(f"anchors_KR names student row {int(self.anchors.max())}; there are {students}.")
        for k, row in enumerate(self.anchors):
            times = torch.bincount(row[row >= 0], minlength=1)
            if int(times.max()) > 1:
                raise ValueError(
                    f"In pass {k} two teacher rows teach student row {int(times.argmax())}; one is allowed."
                )


def _blocks(rows: int, width: int, device: torch.device, split: bool) -> list[slice]:
    """Slices of rows for element-wise work."""
    step = block_rows(width, rows, device, split)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


@torch.library.custom_op("torchspec::distill_sweep", mutates_args=())
def distill_sweep(
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    student_hidden: list[Tensor],
    student_head: Tensor,
    anchors: Tensor,
    weight_K: Tensor,
    d2t: Tensor | None,
    target_ids: Tensor | None,
    teacher_bias: Tensor | None,
    *,
    need_hidden: bool,
    need_head: bool,
    objective: str,
    temperature: float,
    sampling_temperature: float,
    probabilistic: bool,
    position_gate: bool,
    chunk_rows: int,
    teacher_scale: float,
    teacher_softcap: float,
    student_scale: float,
    student_softcap: float,
    vocab_group: str,
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """(stats [4, K], scalars [3], K gradients of the hidden rows or none, gradient of the head or [0, E])."""
    dtype = accumulate_dtype(student_hidden[0].dtype)
    options = _Options(
        objective,
        temperature,
        sampling_temperature,
        probabilistic,
        position_gate,
        chunk_rows,
        LogitTransform(teacher_scale, teacher_softcap, finite_bias(teacher_bias, dtype)),
        LogitTransform(student_scale, student_softcap),
    )
    sweep = _Sweep(
        teacher_hidden,
        teacher_head,
        student_hidden,
        student_head,
        anchors,
        options,
        d2t,
        target_ids,
        vocab_group,
    )
    stats, scalars, grad_hidden, grad_head = sweep.run(weight_K.tolist(), (need_hidden, need_head))
    return stats, scalars, grad_hidden, grad_head.to(student_head.dtype)


@distill_sweep.register_fake
def _(
    teacher_hidden,
    teacher_head,
    student_hidden,
    student_head,
    anchors,
    weight_K,
    d2t,
    target_ids,
    teacher_bias,
    *,
    need_hidden,
    need_head,
    **_,
):
    stats = weight_K.new_empty((4, len(student_hidden)), dtype=torch.float64)
    grads = [torch.empty_like(h) for h in student_hidden] if need_hidden else []
    head = torch.empty_like(student_head) if need_head else student_head.new_empty((0, student_head.shape[1]))
    return stats, weight_K.new_empty((3,), dtype=torch.float64), grads, head
