"""Our kernels on the GPU, for tune and for measured timelines: timed in graphs, with the bits of their twin first."""
