"""The plan of a launch in pure Python: which kernel is compiled, which tiles it has, in which order they are worked on.

Nothing here needs torch or Triton. :mod:`fa3_kernels.gluon` runs the plans, and :mod:`fa3_kernels.twin` computes what
the kernels compute.
"""
