"""How one link of the tap channel moves its messages: a protocol, and the two-sided transports for gloo and
NCCL.

A link joins one source rank and the draft's rank. Its messages have an order that both ends know. A message
is a header (int64 [HEADER_FIELDS]) and one tensor [T, E] per tap. On the draft's side a message lands in a
slot, memory that exists before; a slot is offered for one message at a time, and offering it is the credit: a
send is done only when its slot was offered. A one-sided transport (symmetric memory) fits the same protocol:
``send`` writes into the slot once its stamp says free, ``offer`` sets the stamp to free, ``arrive`` waits for
the stamp.

Every wait takes a deadline in seconds and raises LinkTimeout or LinkLost; the channel turns these into
sentences.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

HEADER_FIELDS = 12


class LinkTimeout(Exception):
    """The deadline of one wait has passed."""


class LinkLost(Exception):
    """The other end is gone."""


class TapTransport(Protocol):
    """One link. ``index`` is the place of a message in the link's order within the step; ``stream`` tells
    apart the source stages of the rank."""

    headers_on_arrival: bool
    """Whether a header can be read as soon as ``arrive`` returns (else after ``finish``)."""

    def warm_up(self, deadline_s: float) -> None:
        """One small message each way, so that nothing is set up inside a step."""

    def send(self, index: int, stream: int, header: Tensor, taps: list[Tensor]) -> None:
        """Source: start sending. Returns at once; the tensors may not change until the message is sent."""

    def sent(self, index: int, deadline_s: float) -> None:
        """Source: wait until message ``index`` has left."""

    def offer(self, index: int, stream: int, header: Tensor, taps: list[Tensor]) -> None:
        """Draft: give the slot for message ``index``. Called in the link's order."""

    def arrive(self, index: int, deadline_s: float) -> None:
        """Draft: whoever reads the slot after this (on the current stream) sees message ``index``."""

    def finish(self, deadline_s: float) -> None:
        """End of a step: everything that was sent or offered is done; forget it."""


class GlooTransport:
    """Two-sided messages on a process group of two ranks, gloo. The memory is the CPU's; nothing is copied on
    either side."""

    headers_on_arrival = True

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.peer = 1 - dist.get_rank(group)
        self.works: dict[int, list[dist.Work]] = {}

    def warm_up(self, deadline_s: float) -> None:
        token = torch.zeros(1, dtype=torch.int64)
        self._wait(
            [
                dist.isend(token, group=self.group, group_dst=self.peer, tag=0),
                dist.irecv(torch.zeros_like(token), group=self.group, group_src=self.peer, tag=0),
            ],
            deadline_s,
        )

    def send(self, index: int, stream: int, header: Tensor, taps: list[Tensor]) -> None:
        try:
            self.works[index] = [
                dist.isend(tensor, group=self.group, group_dst=self.peer, tag=tag)
                for tag, tensor in self._tagged(stream, header, taps)
            ]
        except RuntimeError as error:  # the connection broke before this message
            raise LinkLost(str(error)) from error

    def sent(self, index: int, deadline_s: float) -> None:
        self._wait(self.works.pop(index, []), deadline_s)

    def offer(self, index: int, stream: int, header: Tensor, taps: list[Tensor]) -> None:
        try:
            self.works[index] = [
                dist.irecv(tensor, group=self.group, group_src=self.peer, tag=tag)
                for tag, tensor in self._tagged(stream, header, taps)
            ]
        except RuntimeError as error:
            raise LinkLost(str(error)) from error

    def arrive(self, index: int, deadline_s: float) -> None:
        self._wait(self.works.pop(index), deadline_s)

    def finish(self, deadline_s: float) -> None:
        for index in list(self.works):
            self._wait(self.works.pop(index), deadline_s)

    @staticmethod
    def _tagged(stream: int, header: Tensor, taps: list[Tensor]) -> list[tuple[int, Tensor]]:
        # Tag 0 is the warm-up. A stage has fewer than 1000 taps.
        return [(1000 * (stream + 1) + part, tensor) for part, tensor in enumerate([header, *taps])]

    @staticmethod
    def _wait(works: list[dist.Work], deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        for work in works:
            try:
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
            except RuntimeError as error:
                # gloo has one exception type; its words for a deadline are "Timed out waiting".
                raise (LinkTimeout if "Timed out" in str(error) else LinkLost)(str(error)) from error


class NcclTransport:
    """Two-sided messages on a process group of two ranks, NCCL, on a stream of its own.

    Not run so far: it was written on a machine without a GPU. Host waits happen only in ``sent`` when a
    source is ahead by all its slots, and in ``finish``. ``arrive`` makes the current stream wait, not the
    host. Events decide what is done (``Work.is_completed()`` has been seen to be early); header and taps
    travel in one batch, so the group's own communicator is used and no pair communicator is made inside a
    step.
    """

    headers_on_arrival = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        if device.type != "cuda":
            raise ValueError(f"The NCCL transport moves CUDA tensors; {device} takes the gloo transport.")
        self.group, self.device = group, device
        self.peer = 1 - dist.get_rank(group)
        self.stream = torch.cuda.Stream(device)
        self.events: dict[int, Any] = {}

    def warm_up(self, deadline_s: float) -> None:
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._batch(-1, [self._op(dist.isend, token), self._op(dist.irecv, torch.zeros_like(token))])
        self._host_wait(self.events.pop(-1), deadline_s)

    def send(self, index: int, stream: int, header: Tensor, taps: list[Tensor]) -> None:
        self._batch(index, [self._op(dist.isend, tensor) for tensor in (header, *taps)])
        for tensor in taps:
            tensor.record_stream(self.stream)

    def sent(self, index: int, deadline_s: float) -> None:
        if index in self.events:
            self._host_wait(self.events.pop(index), deadline_s)

    def offer(self, index: int, stream: int, header: Tensor, taps: list[Tensor]) -> None:
        self._batch(index, [self._op(dist.irecv, tensor) for tensor in (header, *taps)])

    def arrive(self, index: int, deadline_s: float) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.events[index])

    def finish(self, deadline_s: float) -> None:
        for index in list(self.events):
            self._host_wait(self.events.pop(index), deadline_s)

    def _op(self, kind: Any, tensor: Tensor) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self.group, group_peer=self.peer)

    def _batch(self, index: int, operations: list[dist.P2POp]) -> None:
        # What the compute stream has done so far (the taps written, the slot's old reader) comes first.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for work in dist.batch_isend_irecv(operations):
                work.wait()  # our stream waits for NCCL's; the host does not
            event = torch.cuda.Event()
            event.record(self.stream)
        self.events[index] = event

    def _host_wait(self, event: Any, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while not event.query():
            if time.monotonic() > end:
                self.group.abort()  # frees the kernel that waits on the device
                raise LinkTimeout("the event of the message was not reached")
            time.sleep(0.0005)
