"""The distillation loss written the plain way: whole logits, autograd, one pass after the other."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def case(rows=13, width=6, vocab=17, passes=3, draft_vocab=None, seed=0, dtype=torch.float64, scale=1.0):
    """Fresh random inputs: teacher rows, heads, K students, anchors with gaps, counts larger than the local
    ones.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)

    draft = draft_vocab or vocab
    anchors = torch.full((passes, rows), -1)
    for k in range(passes):
        order = torch.randperm(rows, generator=g)
        count = rows - 2 - k if rows > 2 + passes else rows - 1
        anchors[k, order[:count]] = torch.randperm(rows, generator=g)[:count]
    d2t = None
    if draft_vocab:
        ids = torch.randperm(vocab, generator=g)[:draft].sort().values
        d2t = ids - torch.arange(draft)
    return {
        "teacher_hidden": normal(rows, width),
        "teacher_head": normal(vocab, width),
        "student_hidden": [normal(rows, width + 1) for _ in range(passes)],
        "student_head": normal(draft, width + 1),
        "anchors": anchors,
        "counts": (anchors >= 0).sum(1) + torch.arange(1, passes + 1),
        "pass_weights": tuple((torch.rand(passes, generator=g) + 0.5).tolist()),
        "d2t": d2t,
        "target_ids": torch.randint(0, vocab, (rows,), generator=g),
    }


def transformed(z, scale=1.0, softcap=0.0, bias=None):
    z = z if bias is None else z + bias
    z = z * scale
    return softcap * torch.tanh(z / softcap) if softcap else z


def row_loss(objective, logp, logq, target):
    """Value of an objective at each row, by its definition."""
    p, q = logp.exp(), logq.exp()
    if objective == "forward_kl":
        return -(p * logq).sum(-1)
    if objective == "reverse_kl":
        return (q * (logq - logp)).sum(-1)
    if objective == "jsd":
        logm = torch.logaddexp(logp, logq) - math.log(2)
        return 0.5 * (p * (logp - logm)).sum(-1) + 0.5 * (q * (logq - logm)).sum(-1)
    tv = 0.5 * (p - q).abs().sum(-1)
    if objective == "tv":
        return tv
    alpha = torch.minimum(p, q).sum(-1)
    if objective == "lk":
        return -alpha.log()
    if objective == "lk_hybrid":
        w = torch.exp(-3 * alpha.detach())
        return w * (p * (logp - logq)).sum(-1) + (1 - w) * tv
    assert objective == "hard_ce"
    return -logq.gather(1, target.clamp_min(0)[:, None]).squeeze(1) * (target >= 0)


def dense(
    c,
    *,
    objective="forward_kl",
    temperature=1.0,
    sampling_temperature=1.0,
    probabilistic=False,
    position_gate=False,
    teacher=None,
    student=None,
):
    """(loss, stats dict, gradients of the hidden rows, gradient of the head)"""
    hidden = [h.clone().requires_grad_() for h in c["student_hidden"]]
    head = c["student_head"].clone().requires_grad_()
    z = transformed(c["teacher_hidden"] @ c["teacher_head"].T, **(teacher or {}))
    vocab, draft = z.shape[1], head.shape[0]
    ids = torch.arange(draft) + (c["d2t"] if c["d2t"] is not None else 0)
    in_draft = torch.full((vocab,), -1)
    in_draft[ids] = torch.arange(draft)
    logp = F.log_softmax(z[:, ids] / temperature, -1)
    tau = sampling_temperature
    p_full = F.softmax(z / tau, -1) if tau else F.one_hot(z.argmax(-1), vocab).to(z.dtype)
    entropy = -(p_full * p_full.clamp_min(1e-300).log()).sum(-1)
    passes, rows = c["anchors"].shape
    weights = c["pass_weights"]
    stats = {name: torch.zeros(passes, dtype=torch.float64) for name in ("loss", "count", "top1", "accept")}
    accepted = torch.full((passes, hidden[0].shape[0]), math.nan, dtype=torch.float64)
    loss, entropy_sum = 0.0, 0.0
    for k in range(passes):
        for r in range(rows):
            t = int(c["anchors"][k, r])
            target = in_draft[c["target_ids"][r]]
            dropped = (position_gate and in_draft[z[r].argmax()] < 0) or (objective == "hard_ce" and target < 0)
            if t < 0 or dropped:
                continue
            y = transformed(hidden[k][t] @ head.T, **(student or {}))
            logq = F.log_softmax(y / temperature, -1)
            value = row_loss(objective, logp[r][None], logq[None], target[None])[0]
            loss = loss + weights[k] * value
            token = ids[y.argmax()]
            if probabilistic and tau:
                accept = torch.minimum(p_full[r, ids], F.softmax(y / tau, -1)).sum()
            else:
                accept = p_full[r, token]
            accepted[k, t] = accept.item()
            for name, x in (
                ("loss", value),
                ("count", 1),
                ("top1", token == z[r].argmax()),
                ("accept", accept),
            ):
                stats[name][k] += x.item() if torch.is_tensor(x) else x
            entropy_sum += float(entropy[r]) * (k == 0)
    total = sum(w * n for w, n in zip(weights, c["counts"].tolist()))
    loss = loss / total + 0 * sum(h.sum() for h in hidden) + 0 * head.sum()
    loss.backward()
    lengths = [
        sum(math.prod(w[: j + 1]) for j in range(passes)) for w in accepted.T.tolist() if not any(map(math.isnan, w))
    ]
    stats |= {"accept_len": sum(lengths), "windows": len(lengths), "entropy": entropy_sum}
    return loss.detach(), stats, [h.grad for h in hidden], head.grad
