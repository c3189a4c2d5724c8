"""The code under test: FlashAttention-3 kernels and their bit-exact CPU twins."""
