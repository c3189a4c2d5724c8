"""Other people's kernels behind our calling conventions."""
