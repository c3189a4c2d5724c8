"""Kernels of others. A peer that does not load is kept in the list, missing, with the reason.

``--peers DIR`` names a folder with the libraries; ``*.so.xz`` are unpacked beside themselves on first use.

=====================  ==============================================================================================
torch.cudnn            ``scaled_dot_product_attention``, backend cuDNN
torch.flash2           the same, backend FLASH: FlashAttention-2
torch.flex             FlexAttention, compiled
fa3                    official FlashAttention-3, wheel ``fa3-fwd``: DIR/fa3_fwd_C.so, bf16 and e4m3
fa3.dew                official FlashAttention-3, wheel ``dew-flash-attn-cu13``: DIR/libdew_flash_attn3.so, fp16 and bf16
fa4                    FlashAttention-4 (CuTe DSL) on SM90: DIR/fa4 or installed
cudnn.fp8              cuDNN's FP8 attention through DIR/nvidia_cudnn_frontend*.whl or installed; e4m3 output
=====================  ==============================================================================================
"""

from __future__ import annotations

import lzma
import os
import shutil
import site
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from fa3verify.gpu.bench.cells import Cell
from fa3verify.gpu.bench.kernels import Inputs, Kernel, Output, Run, Unsupported, descales, graph_run

SIXTEEN_BIT = ("fp16", "bf16")


def library(folder: Path | None, name: str) -> Path:
    """Return the path of a shared library in the peers' folder, unpacked from ``name.xz`` if only that is there.

    Raises
    ------
    Unsupported
        If neither is there.
    """
    if folder is None:
        raise Unsupported(f"{name} is looked for in the folder that --peers names, and none was named")
    path, packed = folder / name, folder / f"{name}.xz"
    if path.exists():
        return path
    if not packed.exists():
        raise Unsupported(f"neither {name} nor {name}.xz is in {folder}")
    if not os.access(folder, os.W_OK):
        path = Path(tempfile.mkdtemp(prefix="fa3verify-peers-")) / name
    part = path.with_name(f".{name}.part")
    with lzma.open(packed) as source, part.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 24)
    part.replace(path)
    return path


def wheel(folder: Path | None, pattern: str, package: str) -> None:
    """Make a package importable: installed, or unpacked from a wheel in the peers' folder."""
    try:
        import_module(package)
        return
    except ImportError as error:
        found = sorted(folder.glob(pattern)) if folder else []
        if not found:
            raise Unsupported(f"package {package} is not installed and no {pattern} is in the peers' folder") from error
    site = Path(tempfile.mkdtemp(prefix="fa3verify-peers-"))
    with zipfile.ZipFile(found[-1]) as archive:
        archive.extractall(site)
    sys.path.insert(0, str(site))
    import_module(package)


def _sdpa(backend_name: str) -> Callable[[Cell, Sequence[Inputs]], Run]:
    def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
        functional = import_module("torch.nn.functional")
        attention = import_module("torch.nn.attention")
        backend = getattr(attention.SDPBackend, backend_name)
        is_gqa = cell.nheads != cell.nheads_kv

        def launch(x: Inputs):
            views = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
            with attention.sdpa_kernel([backend]):
                out = functional.scaled_dot_product_attention(*views, is_causal=cell.causal, enable_gqa=is_gqa)
            return out.transpose(1, 2)

        return graph_run(launch, inputs, Output)

    return prepare


def _flex(cell: Cell, inputs: Sequence[Inputs]) -> Run:
    torch = import_module("torch")
    flex = import_module("torch.nn.attention.flex_attention")
    mask = None
    if cell.causal:
        offset = cell.seqlen_k - cell.seqlen_q
        mask = flex.create_block_mask(
            lambda b, h, i, j: j <= i + offset, None, None, cell.seqlen_q, cell.seqlen_k, device="cuda"
        )
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def launch(x: Inputs):
        views = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
        return compiled(*views, block_mask=mask, enable_gqa=cell.nheads != cell.nheads_kv).transpose(1, 2)

    return graph_run(launch, inputs, Output)


def _fa3(folder: Path | None) -> Callable[[Cell, Sequence[Inputs]], Run]:
    torch = import_module("torch")
    torch.ops.load_library(str(library(folder, "fa3_fwd_C.so")))

    def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
        splits = 0 if cell.grid == "decode" else 1  # 0: its own heuristic
        factors = {id(x): descales(cell, x) for x in inputs}

        def launch(x: Inputs):
            return torch.ops.fa3_fwd.fwd(x.q, x.k, x.v, is_causal=cell.causal, num_splits=splits, **factors[id(x)])

        return graph_run(launch, inputs, lambda result: Output(result[0]))

    return prepare


def _fa4(folder: Path | None) -> Callable[[Cell, Sequence[Inputs]], Run]:
    if folder is not None and (folder / "fa4").is_dir():
        site.addsitedir(str(folder / "fa4"))  # with its .pth files: the DSL lies in a folder of its own
    interface = import_module("flash_attn.cute.interface")

    def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
        def launch(x: Inputs):
            return interface._flash_attn_fwd(x.q, x.k, x.v, causal=cell.causal)[0]

        return graph_run(launch, inputs, Output)

    return prepare


def _cudnn_fp8(folder: Path | None) -> Callable[[Cell, Sequence[Inputs]], Run]:
    wheel(folder, "nvidia_cudnn_frontend*.whl", "cudnn")
    return import_module("fa3verify.adapters.cudnn_fp8").prepare


def _dew(folder: Path | None) -> Callable[[Cell, Sequence[Inputs]], Run]:
    return import_module("fa3verify.adapters.flash3_dew").load(library(folder, "libdew_flash_attn3.so"))


def _refused(reason: str) -> Callable[[Cell, Sequence[Inputs]], Run]:
    def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
        raise Unsupported(reason)

    return prepare


def _loaded(kernel: Kernel, load: Callable[[Path | None], Any], folder: Path | None) -> Kernel:
    """Load a peer now; whatever goes wrong is its reason to be missing."""
    try:
        return replace(kernel, prepare=load(folder))
    except Exception as error:  # a third party's library may raise anything
        text = " ".join(str(error).split())[:200]
        reason = text if isinstance(error, Unsupported) else f"{type(error).__name__}: {text}"
        return replace(kernel, prepare=_refused(reason), missing=reason)


def peers(folder: Path | None, names: Callable[[str], bool] = lambda name: True) -> list[Kernel]:
    """Load the peers whose names are wanted.

    Parameters
    ----------
    folder : Path, optional
        Where their libraries are.
    names : callable
        Tells whether a peer is wanted; the others are not loaded and not returned.
    """
    torch = import_module("torch")
    version = f"torch {torch.__version__}"
    table: list[tuple[Kernel, Callable[[Path | None], Any]]] = [
        (
            _peer("torch.cudnn", f"{version}, cuDNN {torch.backends.cudnn.version()}"),
            lambda _: _sdpa("CUDNN_ATTENTION"),
        ),
        (_peer("torch.flash2", f"{version}, FlashAttention-2"), lambda _: _sdpa("FLASH_ATTENTION")),
        (_peer("torch.flex", f"{version}, FlexAttention compiled"), lambda _: _flex),
        (_peer("fa3", "official FlashAttention-3, fa3-fwd", "bf16", "e4m3"), _fa3),
        (_peer("fa3.dew", "official FlashAttention-3, dew-flash-attn-cu13"), _dew),
        (_peer("fa4", "FlashAttention-4 CuTe DSL on SM90"), _fa4),
        (_peer("cudnn.fp8", "cuDNN frontend, e4m3 in and out", "e4m3"), _cudnn_fp8),
    ]
    return [_loaded(kernel, load, folder) for kernel, load in table if names(kernel.name)]


def _peer(name: str, about: str, *dtypes: str) -> Kernel:
    return Kernel(name, about, dtypes or SIXTEEN_BIT, _refused("not loaded"))
