"""The plan of a launch in pure Python: what is compiled, which tiles, in which order. Needs neither torch nor Triton."""
