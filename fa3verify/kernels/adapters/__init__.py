"""Other people's kernels behind our calling conventions: a file each, and the table of all of them in :mod:`.peers`."""
