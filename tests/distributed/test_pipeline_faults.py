"""Faults of the tap channel: every surviving rank ends with a named error inside the deadline, and no process
is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_ranks import (
    ROWS,
    WIDTH,
    Draft,
    Part,
    cut,
    make_batch,
    make_weights,
    policy_loss,
    run_ranks,
    stage_of_taps,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from torchspec.pipeline.errors import PipelineError
from torchspec.pipeline.schedule import schedule_table
from torchspec.pipeline.stage import CoTrainPipeline
from torchspec.pipeline.tap_channel import open_channel
from torchspec.pipeline.tap_plan import make_tap_plan
from torchspec.pipeline.transport import GlooTransport
from torchspec.ranks import own_group

DEADLINE, RANKS, MICROBATCHES = 3.0, 3, 4
DRAFT, SOURCE = RANKS - 1, 0


class FaultyTransport(GlooTransport):
    """Does ``fault`` to the message of microbatch 1 of stage 0."""

    fault = ""

    def send(self, index: int, stream: int, header: torch.Tensor, taps: list[torch.Tensor]) -> None:
        if index != 1 and not (index > 1 and self.fault == "late message"):  # later ones queue behind a late one
            return super().send(index, stream, header, taps)
        if self.fault == "sleep in put":
            time.sleep(2 * DEADLINE)
        if self.fault == "late message":
            timer = threading.Timer(30, super().send, (index, stream, header, taps))
            timer.daemon = True
            return timer.start()
        if self.fault == "corrupt header":
            header[4] = 3
        if self.fault == "drop header":
            tagged = self._tagged(stream, header, taps)[1:]
            self.works[index] = [
                dist.isend(tensor, group=self.group, group_dst=self.peer, tag=tag) for tag, tensor in tagged
            ]
            return None
        return super().send(index, stream, header, taps)


def worker(rank: int, fault: str, seed: int) -> None:
    group = own_group([list(range(RANKS))], DEADLINE)
    layers, weights = cut(RANKS), make_weights(seed)
    part = Part(*layers[rank]).load(weights)
    schedule = Schedule1F1B(
        PipelineStage(part, rank, RANKS, torch.device("cpu"), group=group),
        MICROBATCHES,
        loss_fn=lambda hidden, target: policy_loss(hidden, target, part.head),
    )
    plan = make_tap_plan(schedule_table("1F1B", RANKS, MICROBATCHES), stage_of_taps(layers))
    channel = open_channel(plan, [range(RANKS)], num_rows=ROWS, width=WIDTH, dtype=torch.float32, deadline_s=DEADLINE)
    draft = Draft(weights)
    armed = [False]

    def draft_step(microbatch: int, taps: dict[int, torch.Tensor], final_hidden: torch.Tensor) -> None:
        if armed[0] and fault == "kill draft" and microbatch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        draft(microbatch, taps, final_hidden)

    def on_microbatch(stage: int, microbatch: int) -> None:
        part.microbatch = microbatch
        if armed[0] and rank == SOURCE and microbatch == 2 and fault == "kill source":
            os.kill(os.getpid(), signal.SIGKILL)

    pipeline = CoTrainPipeline(
        schedule,
        [schedule._stage],
        channel,
        part.tap_points(),
        draft_step=draft_step if rank == DRAFT else None,
        on_microbatch=on_microbatch,
    )
    for step in range(2):  # the first is sound
        tokens, targets = make_batch(seed + step, MICROBATCHES)
        if step == 1:
            armed[0] = True
            if rank == SOURCE:
                link: Any = channel.links[SOURCE]
                link.__class__, link.fault = FaultyTransport, fault
            start = time.monotonic()
        try:
            pipeline.step(*([tokens] if rank == 0 else []), target=targets if rank == DRAFT else None)
        except PipelineError as error:
            error.args = (f"{error} [{time.monotonic() - start:.2f} s]",)
            raise


FAULTS = {
    # fault: (the rank that dies, the named errors of the draft's rank, what its sentence says)
    "kill draft": (DRAFT, None, ""),
    "kill source": (SOURCE, ("TapPeerLost", "PipelineStalled"), "has ended"),
    "late message": (
        None,
        ("TapTimeout",),
        "waited 3.0 s for the taps of microbatch 1 from stage 0 on rank 0",
    ),
    "sleep in put": (None, ("TapTimeout", "PipelineStalled"), "microbatch 1"),
    "drop header": (None, ("TapTimeout", "TapHeaderError"), "microbatch 1 from stage 0 on rank 0"),
    "corrupt header": (None, ("TapHeaderError",), "microbatch 3 instead of 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_survivor_ends_with_a_named_error(fault):
    dead, draft_errors, says = FAULTS[fault]
    ranks = run_ranks(worker, RANKS, fault, 7, timeout_s=60)
    for rank, outcome in enumerate(ranks):
        if rank == dead:
            assert outcome["exitcode"] == -signal.SIGKILL and "error" not in outcome
            continue
        name, sentence = outcome.get("error", ("", str(outcome)))
        assert outcome["exitcode"] == 1, f"rank {rank} was still there: {outcome}"
        assert name in (
            "TapTimeout",
            "TapPeerLost",
            "TapHeaderError",
            "PipelineStalled",
        ), f"rank {rank}: {name} {sentence}"
        assert f"Rank {rank}" in sentence and "waited" in sentence
        asleep = 2 * DEADLINE if fault == "sleep in put" and rank == SOURCE else 0.0
        seconds = float(sentence.rsplit("[", 1)[1].split()[0])
        assert seconds < DEADLINE + asleep + 3.0, f"rank {rank} took {seconds} s"
        if rank == DRAFT:
            assert name in draft_errors and says in sentence, f"{name}: {sentence}"
