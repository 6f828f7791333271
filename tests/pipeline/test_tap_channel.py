"""The channel by itself, both ends in this process, over a transport that keeps messages in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchspec.pipeline.errors import PipelineError, TapHeaderError, TapPeerLost, TapTimeout
from torchspec.pipeline.schedule import schedule_table
from torchspec.pipeline.tap_channel import TapChannel
from torchspec.pipeline.tap_plan import make_tap_plan
from torchspec.pipeline.transport import LinkLost, LinkTimeout, NcclTransport

ROWS, WIDTH, M = 3, 4, 4


class Wire:
    """A link in memory: a message is delivered when it was sent and its slot was offered."""

    headers_on_arrival = True

    def __init__(self):
        self.sends: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self.offers: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self.delivered: set[int] = set()
        self.lost = False

    def send(self, index, stream, header, taps):
        self.sends[index] = (header.clone(), taps)
        self._deliver(index)

    def offer(self, index, stream, header, taps):
        self.offers[index] = (header, taps)
        self._deliver(index)

    def _deliver(self, index):
        if index in self.sends and index in self.offers:
            (header, taps), (header_slot, slots) = self.sends.pop(index), self.offers.pop(index)
            header_slot.copy_(header)
            for slot, tap in zip(slots, taps, strict=True):
                slot.copy_(tap)
            self.delivered.add(index)

    def sent(self, index, deadline_s):
        if self.lost:
            raise LinkLost("gone")
        if index not in self.delivered:
            raise LinkTimeout("not taken")

    arrive = sent

    def finish(self, deadline_s):
        if self.sends or self.offers:
            raise LinkTimeout("messages are left")
        self.delivered.clear()

    def warm_up(self, deadline_s):
        pass


def ends(schedule="1F1B", ranks=2, stage_of_tap=None, slots=0, microbatches=M):
    plan = make_tap_plan(schedule_table(schedule, ranks, microbatches), stage_of_tap or {0: 0, 2: 0, 5: 1}, slots=slots)
    wires = {source: Wire() for source in plan.links}
    settings = dict(num_rows=ROWS, width=WIDTH, dtype=torch.float64, device=torch.device("cpu"), deadline_s=5)
    channels = {
        rank: TapChannel(plan, rank, {r: w for r, w in wires.items() if rank in (r, plan.draft_rank)}, **settings)
        for rank in range(ranks)
    }
    for channel in channels.values():
        channel.begin_step()
    return plan, wires, channels


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64)


def test_every_tap_arrives_for_several_steps():
    """Two sources on other ranks and one on the draft's own; slots are used again; ascending tap ids."""
    plan, _, channels = ends("ZBVZeroBubble", 2, {0: 0, 3: 1, 4: 2, 7: 3})
    assert plan.draft_rank == 0
    for step in range(3):
        if step:
            for channel in channels.values():
                channel.begin_step()
        for m in range(M):
            sent = {tap: rows() for tap in (0, 3, 4, 7)}
            for stage, tap in ((0, 0), (1, 3), (2, 4), (3, 7)):
                channels[plan.table.stage_to_rank[stage]].put(stage, m, {tap: sent[tap]})
            got = channels[0].get(m)
            assert list(got) == [0, 3, 4, 7] and all(torch.equal(got[tap], sent[tap]) for tap in got)
            channels[0].free(m)
        for channel in channels.values():
            channel.end_step()


def test_a_put_waits_when_all_slots_are_taken():
    plan, wires, channels = ends("GPipe", slots=2)
    assert plan.slots == {0: 2}
    taps = {0: rows(), 2: rows()}
    for m in range(4):  # two lie in the slots, two more are under way
        channels[0].put(0, m, taps)
    plan, wires, channels = ends("GPipe", slots=2, microbatches=5)
    for m in range(4):
        channels[0].put(0, m, taps)
    with pytest.raises(
        TapTimeout,
        match=r"Rank 0 waited .* to put the taps of microbatch 4 of stage 0: all 2 slots are taken "
        r"and rank 1 \(draft\) has not freed microbatch 2",
    ):
        channels[0].put(0, 4, taps)


def test_a_get_without_its_put():
    _, wires, channels = ends()
    with pytest.raises(
        TapTimeout,
        match=r"Rank 1 \(draft, stage 1\) waited .* for the taps of microbatch 0 from stage 0 on "
        "rank 0; the deadline is 5 s",
    ):
        channels[1].get(0)
    wires[0].lost = True
    with pytest.raises(TapPeerLost, match="rank 0 has ended"):
        channels[1].get(0)


@pytest.mark.parametrize("field", range(12))
def test_every_field_of_the_header_is_checked(field):
    _, wires, channels = ends()
    channels[1].put(1, 0, {5: rows()})
    send = wires[0].send

    def damaged(index, stream, header, taps):
        header = header.clone()
        header[field] += 1
        send(index, stream, header, taps)

    wires[0].send = damaged
    channels[0].put(0, 0, {0: rows(), 2: rows()})
    with pytest.raises(
        TapHeaderError, match="waited for microbatch 0 from stage 0 on rank 0, but the header that came says"
    ):
        channels[1].get(0)


def test_a_header_of_the_last_step_is_refused():
    _, wires, channels = ends()
    channels[0].step += 1  # one rank counts another step
    channels[1].put(1, 0, {5: rows()})
    channels[0].put(0, 0, {0: rows(), 2: rows()})
    with pytest.raises(TapHeaderError, match="step 2 instead of 1"):
        channels[1].get(0)


@pytest.mark.parametrize(
    ("stage", "m", "taps", "sentence"),
    [
        (1, 0, {5: rows()}, "no source of its own"),
        (0, 1, {0: rows(), 2: rows()}, "where 0 is next"),
        (0, 0, {0: rows()}, r"the plan says \(0, 2\)"),
        (0, 0, {0: rows(), 2: rows()[:2]}, "Tap 2 of stage 0"),
        (0, 0, {0: rows(), 2: rows().float()}, "float32"),
        (0, 0, {0: rows(), 2: rows().requires_grad_()}, "requires_grad=True"),
    ],
)
def test_puts_that_are_refused(stage, m, taps, sentence):
    _, _, channels = ends()
    with pytest.raises(PipelineError, match=sentence):
        channels[0].put(stage, m, taps)


def test_order_on_the_drafts_side():
    _, _, channels = ends()
    channels[0].put(0, 0, {0: rows(), 2: rows()})
    with pytest.raises(PipelineError, match=r"before its own stages \(1,\) put the taps \[5\]"):
        channels[1].get(0)
    with pytest.raises(PipelineError, match="1 is freed where 0 is next"):
        channels[1].free(1)
    with pytest.raises(PipelineError, match="did not pass through the stage wrapper"):
        channels[0].end_step()


def test_the_cuda_transport_refuses_a_cpu():
    """All that can be tried of it here; it has not run on a GPU yet."""
    with pytest.raises(ValueError, match="moves CUDA tensors"):
        NcclTransport(None, torch.device("cpu"))
