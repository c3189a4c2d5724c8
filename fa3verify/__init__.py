"""fa3verify: numerics verification and schedule simulation for FlashAttention-3 on NVIDIA Hopper.

Everything a user needs is a name of this module, imported when it is first asked for: ``import fa3verify`` costs
nothing, and only GPU kernels import torch.

>>> import fa3verify
>>> problem = fa3verify.AttentionProblem(1, nheads=2, nheads_kv=1, seqlen_q=64, seqlen_k=64, head_dim=64, causal=True)
>>> judged = fa3verify.judge("twin.fp16", problem, fa3verify.Recipe("peaky", {"gain": 4}))
>>> judged.measures["ratio_max"] < 1  # the largest error over its bound
True
"""

from fa3_reference.lazy import exporter
from fa3verify.version import __version__ as __version__

__getattr__, __dir__ = exporter(__name__)
