"""One rank alone."""

import pytest
import torch

from torchspec.errors import ConfigError
from torchspec.ranks import Ranks


def test_one_rank_needs_no_group_and_changes_nothing():
    ranks = Ranks()
    module = torch.nn.Linear(2, 2)
    module(torch.ones(2)).sum().backward()
    before = module.weight.grad.clone()
    ranks.sum_gradients(module)
    assert torch.equal(module.weight.grad, before) and ranks.gather(3) == [3] and not ranks.any(False)
    with pytest.raises(ConfigError, match="context_parallel_degree = 2"):
        Ranks(2)


def test_agree_raises_the_own_error():
    with pytest.raises(ValueError, match="mine"):
        Ranks().agree(ValueError("mine"))
