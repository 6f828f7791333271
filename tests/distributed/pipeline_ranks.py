"""Helpers of the pipeline tests: a small policy and draft cut into stages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gloo_ranks import run_ranks  # noqa: F401  the tests' name for it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, LAYERS, ROWS = 23, 16, 8, 12
TAPS = (0, 2, 5, LAYERS)  # embeddings, two borders or middles of stages, after the last layer


def cut(num_stages: int) -> list[tuple[int, int]]:
    """Layers of every stage; not equal, and taps lie at borders and inside."""
    ends = {2: [3, 8], 3: [2, 4, 8], 4: [2, 3, 6, 8], 8: [1, 2, 3, 4, 5, 6, 7, 8]}[num_stages]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def stage_of_taps(layers: list[tuple[int, int]]) -> dict[int, int]:
    """Tap id -> the stage that captures it."""
    return {
        tap: next(s for s, (first, last) in enumerate(layers) if first <= tap < last or tap == last == LAYERS)
        for tap in TAPS
    }


class Layer(nn.Module):
    """h + W2 tanh(W1 h + c_m): c_m is the same for no two microbatches, so running as the wrong one shows."""

    def __init__(self, part: Part):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.part = [part]  # not a child

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h) + 0.1 * self.part[0].microbatch))


class Part(nn.Module):
    """Layers [first, last) of the policy; stage 0 embeds tokens, the last stage ends with the norm and owns
    the head."""

    def __init__(self, first: int, last: int, *, recompute: bool = False):
        super().__init__()
        self.microbatch, self.recompute = 0, recompute
        self.embed = nn.Embedding(VOCAB, WIDTH) if first == 0 else None
        self.layers = nn.ModuleDict({str(i): Layer(self) for i in range(first, last)})
        self.norm = nn.LayerNorm(WIDTH) if last == LAYERS else None
        self.head = nn.Parameter(torch.empty(VOCAB, WIDTH)) if last == LAYERS else None

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            h = checkpoint(layer, h, use_reentrant=False) if self.recompute else layer(h)
        return h if self.norm is None else self.norm(h)

    def tap_points(self) -> dict[int, nn.Module]:
        points = {tap: self.layers[str(tap)] for tap in TAPS if str(tap) in self.layers}
        return points | ({LAYERS: self.norm} if self.norm is not None else {})

    def load(self, weights: dict[str, Tensor]) -> Part:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights[name])
        return self


class Draft(nn.Module):
    """Reads every tap and the final hidden state, imitates softmax(final_hidden head^T)."""

    def __init__(self, weights: dict[str, Tensor]):
        super().__init__()
        self.fc, self.out = nn.Linear(len(TAPS) * WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.load_state_dict(
            {name.removeprefix("draft."): value for name, value in weights.items() if name[:6] == "draft."}
        )
        self.teacher_head = weights["head"]
        self.losses: list[Tensor] = []

    def loss(self, microbatch: int, taps: dict[int, Tensor], final_hidden: Tensor) -> Tensor:
        assert list(taps) == list(TAPS) and all(tap.shape == (ROWS, WIDTH) for tap in taps.values())
        teacher = torch.softmax(final_hidden @ self.teacher_head.T, -1)
        student = self.out(torch.tanh(self.fc(torch.cat(list(taps.values()), -1))) * (1 + microbatch))
        return F.cross_entropy(student, teacher)

    def __call__(self, microbatch: int, taps: dict[int, Tensor], final_hidden: Tensor) -> None:
        loss = self.loss(microbatch, taps, final_hidden)
        loss.backward()
        self.losses.append(loss.detach())


def make_weights(seed: int) -> dict[str, Tensor]:
    """Every weight of the policy and of the draft ("draft." names), from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    whole = Part(0, LAYERS)
    shapes = {name: p.shape for name, p in whole.named_parameters()}
    shapes |= {
        "draft.fc.weight": (WIDTH, len(TAPS) * WIDTH),
        "draft.fc.bias": (WIDTH,),
        "draft.out.weight": (VOCAB, WIDTH),
        "draft.out.bias": (VOCAB,),
    }
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1)
        for name, shape in shapes.items()
    }


def make_batch(seed: int, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [M, T]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (num_microbatches, ROWS), generator=generator) for _ in range(2))


def policy_loss(hidden: Tensor, target: Tensor, head: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ head.T).reshape(-1, VOCAB), target.reshape(-1))


def one_process(weights: dict[str, Tensor], seed: int, num_microbatches: int, draft_on: bool) -> dict[str, Tensor]:
    """The same step on one process, written without any of the pipeline: losses, and gradients by name."""
    policy, draft = Part(0, LAYERS).load(weights), Draft(weights)
    tokens, targets = make_batch(seed, num_microbatches)
    captured: dict[int, Tensor] = {}
    for tap, module in policy.tap_points().items():
        module.register_forward_pre_hook(lambda _, args, tap=tap: captured.__setitem__(tap, args[0].detach().clone()))
    losses = []
    for m in range(num_microbatches):
        policy.microbatch = m
        hidden = policy(tokens[m : m + 1])
        loss = policy_loss(hidden, targets[m : m + 1], policy.head)
        (loss / num_microbatches).backward()
        losses.append(loss.detach())
        if draft_on:
            draft(m, {tap: captured[tap].view(ROWS, WIDTH) for tap in TAPS}, hidden.detach().view(ROWS, WIDTH))
    found = {name: p.grad for name, p in policy.named_parameters()} | {"losses": torch.stack(losses)}
    if draft_on:
        found |= {f"draft.{name}": p.grad for name, p in draft.named_parameters()} | {
            "draft.losses": torch.stack(draft.losses)
        }
    return found
