"""CoTrainer: one RL step after another (DESIGN section 1), readable from top to bottom.

    rollout (vLLM + draft) -> score -> advantages -> pack -> policy and draft losses -> optimizers -> refit -> log, save

To change the recipe, subclass CoTrainer, override the step that you mean, and name your class in ``trainer``.
"""

from __future__ import annotations

import copy
import itertools
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchspec import checkpoint
from torchspec.collect import (
    Prompt,
    PromptStream,
    Rollout,
    Sample,
    assign_advantages,
    prompt_room,
    resolve_sampling,
    sample_responses,
    sample_row,
    score_samples,
    spec_metrics,
    step_seeds,
    sum_stats,
)
from torchspec.config import Config
from torchspec.data.environments import build_environment
from torchspec.data.tokenizer import load_tokenizer
from torchspec.draft.base import build_draft, load_draft_class
from torchspec.errors import ConfigError, Interrupted, RunError
from torchspec.learner import Learner
from torchspec.live import Live, QuietLive
from torchspec.metrics import MetricsLog, cut_logs
from torchspec.policy.hf import save_policy
from torchspec.policy.model import PolicyPart
from torchspec.policy.pipelined import PipelinedPolicy
from torchspec.policy.run import WholePolicy
from torchspec.policy.shape import PolicyShape
from torchspec.policy.sharded import ShardedPolicy
from torchspec.policy.stages import draft_cost, draft_holder, plan_stages
from torchspec.policy.titan import build_policy, read_shape, set_num_threads
from torchspec.ranks import Ranks, waiting
from torchspec.report import write_report
from torchspec.rollout.config import SamplingConfig
from torchspec.rollout.engine import RolloutInterrupted, SpecStats
from torchspec.shard import load_whole, shard_module
from torchspec.stop import StopFlag
from torchspec.validation import FP32_ON_GPU, without_effect
from torchspec.warm_start import token_counts, warm_start


class CoTrainer:
    """Trains ``config.policy`` and ``config.draft`` together and serves both, refitted, in vLLM.

    Args:
        config: a validated configuration.
        output_dir: folder of the run (DESIGN section 10 names what lies in it).
    """

    def __init__(self, config: Config, output_dir: Path) -> None:
        self.config = config
        self.output_dir = Path(output_dir)
        self.step = 0
        self.skipped_in_a_row = 0
        self.skipped_steps = 0
        self.checkpoint_s = 0.0
        self.stop = StopFlag()

    # ---- set-up -------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Build everything but the engine."""
        config = self.config
        cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda" if cuda else "cpu")
        set_num_threads(config.train.num_threads or len(os.sched_getaffinity(0)))
        auto = torch.bfloat16 if cuda else torch.float32
        self.compute_dtype = (
            auto if config.train.compute_dtype == "auto" else getattr(torch, config.train.compute_dtype)
        )
        if cuda and self.compute_dtype == torch.float32:
            raise ConfigError(FP32_ON_GPU)  # device = "auto" is known only here
        parallelism, pipeline = config.parallelism, config.pipeline
        self.ranks = Ranks(
            parallelism.context_parallel_degree,
            self.device.type,
            parallelism.timeout_s,
            pp_size=pipeline.ranks,
            pp_timeout_s=pipeline.deadline_s,
        )
        if cuda and self.ranks.world > 1:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.environment = build_environment(config.environment, seed=config.seed)
        self.tokenizer = load_tokenizer(config.environment, config.policy.path)
        self.sampling, self.eval_sampling = (
            resolve_sampling(config, sampling, self.tokenizer, config.policy.path)
            for sampling in (config.rollout.sampling, config.eval.sampling)
        )
        room = prompt_room(config, self.sampling)
        self.prompts = PromptStream(self.environment, self.tokenizer, config.environment.system_prompt, room)
        self.part: PolicyPart | None = None
        if self.ranks.pp_size > 1:
            self._build_pipeline()
        else:
            self._build_whole()

    def _build_whole(self) -> None:
        """Both models on every rank; with parallelism.shard they are built whole, one after the other, and then cut."""
        config = self.config
        make = WholePolicy
        if config.parallelism.shard:
            mesh = self.ranks.replica_mesh(self.device.type)
            make = partial(ShardedPolicy, mesh=mesh)
        self.policy = self.build_policy()
        reference = make(self._frozen_copy()) if config.rl.kl_coef else None
        self.runner = make(self.policy)
        self.draft = self.build_draft(self.policy.shape) if config.draft.enabled else None
        if self.draft is not None and config.parallelism.shard:
            shard_module(self.draft, mesh)
        self.learner = Learner(config, self.runner, self.draft, reference, self.stop, self.ranks)

    def _build_pipeline(self) -> None:
        """This rank's part of the policy; the draft first, because the cut of the policy counts its cost."""
        config, ranks = self.config, self.ranks
        shape = read_shape(config.policy, len(self.tokenizer))
        holder = draft_holder(config.pipeline, config.draft.stage)
        self.draft = self.build_draft(shape) if config.draft.enabled and ranks.pp_rank == holder else None
        facts = None if self.draft is None else (self.draft.tap_ids, draft_cost(self.draft, shape))
        tap_ids, cost = next(filter(None, ranks.gather(facts)), ((), 0.0))
        plan = plan_stages(config.pipeline, shape, config.draft.stage, cost)
        self.part = plan.part_of(ranks.pp_rank)
        self.policy = self.build_policy()
        make = partial(
            PipelinedPolicy, plan=plan, config=config.pipeline, draft_schedule=config.draft.schedule, ranks=ranks
        )
        self.runner = make(self.policy, tap_ids=tap_ids)
        reference = make(self._frozen_copy(), tap_ids=()) if config.rl.kl_coef else None
        self.learner = Learner(config, self.runner, self.draft, reference, self.stop, ranks, tap_ids)

    def _frozen_copy(self) -> Any:
        return copy.deepcopy(self.policy).requires_grad_(False)

    def build_policy(self) -> Any:
        """The policy, or ``self.part`` of it under a pipeline, on the trainer's device; override to train a model of
        your own."""
        return build_policy(
            self.config.policy,
            vocab_size=len(self.tokenizer),
            seed=self.config.seed,
            device=self.device,
            dtype=torch.float32,
            compute_dtype=self.compute_dtype,
            part=self.part,
        )

    def build_draft(self, shape: PolicyShape) -> Any:
        """The draft: random with the policy's head, or from ``draft.path``."""
        return build_draft(
            self.config.draft,
            shape,
            seed=self.config.seed,
            device=self.device,
            dtype=torch.float32,
            compute_dtype=self.compute_dtype,
        )

    def build_engine(self) -> Any:
        """vLLM on the exported folders."""
        from torchspec.rollout.vllm import VllmEngine

        return VllmEngine(
            self.output_dir / "policy",
            self.output_dir / "draft" if self.config.draft.enabled else None,
            self.config.rollout,
            draft_method=load_draft_class(self.config.draft.algorithm).vllm_method
            if self.config.draft.enabled
            else None,
            seed=self.config.seed,
            device=self.device.type,
        )

    # ---- the run ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to ``train.steps``; on a signal save, say how to resume, and raise Interrupted."""
        with self.stop:
            self.setup()
            main = self.ranks.is_main
            self.live = Live(self.config) if main else QuietLive()
            with self.live:
                if unused := without_effect(self.config):
                    self.live.note(f"without effect, since pipeline.ranks = 1: {', '.join(unused)}")
                if self.config.checkpoint.resume:
                    self.restore(checkpoint.load_checkpoint(self.output_dir / "checkpoints"))
                    self.ranks.barrier()
                    if main:
                        cut_logs(self.output_dir, self.step)
                else:
                    self.start()
                self.log = MetricsLog(self.output_dir, self.config) if main else None
                self.export()
                self.engine = self.build_engine()
                try:
                    self._loop()
                finally:
                    self.engine.close()
                    if main:
                        self.log.close()
            if main:
                write_report(self.output_dir)
            self.ranks.close()

    def start(self) -> None:
        """From nothing to step 0: warm up, give the draft its head, save."""
        if self.ranks.is_main:
            cut_logs(self.output_dir, 0)
        with waiting("warm up with the other ranks"):
            warm_start(self)
        if not self.config.draft.path:
            self.init_draft(partial(token_counts, self) if self.config.draft.vocab_size else None)
        self.save()

    def init_draft(self, token_counts: Callable[[], torch.Tensor] | None) -> None:
        """Give a new draft the policy's head, which under a pipeline may be another rank's."""
        if not self.config.draft.enabled:
            return
        wanted = ("model.embed_tokens.weight", "lm_head.weight")
        embed_VE, head_VE = map({n: w for n, w in self.runner.weights() if n in wanted}.get, wanted)
        if self.draft is not None:
            # What one writes into the gathered weights of a sharded draft is lost: a whole one takes it.
            draft = self.build_draft(self.policy.shape) if self.config.parallelism.shard else self.draft
            draft.init_from_policy(head_VE, embed_VE, token_counts() if token_counts else None)
            load_whole(self.draft, draft.state_dict())

    def _loop(self) -> None:
        config = self.config
        self.refit()
        try:
            while self.step < config.train.steps:
                self._stop_here()
                self.train_step(self.step + 1)
                if config.checkpoint.every and self.step % config.checkpoint.every == 0:
                    self.save()
        except (RolloutInterrupted, Interrupted) as error:
            self.save()
            self.export()
            raise Interrupted(
                f"Stopped by {self.stop.signal or 'another rank'} after step {self.step} of {config.train.steps}; its "
                "state is saved. Go on with --checkpoint.resume:"
            ) from error
        self.save()
        if self.skipped_in_a_row:
            raise RunError(
                f"The last {self.skipped_in_a_row} of {config.train.steps} steps were skipped for NaN or Inf, so "
                "nothing is exported: policy/ and draft/ are those of the start. Checkpoints: steps "
                f"{checkpoint.complete_steps(self.output_dir / 'checkpoints')}; `torchspec export --step N` writes one "
                "of them. Try a lower policy.optimizer.lr or draft.optimizer.lr."
            )
        self.export()

    def _stop_here(self) -> None:
        if self.ranks.any(bool(self.stop)):
            raise Interrupted("stopped between steps")

    def train_step(self, step: int) -> None:
        """One RL step: rollout, two models' updates, refit, log."""
        started = time.perf_counter()
        metrics: dict[str, float] = {}
        if step == 1 or (self.config.eval.every and (step - 1) % self.config.eval.every == 0):
            metrics |= self.evaluate()
        cursor = self.prompts.cursor
        try:
            rollout = self.rollout(step)
            self.engine_sleep()
            metrics |= rollout.metrics()
            metrics |= self.update(step, rollout)
        except (RolloutInterrupted, Interrupted):
            self.prompts.cursor = cursor  # the unfinished step is dropped whole
            raise
        self.step = step  # from here on the models are those after it: it is saved and logged, whatever follows
        try:
            metrics["time/refit"] = self.refit()
            metrics["refit/version"] = self.engine.version()
            if step == self.config.train.steps:
                final = self.evaluate()
                metrics |= final if step > 1 else {f"{name}_final": value for name, value in final.items()}
        finally:
            metrics["time/checkpoint"], self.checkpoint_s = self.checkpoint_s, 0.0
            metrics["time/step"] = time.perf_counter() - started
            metrics["memory/peak_bytes"] = self.peak_bytes()
            self.record(step, metrics, rollout)

    def rollout(self, step: int) -> Rollout:
        """Sample ``prompts_per_step`` groups, score them, compare within each group."""
        rl = self.config.rl
        skipped = self.prompts.skipped
        prompts = [self.prompts.next() for _ in range(rl.prompts_per_step)]
        seeds = step_seeds(self.config.seed, step, rl.prompts_per_step, rl.samples_per_prompt)
        samples, stats, failed, rollout_s, score_s = self.sample_and_score("rollout", prompts, seeds, self.sampling)
        live = assign_advantages(samples, rl)
        return Rollout(
            samples=samples,
            stats=stats,
            rollout_s=rollout_s,
            score_s=score_s,
            failed_scores=failed,
            live_groups=live,
            num_groups=rl.prompts_per_step,
            skipped_prompts=self.prompts.skipped - skipped,
        )

    def sample_and_score(
        self, phase: str, prompts: list[Prompt], seeds: list[list[int]], sampling: SamplingConfig
    ) -> tuple[list[Sample], SpecStats, int, float, float]:
        """Every rank serves and scores its share of the prompts; all get all samples, in the order of the prompts.

        Returns: samples, speculation statistics and failed scorer calls of all ranks, seconds of sampling and of
        scoring (the slowest rank's).
        """
        ranks, error = self.ranks, None
        mine = slice(ranks.rank, None, ranks.world)
        total = sum(len(row) for row in seeds[mine])
        found: tuple = ([], SpecStats(), 0, 0.0, 0.0)
        try:
            samples, stats, seconds = sample_responses(
                self.engine,
                self.tokenizer,
                prompts[mine],
                seeds[mine],
                sampling,
                deadline_s=self.config.rollout.deadline_s,
                should_stop=lambda: bool(self.stop),
                on_progress=lambda done, tokens: self.live.phase(phase, done, total),
            )
            started = time.perf_counter()
            failed = self.score(samples)
            found = (samples, stats, failed, seconds, time.perf_counter() - started)
        except Exception as problem:  # whatever it is, all ranks hear of it
            error = problem
        if ranks.any(isinstance(error, Interrupted)):
            raise error if isinstance(error, Interrupted) else Interrupted("stopped by another rank")
        ranks.agree(error)
        shares = ranks.gather(found)
        by_rank = [iter(share[0]) for share in shares]  # prompt i was rank i % world's
        ordered = [next(by_rank[i % ranks.world]) for i, row in enumerate(seeds) for _ in row]
        stats = sum_stats([share[1] for share in shares])
        return ordered, stats, sum(s[2] for s in shares), max(s[3] for s in shares), max(s[4] for s in shares)

    def score(self, samples: list[Sample]) -> int:
        """Reward every sample; returns how many scorer calls failed."""
        environment = self.config.environment
        return score_samples(self.environment, samples, environment.scorer_timeout_s, environment.max_failed_share)

    def update(self, step: int, rollout: Rollout) -> dict[str, float]:
        """The optimizer steps of both models on one rollout."""
        with waiting(f"train step {step} with the other ranks"):
            result = self.learner.update(rollout.samples, step, on_progress=lambda d, n: self.live.phase("train", d, n))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        self.skipped_steps += int(result.skipped)
        if result.skipped:
            self.live.note(f"step {step}: skipped for both models, a loss or gradient was NaN or Inf")
        if self.skipped_in_a_row > self.config.train.max_skipped_steps:
            raise RunError(
                f"{self.skipped_in_a_row} steps in a row gave NaN or Inf in a loss or gradient "
                f"(train.max_skipped_steps = {self.config.train.max_skipped_steps}). The last finite weights are in "
                "the checkpoints; try a lower policy.optimizer.lr or draft.optimizer.lr."
            )
        return result.metrics | {"skipped/steps": self.skipped_steps}

    # ---- the engine ---------------------------------------------------------------------------------------------

    def engine_sleep(self) -> None:
        """Give the engine's memory to the trainer, where the config says so."""
        if self.config.rollout.sleep:
            self.engine.sleep()

    def refit(self) -> float:
        """Send both models to the engine, with the step as their version; returns the seconds it took."""
        started = time.perf_counter()
        if self.config.rollout.sleep:
            self.engine.wake()
        self.engine.refit(
            self.runner.weights(),
            self._draft_weights(),
            self.step,
        )
        return time.perf_counter() - started

    def evaluate(self) -> dict[str, float]:
        """Reward and acceptance on held-out items, the same items and seeds each time."""
        started = time.perf_counter()
        config = self.config
        prompts, seeds = self.prompts.held_out(config, self.eval_sampling)
        samples, stats, *_ = self.sample_and_score("eval", prompts, seeds, self.eval_sampling)
        result = {"eval/reward": sum(s.reward for s in samples) / len(samples)}
        if stats.drafts:
            result["eval/accept_len"] = spec_metrics(stats)["spec/accept_len"]
            result["eval/accept_rate"] = spec_metrics(stats)["spec/accept_rate"]
        return result | {"time/eval": time.perf_counter() - started}

    # ---- what is written ----------------------------------------------------------------------------------------

    def record(self, step: int, metrics: dict[str, float], rollout: Rollout) -> None:
        """Metrics, samples, and the live table, on the main rank."""
        if not self.ranks.is_main:
            return
        limit = self.config.metrics
        rows = [sample_row(s) for s in rollout.samples[: limit.samples_per_step]]
        self.log.log(step, metrics)
        self.log.samples(step, rows)
        self.live.step(step, metrics)
        for row in rows[: limit.print_samples]:
            self.live.sample(f"reward {row['reward']:.2f} | {row['prompt']!r} -> {row['response']!r}")

    def peak_bytes(self) -> int:
        """Peak memory of this process so far: the GPU's where there is one, else resident."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def export(self, dtype: torch.dtype = torch.float32) -> None:
        """Write ``policy/`` and ``draft/`` as Hugging Face folders."""
        error = None
        weights = self.runner.weights(include_tied_head=False)
        draft_weights = iter(self.draft.hf_weights()) if self.draft is not None else iter(())
        try:
            if self.ranks.is_main:
                save_policy(
                    self.policy, self.output_dir / "policy", tokenizer=self.tokenizer, dtype=dtype, weights=weights
                )
            if self.draft is not None and self.ranks.writes_part:
                self.draft.save(self.output_dir / "draft", dtype=dtype, weights=draft_weights)
        except RunError as problem:
            error = problem
        for _ in itertools.chain(weights, draft_weights):  # ranks that share a model go through its weights together
            pass
        self.ranks.agree(error)

    def _draft_weights(self) -> Any:
        if not self.config.draft.enabled:
            return None
        return self.runner.draft_weights(self.draft.hf_weights() if self.draft is not None else None)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to go on bit-equal."""
        return {
            "step": self.step,
            "cursor": self.prompts.cursor,
            "skipped_in_a_row": self.skipped_in_a_row,
            "skipped_steps": self.skipped_steps,
            "learner": self.learner.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        self.step = state["step"]
        self.prompts.cursor = state["cursor"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.skipped_steps = state["skipped_steps"]
        self.learner.load_state_dict(state["learner"])

    def save(self) -> None:
        """A complete checkpoint of the current step. A step's line is written before its checkpoint, so that a kill
        between the two leaves a line too many (cut on resume) and never one too few; the next line has the seconds."""
        started = time.perf_counter()
        folder, error = self.output_dir / "checkpoints", None
        if self.step in checkpoint.complete_steps(folder):
            return  # the state after a step is what it is: nothing to write twice
        state = self.state_dict()
        try:
            if self.ranks.writes_part:
                checkpoint.write_part(folder, self.step, self.ranks.pp_rank, state)
        except RunError as problem:
            error = problem
        self.ranks.agree(error)
        try:
            if self.ranks.is_main:
                checkpoint.complete(folder, self.step, self.ranks.pp_size, self.config.checkpoint.keep)
        except RunError as problem:
            error = problem
        self.ranks.agree(error)
        self.checkpoint_s += time.perf_counter() - started
