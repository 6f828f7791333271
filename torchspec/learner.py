"""The second half of an RL step: samples -> packed microbatches -> gradients -> optimizer steps of both models.

The draft reads the policy's taps, final hidden states and head detached, after the policy's own forward: with the draft
on or off the policy's gradients are bit-equal. One optimizer step goes

    for each microbatch:  policy forward (taps captured), policy loss and backward
                          draft unroll on the taps, distillation and backward
    both gradients finite?  draft step (and extra draft steps on the stored taps), policy step

Who holds what is the business of ``WholePolicy``, ``ShardedPolicy`` or ``PipelinedPolicy``, which run the microbatches
and call back where the head is (the policy's loss) and where the draft is.

Legend: T rows of a microbatch, E hidden, V vocabulary, K passes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchspec.collect import Sample
from torchspec.config import Config
from torchspec.data.packing import PackedBatch
from torchspec.draft.base import Draft
from torchspec.errors import Interrupted, RunError
from torchspec.losses.distill import DistillOutput, NonFiniteTeacher, distill_metrics
from torchspec.losses.logprob import token_logprobs
from torchspec.losses.policy import PolicyCounts, policy_loss, policy_metrics
from torchspec.microbatch import Microbatch, Packer, Part
from torchspec.optim.optimizer import Optimizer
from torchspec.ranks import Ranks
from torchspec.shard import load_whole, slice_for, whole_state


@dataclass
class DraftInputs:
    """What the draft needs of one microbatch, all detached."""

    batch: PackedBatch
    taps: list[Tensor]
    embed_TE: Tensor
    hidden_TE: Tensor


@dataclass
class Found:
    """What an optimizer step's microbatches leave: sums for the metrics, and the draft's inputs where they are kept."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    draft_sums: dict[str, Tensor] = field(default_factory=dict)
    draft_counts_K: Tensor | None = None
    """Rows of each pass over the whole step, where they are known before it."""
    keep: bool = False
    stored: list[tuple[DraftInputs, Any]] = field(default_factory=list)
    """Inputs and targets, when ``keep``: the draft's passes come after all of the policy's."""
    draft_seconds: float = 0.0


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
        policy: a ``WholePolicy``, ``ShardedPolicy`` or ``PipelinedPolicy``.
        draft: None for plain RL, and on a rank of a pipeline that does not hold it.
        reference: the frozen starting policy, of the same kind as ``policy``; None without rl.kl_coef.
        stop: truthy once the run has been told to stop.
        ranks: this process among the others; None for one alone.
        tap_ids: of the draft, on a rank without it; empty for plain RL.
    """

    def __init__(
        self,
        config: Config,
        policy: Any,
        draft: Draft | None,
        reference: Any | None,
        stop: Any,
        ranks: Ranks | None = None,
        tap_ids: tuple[int, ...] = (),
    ) -> None:
        self.config, self.runner, self.draft, self.reference, self.stop = config, policy, draft, reference, stop
        self.policy = policy.policy
        self.ranks = ranks or Ranks()
        self.tap_ids = draft.tap_ids if draft is not None else tap_ids
        self.packer = Packer(config, policy, self.ranks)
        rl = config.rl
        self.rl = dataclasses.replace(
            rl, loss_norm_constant=rl.loss_norm_constant or config.rollout.sampling.max_tokens
        )
        total = config.train.steps * rl.updates_per_rollout
        self.policy_optimizer = Optimizer(
            self.policy.hf_parameters(), config.policy.optimizer, total, policy.total_norm
        )
        self.draft_optimizer = None
        if draft is not None:
            draft_total = -(-total // config.draft.every) * (1 + config.draft.extra_steps)
            self.draft_optimizer = Optimizer(dict(draft.named_parameters()), config.draft.optimizer, draft_total)

    # ---- one rollout --------------------------------------------------------------------------------------------

    def update(self, samples: list[Sample], step: int, on_progress: Callable[[int, int], None]) -> UpdateResult:
        """``updates_per_rollout`` optimizer steps on one rollout.

        Raises:
            Interrupted: told to stop before the first optimizer step; both models are as they were.
        """
        self.clock = Stopwatch()
        train_draft = bool(self.tap_ids) and step % self.config.draft.every == 0
        if self.ranks.any(bool(self.stop)):
            raise Interrupted("stopped before the update")
        parts = [self.packer.part(part, train_draft) for part in self._parts(samples)]
        if len(parts) > 1:
            for part in parts:
                self._fill_logprobs(part.live, self.runner, "old_logp_T")
        self.done, self.total = 0, sum(len(part.microbatches) for part in parts)
        metrics: list[dict[str, float]] = []
        skipped = False
        for number, part in enumerate(parts):
            # With several ranks only all together may leave; they have just agreed to go on.
            may_stop = number == 0 and self.ranks.world == 1
            result = self._optimizer_step(part, may_stop, on_progress)
            metrics.append(result.metrics)
            skipped |= result.skipped
        merged = {
            key: sum(m[key] for m in metrics if key in m) / sum(key in m for m in metrics) for m in metrics for key in m
        }
        tokens = sum(int(m.batch.layout.real_T.sum()) for part in parts for m in part.microbatches)
        merged["train/tokens"] = sum(self.ranks.gather(tokens)) // self.ranks.pp_size
        merged |= {f"time/{name}": seconds for name, seconds in self.ranks.slowest(self.clock).items()}
        return UpdateResult(merged, skipped)

    def _parts(self, samples: list[Sample]) -> list[list[Sample]]:
        """Whole groups, dealt into ``updates_per_rollout`` consecutive parts."""
        size = len(samples) // self.rl.updates_per_rollout
        return [samples[i : i + size] for i in range(0, len(samples), size)]

    # ---- one optimizer step -------------------------------------------------------------------------------------

    def _optimizer_step(self, part: Part, may_stop: bool, on_progress: Callable[[int, int], None]) -> UpdateResult:
        since = time.perf_counter()
        if self.reference is not None:
            self._fill_logprobs(part.live, self.reference, "ref_logp_T")
        found = Found()
        if part.trains_draft:
            self.runner.share_head()
            # A gate's counts are known only after every policy forward, and extra steps come back to the taps: keep
            # them.
            if not self.config.draft.extra_steps:
                found.draft_counts_K = self._draft_counts([m.batch for m in part.microbatches])
            found.keep = self.draft is not None and found.draft_counts_K is None

        def on_start(_: int) -> None:
            if may_stop and self.stop:
                self.zero_grad()
                raise Interrupted(f"stopped by {self.stop.signal}")
            on_progress(self.done, self.total)
            self.done += 1

        self._run(part, part.live, True, found, on_start)
        self._run(part, part.idle, False, found, on_start)
        on_progress(self.done, self.total)
        self.clock["policy"] = self.clock.get("policy", 0.0) + time.perf_counter() - since - found.draft_seconds
        if part.trains_draft:
            since = time.perf_counter()
            if found.keep:
                found.draft_sums = self._draft_passes(found.stored)
            self.clock.lap("draft", since - found.draft_seconds)
        return self._step_both(part, found)

    def _run(
        self, part: Part, microbatches: list[Microbatch], live: bool, found: Found, on_start: Callable[[int], None]
    ) -> None:
        """The policy's forwards, with its loss and backward when ``live``, and the draft after each."""
        if not microbatches:
            return

        def on_hidden(m: int, hidden_TE: Tensor) -> Tensor:
            return self._policy_loss(microbatches[m], hidden_TE, part.counts, found)

        def draft_step(m: int, taps: dict[int, Tensor], hidden_TE: Tensor) -> None:
            since = time.perf_counter()
            inputs = self._draft_inputs(microbatches[m].batch, taps, hidden_TE, found.keep)
            targets = self._draft_targets(inputs)
            if found.keep:
                found.stored.append((inputs, targets))
            else:
                _add(found.draft_sums, self._draft_pass(inputs, targets, found.draft_counts_K))
            found.draft_seconds += time.perf_counter() - since

        self.runner.run(
            [m.batch for m in microbatches],
            tuple(sorted({0, *self.tap_ids})) if part.trains_draft else (),
            on_hidden=on_hidden if live else None,
            backward=live,
            draft_step=draft_step if part.trains_draft else None,
            on_start=on_start,
        )

    def _policy_loss(self, microbatch: Microbatch, hidden_TE: Tensor, counts: PolicyCounts, found: Found) -> Tensor:
        """The policy's loss of one microbatch."""
        batch = microbatch.batch
        logp_T, entropy_T = self._token_logprobs(self.policy.head_weight, hidden_TE, batch)

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
            ref_logp_T=whole(microbatch.ref_logp_T),
            entropy_T=whole(entropy_T),
        )
        _add(found.sums, result.sums)
        for name, value in result.maxima.items():
            known = found.maxima.get(name)
            found.maxima[name] = value if known is None else torch.maximum(known, value)
        return result.loss

    def _token_logprobs(self, head_VE: Tensor, hidden_TE: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden_TE,
            head_VE,
            batch.targets_T.where(batch.mask_T, -1),  # rows that are not trained cost nothing
            temperature=self.config.rollout.sampling.temperature,
            chunk_rows=self.config.train.logprob_chunk_rows,
            need_entropy=True,
        )

    def _fill_logprobs(self, microbatches: list[Microbatch], runner: Any, field: str) -> None:
        """Log-probabilities of ``runner``'s policy into ``field``, where its head is."""

        def on_hidden(m: int, hidden_TE: Tensor) -> None:
            batch = microbatches[m].batch
            setattr(microbatches[m], field, self._token_logprobs(runner.policy.head_weight, hidden_TE, batch)[0])

        if microbatches:
            runner.run([m.batch for m in microbatches], on_hidden=on_hidden)

    # ---- the draft ----------------------------------------------------------------------------------------------

    def _draft_mask(self, batch: PackedBatch) -> Tensor:
        """Tokens that the draft learns to predict."""
        return batch.response_T if self.config.draft.train_on == "response" else batch.layout.real_T

    def _draft_inputs(self, batch: PackedBatch, taps: dict[int, Tensor], hidden_TE: Tensor, keep: bool) -> DraftInputs:
        if keep and self.runner.lends_taps:
            taps, hidden_TE = {i: tap.clone() for i, tap in taps.items()}, hidden_TE.clone()
        return DraftInputs(batch, [taps[i] for i in self.tap_ids], taps[0], hidden_TE)

    def _draft_counts(self, batches: list[PackedBatch]) -> Tensor | None:
        """Rows that count in each pass over all microbatches [K]; None where only the teacher can tell."""
        counts = []
        if self.draft is not None:
            counts = [self.draft.count_rows(b.layout, self._draft_mask(b)) for b in batches]
        unknown = self.ranks.any(any(c is None for c in counts))
        return None if unknown or self.draft is None else self._sum_counts(counts)

    def _sum_counts(self, counts: Iterable[Tensor]) -> Tensor:
        """[K] over all microbatches and replicas; a rank without a microbatch takes part with zeros."""
        zero = torch.zeros(self.draft.num_passes, dtype=torch.int64, device=next(self.draft.parameters()).device)
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
            self.runner.teacher_head,
            batch.tokens_T,
            self._draft_mask(batch),
            batch.layout,
            chunk_rows=self.config.train.logprob_chunk_rows,
        )

    def _draft_pass(self, inputs: DraftInputs, targets: Any, counts_K: Tensor) -> dict[str, Tensor]:
        """Unroll, distillation and backward of one microbatch."""
        student = self.draft(inputs.taps, inputs.embed_TE, inputs.batch.layout)
        try:
            out: DistillOutput = self.draft.loss(
                student,
                targets,
                self.runner.teacher_head,
                counts_K,
                sampling_temperature=self.config.rollout.sampling.temperature,
                chunk_rows=self.config.train.logprob_chunk_rows,
            )
        except NonFiniteTeacher:
            # The step is skipped for both models; until then, other ranks wait for this one in the unroll's backward.
            (sum(hidden_TE.sum() for hidden_TE in student) * 0.0).backward()
            return {"loss": torch.tensor(torch.nan, dtype=torch.float64)}
        (out.loss * self.config.draft.loss_weight).backward()
        return out.sums() | {"loss": out.loss.detach().double()}

    # ---- the step of both ---------------------------------------------------------------------------------------

    def _step_both(self, part: Part, found: Found) -> UpdateResult:
        """Sum over ranks, clip, look for NaN; step the draft (with its extra steps), then the policy, whose head it
        reads."""
        since = time.perf_counter()
        sums, maxima = self.ranks.sum_metrics(found.sums, self.ranks.cp_size), self.ranks.max_metrics(found.maxima)
        draft_sums = self.ranks.sum_metrics(found.draft_sums)
        metrics: dict[str, float] = {"policy/lr": self.policy_optimizer.lr}
        checked = [each["loss"] for each in (sums, draft_sums) if each]
        if part.trains_policy:
            self.ranks.sum_gradients(self.policy)
            self.runner.sum_tied_gradients()
            checked.append(self.policy_optimizer.clip())
            metrics["policy/grad_norm"] = checked[-1].item()
        trains_draft = part.trains_draft and self.draft is not None
        if trains_draft:
            self.ranks.sum_gradients(self.draft)
            checked.append(self.draft_optimizer.clip())
            metrics |= {"draft/grad_norm": checked[-1].item(), "draft/lr": self.draft_optimizer.lr}
        since = self.clock.lap("optimizer", since)
        if self.ranks.any(not all(torch.isfinite(x).item() for x in checked)):
            self.zero_grad()
            return UpdateResult(self.ranks.merge(metrics), skipped=True)
        if part.trains_policy:
            metrics |= policy_metrics(sums, maxima)
        if trains_draft:
            metrics |= distill_metrics(draft_sums) | {"draft/loss": draft_sums["loss"].item()}
            self.draft_optimizer.step()
            since = self.clock.lap("optimizer", since)
            for _ in range(self.config.draft.extra_steps):
                self._draft_passes(found.stored)
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
        return UpdateResult(self.ranks.merge(metrics), skipped=False)

    def zero_grad(self) -> None:
        """Drop both models' gradients."""
        self.policy_optimizer.zero_grad()
        if self.draft_optimizer is not None:
            self.draft_optimizer.zero_grad()

    # ---- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizers of both models, and the reference where there is one: what this rank holds of them.

        Everything is kept by name, so that ranks with other parts of the models can take it back. Sharded models are
        gathered: all ranks call this, and only one that writes a part of a checkpoint gets them.
        """
        state: dict[str, Any] = {
            "policy": {name: p.detach() for name, p in self.policy.hf_parameters().items()},
            "policy_optimizer": self.policy_optimizer.state_dict(),
        }
        if self.draft is not None:
            state |= {"draft": self.draft.state_dict(), "draft_optimizer": self.draft_optimizer.state_dict()}
        if self.reference is not None:
            state["reference"] = {name: p.detach() for name, p in self.reference.policy.hf_parameters().items()}
        return whole_state(state, keep=self.ranks.writes_part)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave, or the union of what all ranks gave.

        Raises:
            RunError: the state is that of a run without this draft or reference, or of another policy.
        """
        if self.tap_ids and "draft" not in state:
            raise RunError(
                "The checkpoint has no draft: its run had draft.enabled = false. Resume with --draft.no-enabled, or "
                "start a new run from its policy/ folder (policy.path)."
            )
        if self.reference is not None and "reference" not in state:
            raise RunError(
                "The checkpoint has no reference policy: its run had rl.kl_coef = 0. Resume with --rl.kl-coef 0, or "
                "start a new run from its policy/ folder (policy.path)."
            )
        _copy_weights(self.policy, state["policy"])
        self.policy_optimizer.load_state_dict(state["policy_optimizer"])
        if self.draft is not None:
            load_whole(self.draft, state["draft"])
            self.draft_optimizer.load_state_dict(state["draft_optimizer"])
        if self.reference is not None:
            _copy_weights(self.reference.policy, state["reference"])


def _copy_weights(policy: Any, weights: dict[str, Tensor]) -> None:
    for name, p in policy.hf_parameters().items():
        if name not in weights or weights[name].shape != p.shape:
            found = list(weights[name].shape) if name in weights else "missing"
            raise RunError(
                f"The checkpoint is of another policy: {name} is {found} there and {list(p.shape)} here. Resume with "
                "the [policy] table that the run was started with."
            )
        p.copy_(slice_for(weights[name], p))


def _add(sums: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Add detached values key by key."""
    for name, value in values.items():
        sums[name] = sums[name] + value if name in sums else value.clone()
