"""A draft that lives in a file outside the package is built by its path and works as the built-in one."""

from __future__ import annotations

import torch
from draft_oracle import policy_shape

from torchspec.context_parallel.layout import PackedZigzag
from torchspec.draft.base import Draft, build_draft
from torchspec.draft.config import DraftConfig

SOURCE = '''
from dataclasses import replace

from torchspec.draft.eagle3 import Eagle3Draft

class Halved(Eagle3Draft):
    """A research draft: feeds half of the taps."""
    def __init__(self, shape, config):
        super().__init__(shape, replace(config, args={}))
        self.factor = config.args["factor"]

    def _first_hidden(self, taps):
        return self.factor * super()._first_hidden(taps)
'''


def test_a_draft_in_a_file_is_built_by_path(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    config = DraftConfig(algorithm=f"{tmp_path}/mine.py:Halved", args={"factor": 0.5})
    mine = build_draft(config, policy_shape(), seed=0)
    assert isinstance(mine, Draft) and type(mine).__name__ == "Halved" and mine.vllm_method == "eagle3"
    plain = build_draft(DraftConfig(), policy_shape(), seed=0)
    taps, embed = [torch.randn(5, 12) for _ in range(3)], torch.randn(5, 12)
    layout = PackedZigzag([2, 3])
    halved = plain([tap / 2 for tap in taps], embed, layout)
    for one, other in zip(mine(taps, embed, layout), halved, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    mine.save(tmp_path / "draft")
    assert (tmp_path / "draft" / "model.safetensors").is_file()
