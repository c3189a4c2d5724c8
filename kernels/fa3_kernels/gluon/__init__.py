"""The GPU kernels, in Gluon (Triton 3.6) for Hopper: the bits of :mod:`fa3_kernels.twin`. Importing this package needs no GPU."""
