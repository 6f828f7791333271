"""Who holds which token: documents packed one after the other, dealt out to context-parallel ranks in zigzag.

Legend: T rows of this rank, C context-parallel size (``cp_size``), n = padded length of a document / 2C.

With C = 1 a pack is the documents' tokens, nothing else.  With C > 1 every document is padded to a multiple
of 2C and cut into 2C chunks of n rows; rank r holds chunks r and 2C-1-r of *every* document.  Two documents
of 7 and 3 tokens, C = 2 (digits: position in the document, ``-``: padding)::

    pack    0 1 2 3 4 5 6 -   0 1 2 -
    rank 0  0 1 . . . . 6 -   0 . . -
    rank 1  . . 2 3 4 5 . .   . 1 2 .
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchspec.attention.view import chunks_of
from torchspec.context_parallel import shift as _shift  # noqa: F401  registers torchspec::zigzag_shift


def _zero_unless(keep_T: Tensor, x_T: Tensor) -> Tensor:
    return torch.where(keep_T.view(-1, *[1] * (x_T.dim() - 1)), x_T, torch.zeros_like(x_T))


class PackedZigzag:
    """The layout of one pack on one rank.

    Args:
        doc_lengths: real tokens of each document, all at least 1.
        cp_size, cp_rank: context-parallel size and this rank; with ``cp_mesh`` they are read from it.
        device: where the per-token tensors live.
        cp_mesh: one-dimensional DeviceMesh of the ranks that share this pack; rows can move only with it.
        trunk_transport: how a trunk's keys travel between them, "gather" or "ring".
        padding_documents: so many of the last documents fill the pack up to a wanted size; none of their rows is real.

    Attributes:
        doc_lengths, padded_lengths: tuples of int; equal for C = 1, else padded to a multiple of 2C.
        num_tokens: rows that this rank holds (T); num_tokens_global: padded rows of the pack.
        cu_seqlens: int32 [documents + 1], borders of the padded documents in the whole pack.
        max_seqlen: the longest padded document.
        positions_T, doc_ids_T, doc_end_T: int64 [T]; position in the document, document, and the document's
            real length (a row is padding when ``positions_T >= doc_end_T``).
        real_T: bool [T], False on padding.
    """

    def __init__(
        self,
        doc_lengths: Sequence[int],
        *,
        cp_size: int = 1,
        cp_rank: int = 0,
        device: torch.device | str = "cpu",
        cp_mesh: DeviceMesh | None = None,
        trunk_transport: str = "gather",
        padding_documents: int = 0,
    ):
        if cp_mesh is not None:
            if cp_mesh.ndim != 1:
                raise ValueError(f"cp_mesh must be the one context-parallel dimension of a mesh; got {cp_mesh}.")
            cp_size, cp_rank = cp_mesh.size(), cp_mesh.get_local_rank()
        if trunk_transport not in ("gather", "ring"):
            raise ValueError(f"trunk_transport is {trunk_transport!r}; a layout knows gather and ring.")
        self.cp_mesh, self.trunk_transport = cp_mesh, trunk_transport
        self.cp_group = "" if cp_mesh is None else cp_mesh.get_group().group_name
        self.doc_lengths = tuple(int(length) for length in doc_lengths)
        if not self.doc_lengths or min(self.doc_lengths) < 1:
            raise ValueError(f"A pack needs documents of at least one token; got lengths {list(self.doc_lengths)}.")
        if not 0 <= cp_rank < cp_size:
            raise ValueError(f"Context-parallel rank {cp_rank} does not exist among {cp_size} ranks.")
        multiple = 1 if cp_size == 1 else 2 * cp_size
        self.padded_lengths = tuple(-(-length // multiple) * multiple for length in self.doc_lengths)
        self.cp_size, self.cp_rank, self.device = cp_size, cp_rank, torch.device(device)
        self.num_tokens_global = sum(self.padded_lengths)
        self.num_tokens = self.num_tokens_global // cp_size
        self.max_seqlen = max(self.padded_lengths)

        self._doc_lengths_cpu = torch.tensor(self.doc_lengths)
        lengths = torch.tensor(self.padded_lengths)
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        self.cu_seqlens = starts.to(torch.int32).to(device)
        self._rows_of_rank = [self._global_rows(rank, lengths, starts) for rank in range(cp_size)]
        rows = self._rows_of_rank[cp_rank]
        documents = torch.bucketize(rows, starts[1:], right=True)
        self.positions_T = (rows - starts[documents]).to(device)
        self.doc_ids_T = documents.to(device)
        self.doc_end_T = self._doc_lengths_cpu[documents].to(device)
        self.real_T = self.positions_T < self.doc_end_T
        if padding_documents:
            self.real_T &= self.doc_ids_T < len(self.doc_lengths) - padding_documents

    def _global_rows(self, rank: int, lengths: Tensor, starts: Tensor) -> Tensor:
        """Rows of the whole (padded) pack that ``rank`` holds, in its order: int64 [T]."""
        if self.cp_size == 1:
            return torch.arange(self.num_tokens_global)
        n = lengths // (2 * self.cp_size)
        first, second = chunks_of(rank, self.cp_size)
        chunk_starts = torch.stack([starts[:-1] + first * n, starts[:-1] + second * n], dim=1).flatten()
        chunk_lengths = n.repeat_interleave(2)
        offsets = torch.nn.functional.pad(chunk_lengths.cumsum(0), (1, 0))[:-1]
        return torch.repeat_interleave(chunk_starts - offsets, chunk_lengths) + torch.arange(self.num_tokens)

    def shift(self, x_T: Tensor, n: int) -> Tensor:
        """The row ``n`` later in the same document, zeros past the document's real end (padding is never
        read).

        x: [T, ...] of any dtype (ids, masks, hidden rows); differentiable; n >= 0.  Raises ValueError for
        another number of rows.
        """
        if x_T.shape[0] != self.num_tokens:
            raise ValueError(f"shift wants the {self.num_tokens} rows of this layout; got {tuple(x_T.shape)}.")
        if n < 0:
            raise ValueError(f"shift moves rows from later positions, n >= 0; got {n}.")
        if n == 0:
            return _zero_unless(self.real_T, x_T)
        if self.cp_size > 1:
            if not self.cp_group:
                raise ValueError("Rows move between context-parallel ranks only when the layout has a cp_mesh.")
            return torch.ops.torchspec.zigzag_shift(
                x_T, self._doc_lengths_cpu, n, self.cp_size, self.cp_rank, self.cp_group, False
            )
        n_rows = min(n, self.num_tokens)
        later_T = torch.cat([x_T[n_rows:], x_T.new_zeros(n_rows, *x_T.shape[1:])])
        return _zero_unless(self.positions_T + n < self.doc_end_T, later_T)

    def shard(self, x_global: Tensor) -> Tensor:
        """This rank's rows of a tensor of the real pack, [sum(doc_lengths), ...]; zeros on padding."""
        total = sum(self.doc_lengths)
        if x_global.shape[0] != total:
            raise ValueError(f"shard wants the pack's {total} real tokens; got {tuple(x_global.shape)}.")
        if self.cp_size == 1:
            return x_global
        real_starts = torch.tensor([0, *self.doc_lengths]).cumsum(0)[:-1].to(x_global.device)
        real_T = self.real_T.to(x_global.device)
        rows = real_starts[self.doc_ids_T.to(x_global.device)] + self.positions_T.to(x_global.device)
        return _zero_unless(real_T, x_global[torch.where(real_T, rows, 0)])

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The tensor of the real pack, [sum(doc_lengths), ...], from the rows of all ranks in order."""
        if len(shards) != self.cp_size or any(x.shape[0] != self.num_tokens for x in shards):
            raise ValueError(f"unshard wants {self.cp_size} shards of {self.num_tokens} rows each.")
        rows = torch.cat(self._rows_of_rank).to(shards[0].device)
        padded = torch.empty_like(torch.cat(list(shards)))
        padded[rows] = torch.cat(list(shards))
        keep = torch.cat([torch.arange(p) < r for p, r in zip(self.padded_lengths, self.doc_lengths)])
        return padded[keep.to(padded.device)]
