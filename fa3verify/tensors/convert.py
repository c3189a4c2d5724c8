"""Copies of arrays between numpy and torch, bit for bit.

bfloat16 and e4m3 are passed as integers of the same bits, as neither library knows the other's type for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fa3_reference.formats import FORMATS

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
_BY_NUMPY = {np.dtype(FORMATS[name].dtype): dtype for name, dtype in TORCH_DTYPES.items()}
_FORMATS = {dtype: FORMATS[name].dtype for name, dtype in TORCH_DTYPES.items()}


@cache
def gpu_of(device: str) -> Any:
    """Return torch's properties of a GPU, such as ``name``, ``major`` and ``minor``; None if there is no such GPU."""
    if not torch.cuda.is_available() or (torch.device(device).index or 0) >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_properties(device)


def to_torch(x: np.ndarray, device: str = "cpu") -> torch.Tensor:
    """Copy an array to a device in its own format."""
    x = np.array(x, order="C")
    if not x.size:  # numpy gives an empty array strides of 0, which kernels refuse
        return torch.empty(x.shape, dtype=_BY_NUMPY.get(x.dtype) or torch.from_numpy(x).dtype, device=device)
    if x.dtype not in _BY_NUMPY:
        return torch.from_numpy(x).to(device)
    return torch.from_numpy(x.view(np.int16 if x.itemsize == 2 else np.uint8)).to(device).view(_BY_NUMPY[x.dtype])


def memory_of(x: torch.Tensor, most_bytes: int) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes, without a copy; if it is larger than ``most_bytes``, the elements
    of the tensor as integers.
    """
    memory = x.detach().untyped_storage()
    return (
        torch.empty(0, dtype=torch.uint8, device=x.device).set_(memory)
        if memory.nbytes() <= most_bytes
        else x.detach().view(getattr(torch, f"int{8 * x.dtype.itemsize}"))
    )


def to_gpu(x: np.ndarray) -> torch.Tensor:
    """Copy an array to the GPU in its own format."""
    return to_torch(x, "cuda")


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """Copy a tensor to numpy in its own format."""
    x = x.detach().contiguous()
    if x.dtype not in _FORMATS:
        return x.cpu().numpy()
    return x.view(torch.uint8 if x.dtype.itemsize == 1 else torch.int16).cpu().numpy().view(_FORMATS[x.dtype])


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a file of torch's on the CPU, without pickle."""
    return torch.load(path, map_location="cpu", weights_only=True)


def with_causal(mask: torch.Tensor, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """Return a boolean mask, or a bias, that hides what a causal mask aligned top-left hides as well."""
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=mask.device).tril()
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def gradients_of(
    function: Callable[..., Any],
    inputs: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    frozen: tuple[str, ...] = (),
    times: int = 1,
    *,
    dlse: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of sum(out * dout) + sum(lse * dlse) by the inputs and, if given, by ``sinks`` and ``bias``.

    ``function`` returns out, or a tuple of out and lse. A gradient that does not exist, as the outputs do not depend on
    the sinks or the bias, is None. Those of ``frozen`` inputs, among q, k and v, are not asked for, and zeros stand for
    them. The graph is differentiated ``times`` times, of which the last one counts.
    """
    leaves = tuple(x.detach().requires_grad_(name not in frozen) for name, x in zip("qkv", inputs, strict=True))
    with torch.enable_grad():
        named = {
            name: x.detach().requires_grad_() for name in ("sinks", "bias") if (x := options.get(name)) is not None
        }
        returned = function(*leaves, **options | named)
        returned = returned if isinstance(returned, tuple) else (returned,)
        douts = (dout,) if dlse is None else (dout, dlse)
        asked = [x for x in (*leaves, *named.values()) if x.requires_grad]
        for _ in range(times - 1):
            torch.autograd.grad(returned[: len(douts)], asked, douts, retain_graph=True, allow_unused=True)
        found = iter(torch.autograd.grad(returned[: len(douts)], asked, douts, allow_unused=bool(named)))
    return tuple(next(found) if x.requires_grad else torch.zeros_like(x) for x in (*leaves, *named.values()))
