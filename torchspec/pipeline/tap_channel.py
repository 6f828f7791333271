"""The tap channel: carries what the draft reads (taps) from the stages that have it to the rank of the draft.

It runs beside the pipeline and never touches it: process groups of its own (one of two ranks for every source
rank), no message on the pipeline's group, no change of order. Detached tensors only; no gradient travels.

    source rank                                    draft's rank
    put(stage, m, taps)  -- header, taps -->  slot m mod slots of that stage  -- get(m), free(m)

Order: the messages of a source rank go in the order of that rank's forwards, per stage microbatch 0, 1, ...
M-1 (tap_plan.py). Credits: a slot that is offered is a credit. A source may have as many messages under way
as the stage has slots; a further put waits, with the deadline. With the plan's own slots that never happens.
Headers say step, place in the link, stage, microbatch, rows, width, dtype and tap ids, with a checksum; each
is compared with what the plan expects.

Legend: T rows of a microbatch (the same for every microbatch), E hidden size, m a microbatch, M their number.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from torchspec.pipeline.errors import PipelineError, TapHeaderError, TapPeerLost, TapTimeout
from torchspec.pipeline.tap_plan import TapPlan
from torchspec.pipeline.transport import (
    HEADER_FIELDS,
    GlooTransport,
    LinkLost,
    LinkTimeout,
    NcclTransport,
    TapTransport,
)

_MAGIC = 0x7461707370656331
_FIELDS = (
    "mark",
    "step",
    "place in the link",
    "stage",
    "microbatch",
    "rows",
    "width",
    "dtype",
    "number of taps",
    "tap ids",
    "reserved",
    "checksum",
)
assert len(_FIELDS) == HEADER_FIELDS
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TapChannel:
    """The channel of one schedule, seen from one pipeline rank.

    ``links``: source rank -> transport; a source has its own link, the draft's rank has all of them, other
    ranks none. ``num_rows`` T and ``width`` E are the same for every microbatch of the schedule. Use
    ``open_channel`` to make one.
    """

    def __init__(
        self,
        plan: TapPlan,
        rank: int,
        links: Mapping[int, TapTransport],
        *,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        deadline_s: float,
    ):
        if dtype not in _DTYPES:
            raise PipelineError(
                f"Taps of dtype {dtype} cannot be sent; the channel knows {', '.join(map(str, _DTYPES))}."
            )
        self.plan, self.rank, self.links = plan, rank, dict(links)
        self.num_rows, self.width, self.dtype, self.device = num_rows, width, dtype, device
        self.deadline_s = deadline_s
        self.is_draft = rank == plan.draft_rank
        self.step = 0
        self.wait_seconds = 0.0
        """Time that puts and gets of this rank have waited so far."""
        self._place = {
            (link, message): index for link, order in plan.links.items() for index, message in enumerate(order)
        }
        self._slots: dict[int, Tensor] = {}
        if self.is_draft:
            self._slots = {
                stage: torch.empty(count, len(plan.taps_of[stage]), num_rows, width, dtype=dtype, device=device)
                for stage, count in plan.slots.items()
            }
        # Header memory lives as long as the channel: one row per message of a link.
        self._headers = {
            link: torch.zeros(len(plan.links[link]), HEADER_FIELDS, dtype=torch.int64, device=device)
            for link in self.links
        }
        self._clear()

    def _clear(self) -> None:
        self._local: dict[int, dict[int, Tensor]] = {}  # microbatch -> tap id -> [T, E]
        self._num_put: dict[int, int] = {stage: 0 for stage in self.plan.taps_of}
        self._num_freed = 0
        self._num_offered = {link: 0 for link in self.links}
        self._kept: list[list[Tensor]] = []  # taps under way; the transport does not hold them

    # -- a step

    def begin_step(self) -> None:
        """Before the schedule's step, on every pipeline rank."""
        self.step += 1
        self._clear()
        if self.is_draft:
            self._offer_free_slots()

    def put(self, stage: int, microbatch: int, taps: Mapping[int, Tensor]) -> None:
        """In the forward of source ``stage``: hand over its ``taps`` (tap id -> detached [T, E]). They must
        not change after.

        Raises TapTimeout when no slot becomes free in time, TapPeerLost when the draft's rank has ended,
        PipelineError for a wrong shape, dtype, tap id or order.
        """
        self._check_put(stage, microbatch, taps)
        self._num_put[stage] += 1
        if self.is_draft:
            self._local.setdefault(microbatch, {}).update(taps)
            return
        place, link = self._place[self.rank, (stage, microbatch)], self.links[self.rank]
        ahead = microbatch - self.plan.slots[stage]
        task = f"put the taps of microbatch {microbatch} of stage {stage}"
        if ahead >= 0:
            self._waiting(
                lambda: link.sent(self._place[self.rank, (stage, ahead)], self.deadline_s),
                f"to {task}: all {self.plan.slots[stage]} slots are taken and rank {self.plan.draft_rank} "
                f"(draft) has not freed microbatch {ahead}",
                self.plan.draft_rank,
            )
        header = self._headers[self.rank][place]
        header.copy_(torch.tensor(self._header(self.rank, stage, microbatch)))
        tensors = [taps[tap].contiguous() for tap in self.plan.taps_of[stage]]
        self._kept.append(tensors)
        self._waiting(
            lambda: link.send(place, stage, header, tensors),
            f"to {task} towards rank {self.plan.draft_rank} (draft)",
            self.plan.draft_rank,
        )

    def get(self, microbatch: int) -> dict[int, Tensor]:
        """On the draft's rank: every tap of ``microbatch``, tap id -> [T, E], ascending. Views into the slots
        until ``free``.

        Raises TapTimeout, TapPeerLost or TapHeaderError with who waited for which microbatch from whom.
        """
        taps = dict(self._local.pop(microbatch, {}))
        for stage in self.plan.slots:
            source = self.plan.table.stage_to_rank[stage]
            place, link = self._place[source, (stage, microbatch)], self.links[source]
            self._waiting(
                lambda link=link, place=place: link.arrive(place, self.deadline_s),
                f"for the taps of microbatch {microbatch} from stage {stage} on rank {source}",
                source,
            )
            if link.headers_on_arrival:
                self._check_header(source, stage, microbatch)
            slot = self._slots[stage][microbatch % self.plan.slots[stage]]
            taps.update(zip(self.plan.taps_of[stage], slot.unbind(0), strict=True))
        missing = [tap for tap in self.plan.tap_ids if tap not in taps]
        if missing:
            raise PipelineError(
                f"Rank {self.rank} (draft) got microbatch {microbatch} before its own stages "
                f"{self.plan.local_stages} put the taps {missing}."
            )
        return dict(sorted(taps.items()))

    def free(self, microbatch: int) -> None:
        """On the draft's rank, once nothing reads the tensors of ``get(microbatch)``: their slots take the
        next messages."""
        if microbatch != self._num_freed:
            raise PipelineError(f"Microbatch {microbatch} is freed where {self._num_freed} is next.")
        self._num_freed += 1
        self._offer_free_slots()

    def end_step(self) -> None:
        """After the schedule's step, on every pipeline rank: all messages of the step have left and
        arrived."""
        due = self.plan.table.num_microbatches
        put_short = {
            s: n for s, n in self._num_put.items() if n != due and self.plan.table.stage_to_rank[s] == self.rank
        }
        if put_short or (self.is_draft and self._num_freed != due):
            raise PipelineError(
                f"Rank {self.rank} ended step {self.step} of {due} microbatches with puts {put_short} and "
                f"{self._num_freed} microbatches freed: a forward did not pass through the stage wrapper."
            )
        for source, link in self.links.items():
            peer = source if self.is_draft else self.plan.draft_rank
            self._waiting(
                lambda link=link: link.finish(self.deadline_s),
                f"for the messages of step {self.step} to end with rank {peer}",
                peer,
            )
            if self.is_draft and not link.headers_on_arrival:
                for stage, microbatch in self.plan.links[source]:
                    self._check_header(source, stage, microbatch)
        self._kept.clear()

    # -- parts

    def _offer_free_slots(self) -> None:
        """Offer slots in each link's order, as far as they are free."""
        for source, link in self.links.items():
            order = self.plan.links[source]
            while self._num_offered[source] < len(order):
                place = self._num_offered[source]
                stage, microbatch = order[place]
                if microbatch - self._num_freed >= self.plan.slots[stage]:
                    break
                slot = self._slots[stage][microbatch % self.plan.slots[stage]]
                self._waiting(
                    lambda link=link, place=place, stage=stage, slot=slot, source=source: link.offer(
                        place, stage, self._headers[source][place], list(slot.unbind(0))
                    ),
                    f"to offer rank {source} a slot for microbatch {microbatch} of stage {stage}",
                    source,
                )
                self._num_offered[source] += 1

    def _header(self, source: int, stage: int, microbatch: int) -> list[int]:
        ids = self.plan.taps_of[stage]
        fields = [
            _MAGIC,
            self.step,
            self._place[source, (stage, microbatch)],
            stage,
            microbatch,
            self.num_rows,
            self.width,
            _DTYPES.index(self.dtype),
            len(ids),
            zlib.crc32(repr(ids).encode()),
            0,
        ]
        return [*fields, zlib.crc32(repr(fields).encode())]

    def _check_header(self, source: int, stage: int, microbatch: int) -> None:
        want = self._header(source, stage, microbatch)
        got = self._headers[source][self._place[source, (stage, microbatch)]].tolist()
        wrong = [
            f"{name} {value} instead of {right}"
            for name, value, right in zip(_FIELDS, got, want, strict=True)
            if value != right
        ]
        if wrong:
            raise TapHeaderError(
                f"Rank {self.rank} (draft, stage {self.plan.draft_stage}) waited for microbatch {microbatch} "
                f"from stage {stage} on rank {source}, but the header that came says {'; '.join(wrong)}. A "
                "message was lost, doubled or damaged; the step is not used."
            )

    def _check_put(self, stage: int, microbatch: int, taps: Mapping[int, Tensor]) -> None:
        if stage not in self.plan.taps_of or self.plan.table.stage_to_rank[stage] != self.rank:
            raise PipelineError(f"Rank {self.rank} puts taps of stage {stage}, which is no source of its own.")
        if microbatch != self._num_put[stage]:
            raise PipelineError(f"Stage {stage} puts microbatch {microbatch} where {self._num_put[stage]} is next.")
        if tuple(sorted(taps)) != self.plan.taps_of[stage]:
            raise PipelineError(
                f"Stage {stage} puts the taps {tuple(sorted(taps))}; the plan says {self.plan.taps_of[stage]}."
            )
        for tap, tensor in taps.items():
            if tuple(tensor.shape) != (self.num_rows, self.width) or tensor.dtype != self.dtype or tensor.requires_grad:
                raise PipelineError(
                    f"Tap {tap} of stage {stage} is {tuple(tensor.shape)} {tensor.dtype}, requires_grad="
                    f"{tensor.requires_grad}; the channel carries ({self.num_rows}, {self.width}) "
                    f"{self.dtype}, detached."
                )

    def _waiting(self, action: Callable[[], None], what: str, peer: int) -> None:
        """Run a wait of the transport and add up its seconds."""
        start = time.monotonic()
        try:
            with _sentences(self.rank, self.plan, self.deadline_s, what, peer):
                action()
        finally:
            self.wait_seconds += time.monotonic() - start


def open_links(
    plan: TapPlan,
    columns: Sequence[Sequence[int]],
    *,
    device: torch.device | str = "cpu",
    deadline_s: float = 240.0,
) -> dict[int, TapTransport]:
    """Make the process groups of the links and warm them up. Every rank of the world calls this.

    They serve every plan with the same source ranks and the same draft's rank, one step at a time.

    ``columns``: the global ranks of every pipeline (one list per data- and context-parallel place), in
    pipeline order; the caller belongs to exactly one. Returns the caller's links by source rank. Raises
    PipelineError if it belongs to none, and the channel's errors if a link cannot be warmed up.
    """
    device, here = torch.device(device), dist.get_rank()
    mine = [list(column) for column in columns if here in column]
    if len(mine) != 1 or any(len(column) != plan.table.num_ranks for column in columns):
        raise PipelineError(
            f"Rank {here} must be in exactly one pipeline of {plan.table.num_ranks} ranks; the pipelines are "
            f"{[list(column) for column in columns]}."
        )
    rank = mine[0].index(here)
    links: dict[int, TapTransport] = {}
    for column in columns:
        for source in plan.links:
            # new_group is collective over the world: every rank makes every group, in the same order.
            pair = [column[source], column[plan.draft_rank]]
            group = dist.new_group(
                pair,
                timeout=timedelta(seconds=deadline_s),
                backend="nccl" if device.type == "cuda" else "gloo",
            )
            if here in pair:
                links[source] = NcclTransport(group, device) if device.type == "cuda" else GlooTransport(group)
    is_draft = rank == plan.draft_rank
    for source, link in links.items():
        peer = source if is_draft else plan.draft_rank
        with _sentences(rank, plan, deadline_s, f"to warm up the tap link with rank {peer}", peer):
            link.warm_up(deadline_s)
    return links


def open_channel(
    plan: TapPlan,
    columns: Sequence[Sequence[int]],
    *,
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    deadline_s: float = 240.0,
) -> TapChannel:
    """``open_links`` and the channel of ``plan`` on them."""
    links = open_links(plan, columns, device=device, deadline_s=deadline_s)
    rank = next(column.index(dist.get_rank()) for column in map(list, columns) if dist.get_rank() in column)
    return TapChannel(
        plan,
        rank,
        links,
        num_rows=num_rows,
        width=width,
        dtype=dtype,
        device=torch.device(device),
        deadline_s=deadline_s,
    )


@contextmanager
def _sentences(rank: int, plan: TapPlan, deadline_s: float, what: str, peer: int) -> Iterator[None]:
    """A wait of the transport; its failure becomes a sentence."""
    role = f" (draft, stage {plan.draft_stage})" if rank == plan.draft_rank else ""
    start = time.monotonic()
    try:
        yield
    except LinkTimeout as error:
        raise TapTimeout(
            f"Rank {rank}{role} waited {time.monotonic() - start:.1f} s {what}; the deadline is {deadline_s:g} s. "
            f"Rank {peer} is stuck, slow or lost a message: see its own error, or raise pipeline.deadline_s."
        ) from error
    except LinkLost as error:
        raise TapPeerLost(
            f"Rank {rank}{role} waited {time.monotonic() - start:.1f} s {what}, and rank {peer} has ended. "
            "See that rank's own error."
        ) from error
