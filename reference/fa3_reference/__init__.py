"""The truth: problem definition, float64 attention and gradients, number formats, quantisers, bounds.

Users may import the names of this module; each is imported when it is first asked for. Nothing here imports the
kernels, the simulator or the verifier.

>>> import fa3_reference
>>> fa3_reference.AttentionProblem(1, nheads=2, nheads_kv=1, seqlen_q=8, seqlen_k=8, head_dim=64).q_shape
(1, 8, 2, 64)
"""

from fa3_reference.lazy import exporter

__getattr__, __dir__ = exporter(__name__)
