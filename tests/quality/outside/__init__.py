"""Kernels as others write them, wrong and right ones, and which of them ``fa3verify verify --quick`` judges rightly."""
