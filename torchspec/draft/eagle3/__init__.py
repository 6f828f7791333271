"""EAGLE-3: shape.py (sizes), model.py (the unroll), loss.py (distillation), export.py (the checkpoint)."""

from torchspec.draft.eagle3.model import Eagle3Draft
from torchspec.draft.eagle3.shape import Eagle3Shape

__all__ = ["Eagle3Draft", "Eagle3Shape"]
