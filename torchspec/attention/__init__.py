"""Branch attention: the op, its CPU and CUDA kernels, the dense oracle and the softmax merge."""

from torchspec.attention.op import branch_attention

__all__ = ["branch_attention"]
