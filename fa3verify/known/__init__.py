"""Kernels that have a name: ours on a GPU, other people's and those of CPU libraries, and how a name is found."""
