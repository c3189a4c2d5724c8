"""The audit: what the compiler makes of the shipped kernels, and what a measurement of them is evidence of."""
