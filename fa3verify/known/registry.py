"""This module says which kernels there are, and which one a name means.

Built in are the CPU twins. Others come from ``module:function``, ``file.py:function`` or the entry-point group
``fa3verify.kernels``.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from typing import Any

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.families.learned import read
from fa3_reference.problem import AttentionProblem
from fa3verify import operations
from fa3verify.kernels.loading import load, meant
from fa3verify.kernels.record import Candidate, head_dim_refusal
from fa3verify.kernels.twins import BUILT_IN, ON_REQUEST, Twin, is_twin, twin
from fa3verify.known import peer_kernels
from fa3verify.known.cpu_candidates import cpu
from fa3verify.known.gluon import gpu

ENTRY_POINTS = "fa3verify.kernels"


def discover() -> dict[str, Candidate]:
    """Return every known candidate by name, installed entry points included; broken ones are marked unavailable."""
    found = {c.name: c for c in (*BUILT_IN, *ON_REQUEST, *gpu(), *peer_kernels.candidates(), *cpu())}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if entry.name in found:  # as find() takes what is built in first
            continue
        try:
            candidate = load(entry.value)
        except ValueError as error:
            candidate = replace(ON_REQUEST[0], description="", unavailable=str(error))
        found[entry.name] = replace(candidate, name=entry.name)
    return found


def _of_head_dims(candidate: Candidate, dims: str) -> Candidate:
    """The kernel with these head dims alone, given as text; ValueError for one that it does not take."""
    if not all(d.isdecimal() for d in dims.split(",")):
        raise ValueError(f"head dims behind @ are numbers such as 64,128, got {dims!r}")
    asked = tuple(map(int, dims.split(",")))
    known = candidate.head_dims
    if known is not None and (others := set(asked) - set(known)):
        raise ValueError(f"{candidate.name} takes head_dim {', '.join(map(str, known))}, not {min(others)}")
    if candidate.unavailable is None:
        for head_dim in asked:
            _check_head_dim(candidate, head_dim)
    return replace(candidate, name=f"{candidate.name}@{dims}", head_dims=asked)


def _check_head_dim(candidate: Candidate, head_dim: int) -> None:
    """Raise ValueError, with the rule, for a head_dim that a kernel refuses, or of which a twin has no kernel."""
    try:
        rule = head_dim_refusal(candidate, head_dim)
        if isinstance(candidate.code, Twin):  # which computes sizes that no launch has
            Config(candidate.dtype, head_dim)
    except ValueError as error:
        rule = str(error)
    if rule:
        raise ValueError(f"{candidate.name} does not take head_dim {head_dim}: {rule}")


def find(name: str) -> Candidate:
    """Return the kernel of a name.

    Parameters
    ----------
    name : str
        A name that ``fa3verify kernels`` lists, ``NAME+fault`` for a twin with a planted mistake, ``module:function``
        or ``file.py:function``, of several dtypes ``module:function.bf16``. ``@64,128`` behind any of them leaves it
        these head dims alone; ``[tile_n=64,num_splits=2]`` changes its configuration, and ``[order=FILE]`` holds its
        bits against the twin of a learned order.

    Returns
    -------
    Candidate
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
    if name.endswith("]"):
        return _configured(name)
    base, at, dims = name.rpartition("@")
    if at and base.rpartition("@")[2].replace(",", "").isdecimal():
        raise ValueError(f"head dims stand once behind a kernel's name, as in NAME@64,128, got {name!r}")
    if at:
        return _of_head_dims(find(base), dims)
    if ":" in name:
        return load(name)
    known = {c.name: c for c in (*BUILT_IN, *ON_REQUEST)}  # without looking for a GPU
    if name not in known and (installed := importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)):
        return replace(load(next(iter(installed)).value), name=name)
    if name not in known and "+" not in name:
        known = discover()
    if name in known:
        return known[name]
    base, _, fault = name.partition("+")
    if fault and is_twin(base) and isinstance(code := known[base].code, Twin):
        operation = known[base].operation
        faults = operations.find(operation).faults
        try:
            planted = faults(fault)
        except ValueError:
            raise ValueError(f"unknown fault {fault!r} of {operation}; known are {', '.join(faults)}") from None
        return replace(known[base], name=name, description="", code=replace(code, fault=planted), fault=planted)
    rest = "'fa3verify kernels' lists them all; one of your own is MODULE:FUNCTION or FILE.py:FUNCTION"
    raise ValueError(f"unknown kernel {name!r}{meant(base, known) or ';'} {rest}")


def _configured(name: str) -> Candidate:
    """The kernel of a name with fields of its configuration changed, or with a learned order, where brackets say so.

    A twin's family is asked for the changed configuration, and so is that of a kernel's twin where a launch chooses the
    parts of the keys: ``flash3.bf16[num_splits=0]`` splits as the library does, ``gluon.fp16[num_splits=0]`` as ours.
    """
    plain, _, rest = name.partition("[")
    candidate = find(plain)
    changes = dict(_change(each, name) for each in rest[:-1].split(","))
    if order := changes.pop("order", None):
        if changes:
            raise ValueError(f"an order stands alone behind a kernel's name, got {name!r}")
        return replace(candidate, name=name, twin=_twin_of(candidate, str(order)))
    if isinstance(candidate.code, Twin):  # its family then fits what else a change asks for
        changed: dict[str, Any] = dict(candidate.code.changes) | changes
        rebuilt = twin(candidate.dtype, fault=candidate.code.fault, operation=candidate.operation, **changed)
        kept = {"code": rebuilt.code, "features": rebuilt.features, "changeable": rebuilt.changeable}
        return replace(candidate, name=name, **kept)
    own = candidate.code.configure
    is_resolved = candidate.twin and changes.get("num_splits") == 0
    planned = _configured(f"{candidate.twin}[{rest}").code.configure if is_resolved else None

    def configure(problem: AttentionProblem) -> Any:
        config = own(problem)  # refuses what the kernel does not take, which its twin may
        try:
            return planned(problem) if planned else replace(config, **changes)
        except TypeError:
            raise ValueError(f"{plain} has no configuration with {', '.join(changes)}") from None

    return replace(candidate.altered(configure=configure), name=name)


def _twin_of(candidate: Candidate, file: str) -> str:
    """Return the name of the twin of a learned order; ValueError where it is of another dtype or operation."""
    learned = read(file)
    if (candidate.operation, candidate.dtype) != (operations.FORWARD, learned.dtype):
        kind = f"{candidate.operation} in {candidate.dtype}"
        raise ValueError(f"the order in {file} is of a forward in {learned.dtype}, {candidate.name} is a {kind}")
    interval = f",promotion_interval={learned.promotion_interval}" if learned.promotion_interval else ""
    return f"twin.{learned.dtype}[family={file}{interval}]"


def _change(text: str, name: str) -> tuple[str, Any]:
    """A field and its value: an integer, a switch or a word."""
    key, equals, value = text.partition("=")
    if not key or not equals or not value:
        raise ValueError(f"a configuration is KERNEL[FIELD=VALUE,...], got {name!r}")
    if value in ("true", "false"):
        return key, value == "true"
    return key, int(value) if value.lstrip("-").isdigit() else value
