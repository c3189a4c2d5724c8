"""A-priori rounding-error bounds: what the machine does, step by step, up to whole kernels."""
