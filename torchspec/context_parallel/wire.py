"""Counting what leaves a rank: for tests and for ``tools/bench_context_parallel.py``.

Counts are exact and deterministic; they are taken at the functional collectives, below DTensor and autograd,
forward and backward.  Shifts (one exchange of a few rows) and whatever runs outside the mode are not counted.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class WireCounter(TorchDispatchMode):
    """``with WireCounter(size, rank) as counter``: then ``counter.bytes`` (int) and ``counter.calls``
    (names).

    Eager only.  Raises NotImplementedError for a collective whose bytes it does not know.
    """

    def __init__(self, size: int, rank: int):
        super().__init__()
        self.size, self.rank = size, rank
        self.bytes = 0
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let DTensor take the op apart: its collectives come back here
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "_c10d_functional" and name != "wait_tensor":
            self.calls.append(name)
            self.bytes += self._sent(name, *args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, x, *args) -> int:
        size = x.numel() * x.element_size()
        if name == "all_gather_into_tensor":
            return (self.size - 1) * size
        if name == "reduce_scatter_tensor":
            return (self.size - 1) * size // self.size
        if name == "all_to_all_single":
            _received, sent, _group = args
            return sum(n for peer, n in enumerate(sent) if peer != self.rank) * (size // x.shape[0])
        raise NotImplementedError(f"WireCounter does not know how many bytes {name} sends.")
