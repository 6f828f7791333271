"""The schedule by hand, the clip, and a state that goes on bit-equal."""

import copy

import pytest
import torch
from torch import nn

from torchspec.optim.config import OptimizerConfig
from torchspec.optim.optimizer import Optimizer, lr_factor


@pytest.mark.parametrize(
    "decay, expected",
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.868198051533946, 0.55, 0.231801948466054, 0.1]),
    ],
)
def test_schedule(decay, expected):
    config = OptimizerConfig(warmup_steps=2, decay=decay, min_lr_ratio=0.1)
    assert [lr_factor(config, step, 7) for step in range(7)] == pytest.approx(expected)


def one_step(module, optimizer, x):
    module(x).square().sum().backward()
    norm = optimizer.clip()
    optimizer.step()
    return norm


def test_clip_reports_the_norm_before_and_limits_the_gradient():
    module = nn.Linear(4, 4)
    optimizer = Optimizer(dict(module.named_parameters()), OptimizerConfig(max_grad_norm=0.5), 10)
    module(torch.randn(8, 4) * 100).square().sum().backward()
    before = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
    assert torch.allclose(optimizer.clip(), before)
    after = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
    assert after == pytest.approx(0.5, rel=1e-4)


def test_norm_weights_are_not_decayed():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.RMSNorm(4))
    optimizer = Optimizer(dict(module.named_parameters()), OptimizerConfig(lr=0.1, weight_decay=0.5), 10)
    start = [p.detach().clone() for p in module.parameters()]
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    matrix, norm = module.parameters()
    assert torch.allclose(matrix, start[0] * 0.95)
    assert torch.equal(norm, start[1])


def test_resumed_optimizer_goes_on_bit_equal():
    config = OptimizerConfig(lr=0.01, warmup_steps=2, decay="cosine")
    data = torch.randn(6, 5, 4)
    module = nn.Linear(4, 4)
    optimizer = Optimizer(dict(module.named_parameters()), config, 6)
    for x in data[:3]:
        one_step(module, optimizer, x)
    weights = {k: v.clone() for k, v in module.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())
    for x in data[3:]:
        one_step(module, optimizer, x)
    again = nn.Linear(4, 4)
    again.load_state_dict(weights)
    resumed = Optimizer(dict(again.named_parameters()), config, 6)
    resumed.load_state_dict(saved)
    assert resumed.lr == pytest.approx(0.01 * lr_factor(config, 3, 6))
    for x in data[3:]:
        one_step(again, resumed, x)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters()))
