"""Packing: sequences into microbatches of bounded size, and the tensors of one microbatch.

Legend: T rows of a microbatch (of this rank, under context parallelism), S sequences in it.

Alignment, for a document "p p r r e" (two prompt tokens, a response of three with its end token e):

    row t           0    1    2    3    4
    tokens_T        p    p    r    r    e      x[t]
    response_T      .    .    1    1    1      x[t] is a response token          (says something of the TOKEN)
    targets_T       p    r    r    e    0      x[t+1], what row t predicts
    mask_T          .    1    1    1    .      row t predicts a response token   (says something of the ROW)
    advantage_T     0    A    A    A    0      of the token that row t predicts
    engine_logp_T   0   l0   l1   l2    0      log-probability that the engine gave to x[t+1]

Losses of the policy live on rows (targets, mask, advantage, engine_logp); ``response_T`` is what the draft's
anchors are made of. Nothing crosses a document, and padding rows are 0 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchspec.errors import ConfigError, RunError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from torchspec.context_parallel.layout import PackedZigzag


@dataclass
class Sequence:
    """One prompt with one response.

    Attributes:
        prompt_ids: at least one token.
        response_ids: sampled tokens, the end token included where it was sampled; may be empty.
        engine_logprobs: the engine's log-probability of each response token; None counts as 0 for all.
        advantage: of the whole response.
        trained: False leaves the sequence out of ``mask_T`` (the policy's loss), not out of ``response_T``
            (the draft's).
    """

    prompt_ids: list[int]
    response_ids: list[int]
    engine_logprobs: list[float] | None = None
    advantage: float = 0.0
    trained: bool = True

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass
class PackedBatch:
    """Tensors of one microbatch on one rank; the alignment is drawn at the top of this file.

    Attributes:
        layout: where the documents lie; document i is sequence i.
        tokens_T: int64.
        targets_T: int64; 0 where the row predicts nothing.
        mask_T: bool, per ROW: it predicts a response token of a sequence with ``trained``.
        response_T: bool, per TOKEN: it is a response token (of any sequence).
        advantage_T: float32, per row; 0 outside ``mask_T``.
        engine_logp_T: float32, per row; 0 where the row predicts no response token.
        seq_ids_T: int64, position of the row's sequence in the list that was packed; padding rows have their
            document's.
        num_sequences: S.
        num_trained: rows of ``mask_T``, counted over all context-parallel ranks.
    """

    layout: PackedZigzag
    tokens_T: torch.Tensor
    targets_T: torch.Tensor
    mask_T: torch.Tensor
    response_T: torch.Tensor
    advantage_T: torch.Tensor
    engine_logp_T: torch.Tensor
    seq_ids_T: torch.Tensor
    num_sequences: int
    num_trained: int


@dataclass
class _Bin:
    """A microbatch being filled."""

    number: int
    tokens: int = 0
    cost: float = 0.0
    members: list[int] = field(default_factory=list)


def pack(
    lengths: Seq[int],
    tokens_per_microbatch: int,
    *,
    num_ranks: int = 1,
    pad_multiple: int = 1,
    hidden_size: int = 1024,
    round_up: Callable[[int], int] = lambda count: count,
) -> list[list[int]]:
    """Split sequences into microbatches of at most ``tokens_per_microbatch`` tokens and near-equal cost.

    The cost of a sequence of n tokens is n + n^2 / (12 hidden_size): a decoder layer spends about 24 E^2
    operations on a token's matrix products and 2 E n on its causal attention. The number of microbatches is
    the smallest that first-fit finds, rounded up to a multiple of ``num_ranks``; sequences then go, costliest
    first, where the cost is least.

    Args:
        lengths: tokens of each sequence, at least 1 each.
        num_ranks: data-parallel ranks. Microbatch i belongs to rank i % num_ranks; every rank gets equally
            many, and those that run at the same time are neighbours in cost. With fewer sequences than ranks
            the last ones are empty.
        pad_multiple: every document occupies a multiple of this many rows (2C under context parallelism).
        round_up: microbatches of a rank -> the next number, from that on, that can be run (a pipeline schedule does
            not take every number). Some microbatches may then be empty.

    Returns:
        For each microbatch the positions in ``lengths`` that it holds, ascending; costliest microbatch first.
        Depends on the arguments alone. Empty for no sequences.

    Raises:
        ConfigError: a sequence alone does not fit.
    """
    if num_ranks < 1 or pad_multiple < 1:
        raise ValueError(f"num_ranks = {num_ranks} and pad_multiple = {pad_multiple} must be 1 or more.")
    rows = [packed_rows([n], pad_multiple) for n in lengths]
    for i, n in enumerate(lengths):
        if n < 1:
            raise ValueError(f"sequence {i} has {n} tokens; an empty sequence cannot be packed.")
        if rows[i] > tokens_per_microbatch:
            padded = f" ({rows[i]} rows when padded to a multiple of {pad_multiple})" if rows[i] != n else ""
            raise ConfigError(
                f"a sequence of {n} tokens{padded} does not fit train.tokens_per_microbatch = "
                f"{tokens_per_microbatch}; raise it, or lower rollout.max_model_len."
            )
    if not lengths:
        return []
    costs = [n + n * n / (12 * hidden_size) for n in rows]
    order = sorted(range(len(rows)), key=lambda i: (-costs[i], i))
    least = _first_fit(rows, order, tokens_per_microbatch)
    each = round_up(-(-least // num_ranks))
    while (bins := _balance(rows, costs, order, each * num_ranks, tokens_per_microbatch)) is None:
        # Balanced filling may need more room than the tightest one; one bin for each sequence always does.
        each = round_up(each + 1)
    bins.sort(key=lambda b: (-b.cost, b.number))
    return [sorted(b.members) for b in bins]


def _first_fit(rows: list[int], order: list[int], capacity: int) -> int:
    """Number of bins that first-fit, longest first, needs."""
    room: list[int] = []
    for i in order:
        for b, left in enumerate(room):
            if rows[i] <= left:
                room[b] -= rows[i]
                break
        else:
            room.append(capacity - rows[i])
    return len(room)


def _balance(rows: list[int], costs: list[float], order: list[int], count: int, capacity: int) -> list[_Bin] | None:
    """Each sequence, costliest first, into the cheapest of ``count`` bins that has room; None when none
    has."""
    bins = [_Bin(number) for number in range(count)]
    for i in order:
        open_bins = [b for b in bins if b.tokens + rows[i] <= capacity]
        if not open_bins:
            return None
        best = min(open_bins, key=lambda b: (b.cost, b.number))
        best.tokens += rows[i]
        best.cost += costs[i]
        best.members.append(i)
    return bins


_PADDING_DOCUMENT = 256  # rows; attention inside a longer one would cost more and more


def packed_rows(lengths: Seq[int], pad_multiple: int = 1) -> int:
    """Rows of a pack of documents of these lengths, each padded to a multiple of ``pad_multiple``."""
    return sum(-(-n // pad_multiple) * pad_multiple for n in lengths)


def build_batch(
    sequences: Seq[Sequence],
    device: torch.device | str = "cpu",
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    cp_mesh: DeviceMesh | None = None,
    trunk_transport: str = "gather",
    fill_to: int = 0,
) -> PackedBatch:
    """The tensors of one microbatch. Shifts are made here, before the rows are dealt out to context-parallel
    ranks.

    ``fill_to``: rows of the whole pack (``packed_rows`` of the largest one); documents of padding make up what is
    missing. Under a pipeline all microbatches have the same rows, and one may hold nothing else.

    Raises:
        RunError: no sequence, an empty prompt, or another number of log-probabilities than of response
            tokens.
    """
    import torch

    from torchspec.context_parallel.layout import PackedZigzag

    multiple = 1 if cp_size == 1 else 2 * cp_size
    missing = fill_to - packed_rows([len(s) for s in sequences], multiple)
    piece = -(-_PADDING_DOCUMENT // multiple) * multiple
    padding = [min(piece, missing - start) for start in range(0, missing, piece)]
    if not sequences and not padding:
        raise RunError("a microbatch without sequences cannot be built.")
    for i, sequence in enumerate(sequences):
        _check(i, sequence)
    layout = PackedZigzag(
        [*(len(s) for s in sequences), *padding],
        cp_size=cp_size,
        cp_rank=cp_rank,
        device=device,
        cp_mesh=cp_mesh,
        trunk_transport=trunk_transport,
        padding_documents=len(padding),
    )
    total = sum(layout.doc_lengths)
    ints = {name: torch.zeros(total, dtype=torch.int64) for name in ("tokens", "targets")}
    floats = {name: torch.zeros(total, dtype=torch.float32) for name in ("advantage", "engine_logp")}
    bools = {name: torch.zeros(total, dtype=torch.bool) for name in ("mask", "response")}
    start = 0
    for sequence in sequences:
        ids = torch.tensor([*sequence.prompt_ids, *sequence.response_ids], dtype=torch.int64)
        first, end = start + len(sequence.prompt_ids), start + len(sequence)
        ints["tokens"][start:end] = ids
        ints["targets"][start : end - 1] = ids[1:]
        bools["response"][first:end] = True
        predicting = slice(first - 1, end - 1)  # the rows before the response tokens
        if sequence.engine_logprobs is not None:
            floats["engine_logp"][predicting] = torch.tensor(sequence.engine_logprobs, dtype=torch.float32)
        if sequence.trained:
            bools["mask"][predicting] = True
            floats["advantage"][predicting] = sequence.advantage
        start = end
    num_trained = int(bools["mask"].sum())
    local = {f"{name}_T": layout.shard(x.to(device)) for name, x in (ints | floats | bools).items()}
    return PackedBatch(
        layout=layout,
        seq_ids_T=layout.doc_ids_T,
        num_sequences=len(sequences),
        num_trained=num_trained,
        **local,
    )


def _check(i: int, sequence: Sequence) -> None:
    if not sequence.prompt_ids:
        raise RunError(
            f"sequence {i} has an empty prompt; its first response token would have no row that predicts it."
        )
    if sequence.engine_logprobs is not None and len(sequence.engine_logprobs) != len(sequence.response_ids):
        raise RunError(
            f"sequence {i} has {len(sequence.response_ids)} response tokens but "
            f"{len(sequence.engine_logprobs)} log-probabilities of the engine."
        )
