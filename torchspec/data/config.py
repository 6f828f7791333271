"""Where prompts and rewards come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class EnvironmentConfig:
    """Prompts and their scorer."""

    name: str = "reasoning_gym:spell_backward"
    """'reasoning_gym:TASK', 'jsonl', or your own class as 'module:Class' or 'path/to/file.py:Class'."""
    args: dict[str, Any] = field(default_factory=dict)
    """Settings of the task: keyword arguments of the reasoning-gym dataset or of your class."""
    questions_per_prompt: int = 1
    """For reasoning_gym: questions in one prompt, answered one a line; the score is their mean."""
    path: str = ""
    """File for name = jsonl: one object a line with prompt (text or messages), answer, and free columns."""
    scorer: str = "exact"
    """For jsonl: exact, contains, numeric, or a 'module:function' score(prompt, response, answer, row)."""
    system_prompt: str = ""
    """System message put before each prompt by the chat template; empty for none."""
    tokenizer: str = ""
    """Tokenizer folder; empty takes the policy's folder, 'char' the built-in character tokenizer."""
    eval_items: int = 64
    """Held-out items, never trained on."""
    scorer_timeout_s: float = 10.0
    """Longest time of one scorer call."""
    max_failed_share: float = 0.2
    """The run fails when more than this share of a step's (or of an evaluation's) scorer calls raised or overran; fewer
    score 0 and are counted."""
