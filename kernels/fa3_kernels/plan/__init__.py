"""The plan of a launch in pure Python: what is compiled, which tiles, in what order. Needs neither torch nor Triton."""
