"""The second half of an RL step: samples -> packed microbatches -> gradients -> optimizer steps of both models.

The draft reads the policy's taps, final hidden states and head detached, after the policy's own backward: with the draft on
or off the policy's gradients are bit-equal. One optimizer step goes

    for each microbatch:  policy forward (taps captured), policy loss and backward
                          draft unroll on the taps, distillation and backward
    both gradients finite?  draft step (and extra draft steps on the stored taps), policy step

Groups without an advantage are packed apart. The policy skips their loss, the draft may still learn from them.

Legend: T rows of a microbatch, E hidden, V vocabulary, K passes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchspec.collect import Sample
from torchspec.config import Config
from torchspec.context_parallel.transport import choose_transport
from torchspec.data.packing import PackedBatch, Sequence, build_batch, pack
from torchspec.draft.base import Draft
from torchspec.errors import Interrupted
from torchspec.losses.distill import DistillOutput, NonFiniteTeacher, distill_metrics
from torchspec.losses.logprob import token_logprobs
from torchspec.losses.policy import PolicyCounts, policy_loss, policy_metrics
from torchspec.optim.optimizer import Optimizer
from torchspec.ranks import Ranks


@dataclass
class Microbatch:
    """Packed sequences. ``idle`` ones have no advantage and serve the draft only."""

    batch: PackedBatch
    idle: bool
    old_logp_T: Tensor | None = None
    """The trainer's log-probabilities before the first of several updates; None: those of this very forward."""


@dataclass
class Part:
    """What one optimizer step trains on: this rank's microbatches, and counts over all ranks."""

    microbatches: list[Microbatch]
    counts: PolicyCounts
    trains_policy: bool
    trains_draft: bool


@dataclass
class DraftInputs:
    """What the draft needs of one microbatch, all detached."""

    batch: PackedBatch
    taps: list[Tensor]
    embed_TE: Tensor
    hidden_TE: Tensor


@dataclass
class UpdateResult:
    """``skipped``: a loss or gradient was NaN or Inf in some optimizer step, and neither model moved in it."""

    metrics: dict[str, float]
    skipped: bool


class Stopwatch(dict):
    """Seconds by phase."""

    def lap(self, name: str, since: float) -> float:
        """Add the time since ``since`` to ``name``; returns now."""
        now = time.perf_counter()
        self[name] = self.get(name, 0.0) + now - since
        return now


class Learner:
    """Trains policy and draft on rollouts.

    Args:
        config: of the run.
        policy: see ``torchspec.policy.titan``.
        draft: None for plain RL.
        reference: frozen copy of the starting policy; None without rl.kl_coef.
        stop: truthy once the run has been told to stop.
        ranks: this process among the others; None for one alone.
    """

    def __init__(
        self,
        config: Config,
        policy: Any,
        draft: Draft | None,
        reference: Any | None,
        stop: Any,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.policy, self.draft, self.reference, self.stop = config, policy, draft, reference, stop
        self.ranks = ranks or Ranks()
        rl = config.rl
        self.rl = dataclasses.replace(rl, loss_norm_constant=rl.loss_norm_constant or config.rollout.sampling.max_tokens)
        total = config.train.steps * rl.updates_per_rollout
        self.policy_optimizer = Optimizer(policy, config.policy.optimizer, total)
        self.draft_optimizer = None
        if draft is not None:
            draft_total = -(-total // config.draft.every) * (1 + config.draft.extra_steps)
            self.draft_optimizer = Optimizer(draft, config.draft.optimizer, draft_total)

    # ---- one rollout --------------------------------------------------------------------------------------------

    def update(self, samples: list[Sample], step: int, on_progress: Callable[[int, int], None]) -> UpdateResult:
        """``updates_per_rollout`` optimizer steps on one rollout.

        Raises:
            Interrupted: told to stop before the first optimizer step; both models are as they were.
        """
        self.clock = Stopwatch()
        train_draft = self.draft is not None and step % self.config.draft.every == 0
        if self.ranks.any(bool(self.stop)):
            raise Interrupted("stopped before the update")
        parts = [self._part(part, train_draft) for part in self._parts(samples)]
        if len(parts) > 1:
            for microbatch in (m for part in parts for m in part.microbatches if not m.idle):
                microbatch.old_logp_T = self._logprobs(self.policy, microbatch.batch)
        self.done, self.total = 0, sum(len(part.microbatches) for part in parts)
        metrics: list[dict[str, float]] = []
        skipped = False
        for number, part in enumerate(parts):
            # With several ranks only all together may leave; they have just agreed to go on.
            may_stop = number == 0 and self.ranks.world == 1
            result = self._optimizer_step(part, may_stop, on_progress)
            metrics.append(result.metrics)
            skipped |= result.skipped
        merged = {key: sum(m[key] for m in metrics if key in m) / sum(key in m for m in metrics) for m in metrics for key in m}
        tokens = sum(m.batch.layout.num_tokens for part in parts for m in part.microbatches)
        merged["train/tokens"] = sum(self.ranks.gather(tokens))
        merged |= {f"time/{name}": seconds for name, seconds in self.clock.items()}
        return UpdateResult(merged, skipped)

    def _parts(self, samples: list[Sample]) -> list[list[Sample]]:
        """Whole groups, dealt into ``updates_per_rollout`` consecutive parts."""
        size = len(samples) // self.rl.updates_per_rollout
        return [samples[i : i + size] for i in range(0, len(samples), size)]

    def _part(self, samples: list[Sample], train_draft: bool) -> Part:
        """Samples with an advantage first; the others only when the draft learns from them."""
        live = [s for s in samples if s.live and not s.masked]
        idle = []
        if train_draft and self.config.draft.use_dropped_groups:
            idle = [s for s in samples if (s.masked or not s.live) and s.completion.token_ids]
        counts = PolicyCounts(tokens=sum(len(s.completion.token_ids) for s in live), sequences=len(live))
        microbatches = [Microbatch(b, False) for b in self._batches(live, trained=True)]
        microbatches += [Microbatch(b, True) for b in self._batches(idle, trained=False)]
        return Part(microbatches, counts, bool(live), train_draft and bool(live or idle))

    def _batches(self, samples: list[Sample], trained: bool) -> list[PackedBatch]:
        """This rank's packs of ``samples``: every data-parallel rank gets equally many, empty ones are left out."""
        sequences = [
            Sequence(
                prompt_ids=s.prompt.token_ids,
                response_ids=s.completion.token_ids,
                engine_logprobs=s.completion.logprobs,
                advantage=s.advantage,
                trained=trained,
            )
            for s in samples
        ]
        ranks = self.ranks
        bins = pack(
            [len(s) for s in sequences],
            self.config.train.tokens_per_microbatch,
            num_ranks=ranks.dp_size,
            pad_multiple=1 if ranks.cp_size == 1 else 2 * ranks.cp_size,
            hidden_size=self.policy.shape.hidden_size,
        )
        return [
            build_batch(
                [sequences[i] for i in bin_],
                self.policy.head_weight.device,
                cp_size=ranks.cp_size,
                cp_rank=ranks.cp_rank,
                cp_mesh=ranks.cp_mesh,
                trunk_transport=self._transport(sum(len(sequences[i]) for i in bin_)),
            )
            for bin_ in bins[ranks.dp_rank :: ranks.dp_size]
            if bin_
        ]

    def _transport(self, num_tokens: int) -> str:
        """How the trunk travels in a pack of ``num_tokens``: by the wider of the policy's and the draft's keys."""
        shape, draft, ranks = self.policy.shape, self.config.draft, self.config.parallelism
        heads = [(shape.num_kv_heads, shape.head_dim)]
        if draft.enabled:
            heads.append((draft.num_kv_heads or shape.num_kv_heads, draft.head_dim or shape.head_dim))
        kv_heads, head_dim = max(heads, key=lambda pair: pair[0] * pair[1])
        return choose_transport(
            ranks.trunk_transport,
            rows=num_tokens,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=self.policy.compute_dtype,
            budget_bytes=ranks.trunk_budget_mb * 2**20,
        )

    # ---- one optimizer step -------------------------------------------------------------------------------------

    def _optimizer_step(self, part: Part, may_stop: bool, on_progress: Callable[[int, int], None]) -> UpdateResult:
        train_draft = part.trains_draft
        # A gate's counts are known only after every policy forward, and extra steps come back to the taps: keep them.
        draft_counts_K = None
        if train_draft and not self.config.draft.extra_steps:
            draft_counts_K = self._draft_counts([m.batch for m in part.microbatches])
        keep = train_draft and draft_counts_K is None
        stored: list[tuple[DraftInputs, Any]] = []
        sums, maxima, draft_sums = {}, {}, {}
        for microbatch in part.microbatches:
            if may_stop and self.stop:
                self.zero_grad()
                raise Interrupted(f"stopped by {self.stop.signal}")
            since = time.perf_counter()
            inputs = self._policy_pass(microbatch, part.counts, train_draft, sums, maxima)
            since = self.clock.lap("policy", since)
            if keep:
                stored.append((inputs, self._draft_targets(inputs)))
            elif train_draft:
                _add(draft_sums, self._draft_pass(inputs, self._draft_targets(inputs), draft_counts_K))
                self.clock.lap("draft", since)
            self.done += 1
            on_progress(self.done, self.total)
        if keep:
            since = time.perf_counter()
            draft_sums = self._draft_passes(stored)
            self.clock.lap("draft", since)
        return self._step_both(part, stored, sums, maxima, draft_sums)

    def _policy_pass(
        self, microbatch: Microbatch, counts: PolicyCounts, with_taps: bool, sums: dict, maxima: dict
    ) -> DraftInputs | None:
        """Forward, and for a live microbatch the loss and its backward. Returns what the draft needs."""
        batch = microbatch.batch
        tap_ids = tuple(sorted({0, *self.draft.tap_ids})) if with_taps else ()
        with torch.set_grad_enabled(not microbatch.idle):
            out = self.policy(batch.tokens_T, batch.layout, tap_ids)
        if not microbatch.idle:
            logp_T, entropy_T = self._token_logprobs(self.policy, out.hidden_TE, batch)
            reference = self._logprobs(self.reference, batch) if self.reference is not None else None

            def whole(x_T: Tensor | None) -> Tensor | None:
                # A sequence's ratio needs all of it: every cp rank computes the loss of the whole pack, alike.
                return None if x_T is None else self.ranks.rows_of_pack(x_T, batch.layout)

            new_T = whole(logp_T)
            result = policy_loss(
                new_T,
                new_T if microbatch.old_logp_T is None else whole(microbatch.old_logp_T),
                whole(batch.engine_logp_T),
                whole(batch.advantage_T),
                whole(batch.mask_T),
                whole(batch.seq_ids_T),
                self.rl,
                counts,
                ref_logp_T=whole(reference),
                entropy_T=whole(entropy_T),
            )
            result.loss.backward()
            _add(sums, result.sums)
            for name, value in result.maxima.items():
                maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        if not with_taps:
            return None
        taps = [out.taps[i] for i in self.draft.tap_ids]
        return DraftInputs(batch, taps, out.taps[0], out.hidden_TE.detach())

    def _token_logprobs(self, policy: Any, hidden_TE: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden_TE,
            policy.head_weight,
            batch.targets_T.where(batch.mask_T, -1),  # rows that are not trained cost nothing
            temperature=self.config.rollout.sampling.temperature,
            chunk_rows=self.config.train.logprob_chunk_rows,
            need_entropy=True,
        )

    @torch.no_grad()
    def _logprobs(self, policy: Any, batch: PackedBatch) -> Tensor:
        return self._token_logprobs(policy, policy(batch.tokens_T, batch.layout).hidden_TE, batch)[0]

    # ---- the draft ----------------------------------------------------------------------------------------------

    def _draft_mask(self, batch: PackedBatch) -> Tensor:
        """Tokens that the draft learns to predict."""
        return batch.response_T if self.config.draft.train_on == "response" else batch.layout.real_T

    def _draft_counts(self, batches: list[PackedBatch]) -> Tensor | None:
        """Rows that count in each pass over all microbatches [K]; None where only the teacher can tell."""
        counts = [self.draft.count_rows(b.layout, self._draft_mask(b)) for b in batches]
        return None if self.ranks.any(any(c is None for c in counts)) else self._sum_counts(counts)

    def _sum_counts(self, counts: Iterable[Tensor]) -> Tensor:
        """[K] over all microbatches and ranks; a rank without a microbatch takes part with zeros."""
        zero = torch.zeros(self.draft.num_passes, dtype=torch.int64, device=self.policy.head_weight.device)
        return self.ranks.sum(sum(counts, zero))

    def _draft_passes(self, stored: list[tuple[DraftInputs, Any]]) -> dict[str, Tensor]:
        """The draft's gradients on stored inputs and their targets."""
        counts_K = self._sum_counts(targets.counts_K for _, targets in stored)
        sums: dict[str, Tensor] = {}
        for inputs, targets in stored:
            _add(sums, self._draft_pass(inputs, targets, counts_K))
        return sums

    def _draft_targets(self, inputs: DraftInputs) -> Any:
        batch = inputs.batch
        return self.draft.targets(
            inputs.hidden_TE,
            self.policy.head_weight,
            batch.tokens_T,
            self._draft_mask(batch),
            batch.layout,
            chunk_rows=self.config.train.logprob_chunk_rows,
        )

    def _draft_pass(self, inputs: DraftInputs, targets: Any, counts_K: Tensor) -> dict[str, Tensor]:
        """Unroll, distillation and backward of one microbatch."""
        nan = {"loss": torch.tensor(torch.nan, dtype=torch.float64)}
        if self.ranks.cp_size > 1 and not self.ranks.all_finite(inputs.hidden_TE):
            return nan  # the cp ranks leave together, or one would wait for the others in the unroll
        student = self.draft(inputs.taps, inputs.embed_TE, inputs.batch.layout)
        try:
            out: DistillOutput = self.draft.loss(
                student,
                targets,
                self.policy.head_weight,
                counts_K,
                sampling_temperature=self.config.rollout.sampling.temperature,
                chunk_rows=self.config.train.logprob_chunk_rows,
            )
        except NonFiniteTeacher:  # the step is skipped for both models
            return nan
        (out.loss * self.config.draft.loss_weight).backward()
        return out.sums() | {"loss": out.loss.detach().double()}

    # ---- the step of both ---------------------------------------------------------------------------------------

    def _step_both(
        self, part: Part, stored: list[tuple[DraftInputs, Any]], sums: dict, maxima: dict, draft_sums: dict
    ) -> UpdateResult:
        """Sum over ranks, clip, look for NaN; step the draft (with its extra steps), then the policy, whose head it reads."""
        since = time.perf_counter()
        sums, maxima = self.ranks.sum_metrics(sums, self.ranks.cp_size), self.ranks.max_metrics(maxima)
        draft_sums = self.ranks.sum_metrics(draft_sums)
        metrics: dict[str, float] = {"policy/lr": self.policy_optimizer.lr}
        checked = [each["loss"] for each in (sums, draft_sums) if each]
        if part.trains_policy:
            self.ranks.sum_gradients(self.policy)
            checked.append(self.policy_optimizer.clip())
            metrics["policy/grad_norm"] = checked[-1].item()
        if part.trains_draft:
            self.ranks.sum_gradients(self.draft)
            checked.append(self.draft_optimizer.clip())
            metrics |= {"draft/grad_norm": checked[-1].item(), "draft/lr": self.draft_optimizer.lr}
        since = self.clock.lap("optimizer", since)
        if not all(torch.isfinite(x).item() for x in checked):
            self.zero_grad()
            return UpdateResult(metrics, skipped=True)
        if part.trains_policy:
            metrics |= policy_metrics(sums, maxima)
        if part.trains_draft:
            metrics |= distill_metrics(draft_sums) | {"draft/loss": draft_sums["loss"].item()}
            self.draft_optimizer.step()
            since = self.clock.lap("optimizer", since)
            for _ in range(self.config.draft.extra_steps):
                self._draft_passes(stored)
                self.ranks.sum_gradients(self.draft)
                if not torch.isfinite(self.draft_optimizer.clip()):
                    # The joint step stands; the draft stops here, and its next loss tells whether it is sound.
                    self.draft_optimizer.zero_grad()
                    metrics["draft/extra_steps_stopped"] = 1
                    break
                self.draft_optimizer.step()
            since = self.clock.lap("draft", since)
        if part.trains_policy:
            self.policy_optimizer.step()
        self.clock.lap("optimizer", since)
        return UpdateResult(metrics, skipped=False)

    def zero_grad(self) -> None:
        """Drop both models' gradients."""
        self.policy_optimizer.zero_grad()
        if self.draft_optimizer is not None:
            self.draft_optimizer.zero_grad()

    # ---- state --------------------------------------------------------------------------------------------------

    def _parts_of_state(self) -> dict[str, Any]:
        parts = {"policy": self.policy, "policy_optimizer": self.policy_optimizer}
        if self.draft is not None:
            parts |= {"draft": self.draft, "draft_optimizer": self.draft_optimizer}
        if self.reference is not None:
            parts["reference"] = self.reference
        return parts

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizers of both models, and the reference where there is one."""
        return {name: part.state_dict() for name, part in self._parts_of_state().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        for name, part in self._parts_of_state().items():
            part.load_state_dict(state[name])


def _add(sums: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Add detached values key by key."""
    for name, value in values.items():
        sums[name] = sums[name] + value if name in sums else value.clone()
