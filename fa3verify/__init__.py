"""fa3verify: numerics verification and schedule simulation for FlashAttention-3 on NVIDIA Hopper."""

__version__ = "0.1.0"
