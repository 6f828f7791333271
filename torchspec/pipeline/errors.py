"""How the pipeline's exchanges fail: always with a sentence that says who waited for which microbatch from
whom."""

from __future__ import annotations

from torchspec.errors import RunError


class PipelineError(RunError):
    """An exchange between pipeline ranks failed. Base of the errors below."""


class TapTimeout(PipelineError):
    """A message of the tap channel did not come, or could not be delivered, within the deadline."""


class TapPeerLost(PipelineError):
    """The other rank of a tap link has ended."""


class TapHeaderError(PipelineError):
    """A message of the tap channel is not the one that was expected: lost, doubled, mixed up or damaged."""


class PipelineStalled(PipelineError):
    """The pipeline's own send or receive failed or passed its deadline (its rank has ended, or it is
    stuck)."""
