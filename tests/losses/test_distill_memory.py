"""What the sweep allocates beyond the gradients: chunks of logits, whatever the number of rows and passes."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from torchspec.losses.distill import distill_loss
from torchspec.losses.logprob import token_logprobs
from torchspec.losses.objectives import OBJECTIVES

E, V, CHUNK = 8, 4096, 32
CHUNK_BYTES = CHUNK * V * 4


def peak_bytes(function, tmp_path):
    """Most bytes alive at one time during the call, beyond those alive before it, by the allocator's own
    events.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        keep = function()
    del keep
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    memory = sorted((e["ts"], e["args"]) for e in events if e.get("name") == "[memory]")
    before = memory[0][1]["Total Allocated"] - memory[0][1]["Bytes"]
    return max(args["Total Allocated"] for _, args in memory) - before


def distillation(rows, passes, objective="forward_kl", draft=V, chunk=CHUNK):
    g = torch.Generator().manual_seed(0)
    hidden = [torch.randn(rows, E, generator=g).requires_grad_() for _ in range(passes)]
    head = torch.randn(draft, E, generator=g).requires_grad_()
    teacher, teacher_head = torch.randn(rows, E, generator=g), torch.randn(V, E, generator=g)
    anchors = torch.arange(rows).expand(passes, rows).contiguous()
    d2t = torch.arange(draft) * (V // draft - 1) if draft != V else None

    def step():
        out = distill_loss(
            teacher,
            teacher_head,
            hidden,
            head,
            anchors,
            torch.full((passes,), rows),
            chunk_rows=chunk,
            objective=objective,
            d2t=d2t,
            target_ids_R=torch.zeros(rows, dtype=torch.int64),
        )
        out.loss.backward()
        return out

    return step, passes * rows * E * 4 + draft * E * 4


def extra_bytes(rows, passes, tmp_path, **options):
    step, gradients = distillation(rows, passes, **options)
    return peak_bytes(step, tmp_path) - gradients


def test_extra_memory_does_not_grow_with_rows_or_passes(tmp_path):
    extra = {(rows, passes): extra_bytes(rows, passes, tmp_path) for rows in (128, 512) for passes in (1, 7)}
    print(extra)
    for rows, passes in extra:
        # Two chunks of logits, three temporaries of a block (here a block is the whole chunk; in a real
        # vocabulary a hundredth of it), and a few numbers for each row.
        few_numbers = 64 * rows * passes + 256 * rows
        assert extra[rows, passes] < 5.5 * CHUNK_BYTES + few_numbers
    assert extra[512, 7] - extra[128, 1] < 0.05 * 512 * V * 4


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@pytest.mark.parametrize("draft", [V, V // 4])
def test_every_objective_stays_within_chunks(objective, draft, tmp_path):
    # On a CPU the temporaries of an objective are blocks of BLOCK_ELEMENTS; here one block is the whole
    # chunk.
    assert extra_bytes(128, 2, tmp_path, objective=objective, draft=draft) < 9 * CHUNK_BYTES


def test_extra_memory_grows_with_the_chunk(tmp_path):
    """The measurement can fail: with one chunk for all rows the logits are all there."""
    assert extra_bytes(512, 1, tmp_path, chunk=512) > 2 * 512 * V * 4


def test_log_probabilities_hold_one_chunk(tmp_path):
    for rows in (128, 512):
        hidden, head = torch.randn(rows, E, requires_grad=True), torch.randn(V, E, requires_grad=True)
        targets = torch.randint(0, V, (rows,))

        def step(hidden=hidden, head=head, targets=targets):
            token_logprobs(hidden, head, targets, chunk_rows=CHUNK)[0].sum().backward()

        extra = peak_bytes(step, tmp_path) - rows * E * 4 - V * E * 4
        assert extra < 4 * CHUNK_BYTES + 256 * rows
