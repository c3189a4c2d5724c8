"""The code under test: FlashAttention-3 kernels and their bit-exact CPU twins.

Users may import the names of this module; each is loaded when it is first used, so that importing the package needs no
torch. The functions need torch, and a Hopper GPU to be called.

>>> import fa3_kernels
>>> fa3_kernels.Config(dtype="e4m3", tile_n=160).out_dtype
'bf16'
"""

from fa3_reference.lazy import exporter

__getattr__, __dir__ = exporter(__name__)
