"""Rotary embedding of drafts against transformers' own formulas, and what is refused."""

from __future__ import annotations

import pytest
import torch

from torchspec.rope import apply_rope, check_rope_scaling, rope_frequencies, rope_tables

SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 0.9,
    },
    {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.get("rope_type", "legacy"))
@pytest.mark.parametrize("head_dim", [32, 64])
def test_frequencies_equal_transformers(scaling, head_dim):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 5e5, "rope_type": scaling.get("type"), **scaling},
    )
    kind = config.rope_parameters["rope_type"]
    expected_F, expected_factor = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    actual_F, factor = rope_frequencies(head_dim, 5e5, check_rope_scaling(scaling), dtype=torch.float32, device="cpu")
    assert factor == pytest.approx(expected_factor, rel=1e-12)
    torch.testing.assert_close(actual_F, expected_F, rtol=3e-7, atol=0)


def test_rotation_equals_complex_multiplication():
    positions_T = torch.randint(0, 5000, (7,))
    x_THD = torch.randn(7, 2, 8, dtype=torch.float64)
    cos_TF, sin_TF = rope_tables(positions_T, 8, 1e4, None, dtype=torch.float64)
    speed_F = torch.tensor([1e4 ** (-i / 4) for i in range(4)], dtype=torch.float64)
    angle = (positions_T[:, None] * speed_F)[:, None]
    turned = torch.complex(x_THD[..., :4], x_THD[..., 4:]) * torch.exp(1j * angle)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(apply_rope(x_THD, cos_TF, sin_TF), expected, rtol=1e-12, atol=1e-12)


def test_scores_depend_on_distance_only():
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)

    def score(at_q, at_k):
        tables = [rope_tables(torch.tensor([at]), 16, 1e4, None, dtype=torch.float64) for at in (at_q, at_k)]
        return (apply_rope(q, *tables[0]) * apply_rope(k, *tables[1])).sum()

    torch.testing.assert_close(score(3, 1), score(1003, 1001), rtol=1e-10, atol=1e-10)
    assert (score(3, 1) - score(4, 1)).abs() > 1e-6


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "llama3", "factor": 2.0}, "lacks high_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_served_is_refused(scaling, words):
    with pytest.raises(ValueError, match=words):
        check_rope_scaling(scaling)


def test_plain_rope_has_no_scaling():
    assert check_rope_scaling(None) is None
    assert check_rope_scaling({"rope_type": "default", "rope_theta": 1e6}) is None
    assert check_rope_scaling({"type": "linear", "factor": 2.0}) == {"rope_type": "linear", "factor": 2.0}
