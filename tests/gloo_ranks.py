"""Ranks for tests: gloo processes with a hard end, forked from one process that has imported everything once."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=60)
PRELOAD = ["torch.distributed.pipelining", "torch._dynamo", "torchspec.learner", "torchspec.policy.titan"]


def run_ranks(worker: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[dict]:
    """Run ``worker(rank, *args)`` on gloo ranks. Per rank: {"exitcode", "seconds", "result" or "error", "trace"}.

    Ranks that are alive after ``timeout_s`` are killed (exitcode -9). No process is left when this returns.
    """
    # The store lives in this process, so that no rank's death takes it away; it finds a free port by itself.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ranks = [
            context.Process(target=_rank_main, args=(worker, rank, world_size, port, folder, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + timeout_s
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        del store
        return [_outcome(process, Path(folder) / f"{rank}.pt") for rank, process in enumerate(ranks)]


def results_of(worker: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 500.0) -> list:
    """What ``worker(rank, *args)`` returned on every rank; RuntimeError with the traces when one did not end well."""
    ranks = run_ranks(worker, world_size, *args, timeout_s=timeout_s)
    failed = {rank: r.get("trace", f"exit code {r['exitcode']}") for rank, r in enumerate(ranks) if "result" not in r}
    if failed:
        raise RuntimeError("\n".join(f"rank {rank}: {trace}" for rank, trace in failed.items()))
    return [outcome["result"] for outcome in ranks]


def _outcome(process: Any, file: Path) -> dict:
    found = torch.load(file, weights_only=False) if file.exists() else {}
    return {"exitcode": process.exitcode} | found


def _rank_main(worker: Callable[..., Any], rank: int, world_size: int, port: int, folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=GROUP_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
    dist.barrier()
    start = time.monotonic()
    file = Path(folder) / f"{rank}.pt"
    try:
        outcome = {"result": worker(rank, *args), "seconds": time.monotonic() - start}
    except BaseException as error:
        torch.save(
            {
                "error": (type(error).__name__, str(error)),
                "seconds": time.monotonic() - start,
                "trace": traceback.format_exc(),
            },
            file,
        )
        sys.exit(1)
    torch.save(outcome, file)
    dist.barrier()
    dist.destroy_process_group()
