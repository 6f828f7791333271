"""A rank that ends or does not come: the others end with a sentence, whatever they were exchanging."""

from __future__ import annotations

import os
import time

import pytest
import torch
from gloo_ranks import run_ranks

from torchspec.ranks import Ranks, own_group, waiting


def exchange(rank: int, what: str, fault: str) -> None:
    os.environ["WORLD_SIZE"], os.environ["RANK"] = "2", str(rank)
    ranks = Ranks(2, timeout_s=3)
    module = torch.nn.Linear(2, 2)
    module(torch.ones(2)).sum().backward()
    group = own_group([[0, 1]], 2)
    if rank == 1:
        if fault == "ends":
            os._exit(7)
        time.sleep(6)
        return
    if what == "gather":
        ranks.gather("metrics")
    elif what == "gradients":
        ranks.sum_gradients(module)
    else:
        with waiting("look at the other ranks"):
            torch.distributed.all_reduce(torch.ones(3), group=group)


@pytest.mark.parametrize(
    "what, sentence", [("gather", "agree with all ranks"), ("gradients", "add up gradients"), ("own", "look at")]
)
def test_a_rank_that_ends(what, sentence):
    first, _ = run_ranks(exchange, 2, what, "ends", timeout_s=30)
    kind, text = first["error"]
    assert kind == "RunError" and text.startswith("Rank 0 waited") and sentence in text
    assert "another rank has ended" in text and "error-rankN.log" in text and "gloo" not in text


def test_a_rank_that_is_late():
    first, _ = run_ranks(exchange, 2, "own", "is late", timeout_s=30)
    kind, text = first["error"]
    assert kind == "RunError" and "did not come in time (parallelism.timeout_s" in text and first["seconds"] < 6


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="own words"), waiting("do something"):
        raise RuntimeError("own words")
