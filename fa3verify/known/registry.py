"""The list of all known kernels, and the look-up of a kernel by its name.

Known are the CPU twins (:mod:`fa3verify.kernels.twins`), our GPU kernels (:mod:`fa3verify.known.gluon`), those of other
libraries (:mod:`fa3verify.known.peer_kernels`, :mod:`fa3verify.known.cpu_kernels`) and those of the entry-point group
``fa3verify.kernels``. A reference, ``module:function`` or ``file.py:function``, is loaded by
:mod:`fa3verify.kernels.loading`.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fa3_kernels.plan.config import Config, Setting
from fa3_kernels.plan.families.learned import read
from fa3_reference.problem import AttentionProblem
from fa3verify import operations
from fa3verify.kernels.filled import CASES, CaseFolder
from fa3verify.kernels.loading import load, meant
from fa3verify.kernels.names import KernelName, declaring
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.twins import ON_REQUEST, TWINS, Twin, twin
from fa3verify.kernels.widths import head_dim_refusal
from fa3verify.known import peer_kernels
from fa3verify.known.cpu_kernels import cpu
from fa3verify.known.gluon import gpu

ENTRY_POINTS = "fa3verify.kernels"


def discover() -> dict[str, Kernel]:
    """Return every known kernel by name, installed entry points included; broken ones are marked unavailable."""
    known = {c.name: c for c in (*TWINS.values(), *gpu(), *peer_kernels.kernels(), *cpu())}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if entry.name in known:  # find() takes a built-in kernel first as well
            continue
        try:
            kernel = load(entry.value)
        except ValueError as error:
            # Any kernel would do here: it is only listed, with the reason.
            kernel = replace(ON_REQUEST[0], description="", unavailable=str(error))
        known[entry.name] = replace(kernel, name=entry.name)
    return known


def _of_head_dims(kernel: Kernel, head_dims: tuple[int, ...]) -> Kernel:
    """Return the kernel with these head dims alone; ValueError for one that it does not take."""
    known = kernel.head_dims
    if known is not None and (others := set(head_dims) - set(known)):
        raise ValueError(f"{kernel.name} takes head_dim {', '.join(map(str, known))}, not {min(others)}")
    if kernel.unavailable is None:
        for head_dim in head_dims:
            _check_head_dim(kernel, head_dim)
    return replace(kernel, head_dims=head_dims)


def _check_head_dim(kernel: Kernel, head_dim: int) -> None:
    """Raise ValueError, with the rule, for a head_dim that a kernel refuses, or for which a twin has no GPU kernel."""
    try:
        rule = head_dim_refusal(kernel, head_dim)
        if isinstance(kernel.code, Twin):  # a twin also computes sizes for which there is no GPU kernel: Config refuses
            Config(kernel.dtype, head_dim)
    except ValueError as error:
        rule = str(error)
    if rule:
        raise ValueError(f"{kernel.name} does not take head_dim {head_dim}: {rule}")


def find(name: str) -> Kernel:
    """Return the kernel of a name.

    Parameters
    ----------
    name : str
        A name that ``fa3verify kernels`` lists, ``NAME+fault`` for a twin with a planted mistake, ``module:function``
        or ``file.py:function``; where that makes kernels of several dtypes, ``module:function.bf16``. Behind any of
        them ``@64,128`` restricts it to these head dims, ``[tile_n=64,num_splits=2]`` changes its configuration,
        ``[order=FILE]`` has its bits compared with those of a learned order's twin, ``[causal=top_left]`` declares a
        field of its policy, ``[max_seqlen_q=1]`` one of its sizes.

    Returns
    -------
    Kernel
        The kernel, also where it cannot run here: then ``unavailable`` says why.

    Raises
    ------
    ValueError
        If there is no such kernel, with the name that may have been meant, or if its own code cannot be loaded.

    Examples
    --------
    >>> find("twin.fp16").dtype
    'fp16'
    >>> find("twin.e4m3+stale_v").fault
    <Fault.STALE_V: 'stale_v'>
    >>> from fa3_reference.problem import AttentionProblem
    >>> find("twin.e4m3[tile_n=96,promotion_interval=96]").config_for(AttentionProblem(
    ...     1, 1, 1, 1, 97, 128, dtype="e4m3")).tile_n
    96
    """
    parts = KernelName.parse(name)
    kernel = _plain(parts)
    if parts.head_dims:
        kernel = _of_head_dims(kernel, parts.head_dims)
    if parts.changes:
        kernel = _configured(kernel, parts.changes)
    if parts.order:
        kernel = replace(kernel, twin=_learned(kernel, parts.order))
    if parts.contract:
        kernel = declaring(kernel, parts.contract)
    return kernel if kernel.name == name else replace(kernel, name=name)


def is_own(name: str) -> bool:
    """Tell whether a name is of somebody's own kernel, whose contract only he knows: in a file, or installed."""
    asked = KernelName.parse(name)
    return asked.is_reference or bool(importlib.metadata.entry_points(group=ENTRY_POINTS, name=asked.base))


def _plain(parts: KernelName) -> Kernel:
    """Return the kernel of a name's base, with the fault that it names; ValueError as :func:`find` says."""
    name = parts.plain
    if f"{CASES}:" in name:
        return CaseFolder(Path(name.rpartition(CASES)[0]), parts.contract).kernel()
    if parts.is_reference:
        return load(name)
    known: Mapping[str, Kernel] = TWINS  # without looking for a GPU
    if name not in known and (installed := importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)):
        return load(next(iter(installed)).value)
    if name not in known and not parts.fault:
        known = discover()
    if name in known:
        return known[name]
    sound = known.get(parts.base)
    if parts.fault and sound and isinstance(sound.code, Twin):
        faults = operations.find(sound.operation).faults
        try:
            planted = faults(parts.fault)
        except ValueError:
            every = ", ".join(faults)
            raise ValueError(f"unknown fault {parts.fault!r} of {sound.operation}; known are {every}") from None
        return replace(sound, description="", code=replace(sound.code, fault=planted), fault=planted)
    rest = "'fa3verify kernels' lists them all; one of your own is MODULE:FUNCTION or FILE.py:FUNCTION"
    raise ValueError(f"unknown kernel {name!r}{meant(parts.base, known) or ';'} {rest}")


def _configured(kernel: Kernel, changes: Mapping[str, Setting]) -> Kernel:
    """Return the kernel with fields of its configuration changed.

    A twin's family chooses the fields that depend on the changed ones. At ``num_splits=0`` the launch chooses the
    splits, and the configuration of any other kernel is that of its twin: ``flash3.bf16[num_splits=0]`` splits as the
    library does, ``gluon.fp16[num_splits=0]`` as ours. ValueError, when a problem is configured, for an unknown field.
    """
    parts = KernelName.parse(kernel.name)
    name = str(replace(parts, changes={**parts.changes, **changes}))
    if isinstance(kernel.code, Twin):
        changed: dict[str, Any] = dict(kernel.code.changes) | dict(changes)
        rebuilt = twin(kernel.dtype, fault=kernel.code.fault, operation=kernel.operation, **changed)
        changed_fields = {"code": rebuilt.code, "features": rebuilt.features, "changeable": rebuilt.changeable}
        return replace(kernel, name=name, **changed_fields)
    own = kernel.code.configure
    its_twin = kernel.twin and _configured(kernel.twin, changes)
    planned = its_twin.code.configure if its_twin and changes.get("num_splits") == 0 else None

    def configure(problem: AttentionProblem) -> Any:
        config = own(problem)  # raises for a problem that the kernel does not take, although its twin may
        try:
            return planned(problem) if planned else replace(config, **changes)
        except TypeError:
            raise ValueError(f"{kernel.name} has no configuration with {', '.join(changes)}") from None

    return replace(kernel.altered(configure=configure), name=name, twin=its_twin)


def _learned(kernel: Kernel, file: str) -> Kernel:
    """Return the twin of a learned order; ValueError where it is of another dtype or operation."""
    learned = read(file)
    if (kernel.operation, kernel.dtype) != (operations.FORWARD, learned.dtype):
        kind = f"{kernel.operation} in {kernel.dtype}"
        raise ValueError(f"the order in {file} is of a forward in {learned.dtype}, {kernel.name} is a {kind}")
    interval = {"promotion_interval": learned.promotion_interval} if learned.promotion_interval else {}
    return _configured(TWINS[f"twin.{learned.dtype}"], {"family": file} | interval)
