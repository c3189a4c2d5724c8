"""Microbenchmarks of a Hopper SM: PTX written here, run through the CUDA driver; needs neither torch nor a compiler."""
