"""Keys of meaning: evidence about a function and about one launch of it, bound to what decides the bits and no more.

:func:`code_key` is a Merkle hash of a function's syntax (:mod:`fa3_reports.merkle`): a rename, a move or a comment
keeps it. What the plan hands to a twin is no code of the twin: it counts by :func:`launch_key`, launch by launch.

Some edits that keep every bit change a key nevertheless: ``a + b`` written as ``b + a``, another name of a field, of a
method or of an argument of a method, and whatever stands in a branch that no launch takes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa3_kernels.plan.families import traits_of
from fa3_reports.merkle import Code, Sources, short_hash

if TYPE_CHECKING:
    from fa3_kernels.plan.config import Config
    from fa3_kernels.plan.order import Order
    from fa3_reference.problem import AttentionProblem

_ORDER_FIELDS = 21  # of an order that count whatever they are; later ones count where they are not the default
PACKAGES = ("fa3_kernels", "fa3_reference", "fa3_reports")
_OF_JUDGES = (*PACKAGES, "fa3_simulator", "fa3verify")
_LISTS = ("fa3verify.known",)  # kernels by their names; the twins among them are listed in fa3verify.kernels.twins
FORWARD = ("fa3_kernels.twin.forward", "forward")
ONE_QUERY = ("fa3_reports.one_query", "one_query")


@cache
def code_key(module: str, name: str, checkout: Path | None = None) -> str:
    """Return 16 hexadecimal digits over what a function computes, the same for every version of Python.

    Parameters
    ----------
    module, name : str
        Where the function is defined, and what it is called there.
    checkout : Path, optional
        Folder with other sources, ``kernels/fa3_kernels`` and so on; by default what is imported.

    Raises
    ------
    ValueError
        If the module defines no such name.

    >>> code_key(*FORWARD) == code_key(*ONE_QUERY)
    False
    """
    return Code(_sources(PACKAGES, checkout)).key(module, name)


@cache
def judge_key(module: str, name: str, checkout: Path | None = None) -> str:
    """Return 16 hexadecimal digits over what judges, or is judged, with all that it uses of the five packages.

    What the plan hands to a twin is a part of it, as no :func:`launch_key` stands beside it. Lists of kernels that are
    no twins are left out.

    Parameters
    ----------
    module, name, checkout
        As of :func:`code_key`.

    Raises
    ------
    ValueError
        If the module defines no such name.
    """
    return Code(_sources(_OF_JUDGES, checkout, _LISTS), by_value={"cache_directory"}).key(module, name)


@cache
def _sources(packages: tuple[str, ...], checkout: Path | None, without: tuple[str, ...] = ()) -> Sources:
    """Return the sources of packages, for all keys that are asked of them."""
    if checkout:
        folders = {package: checkout / package.partition("_")[2] / package for package in packages}
    else:
        folders = {package: Path(str(find_spec(package).origin)).parent for package in packages}  # type: ignore[union-attr]
    return Sources(folders, without)


def launch_key(problem: AttentionProblem, config: Config | None) -> str:
    """Return 16 hexadecimal digits over the values that the plan hands to the forward's twin for one launch.

    Parameters
    ----------
    problem : AttentionProblem
        A field that has its default is left out, so that a field more changes no key.
    config : Config or None
        None for cuDNN's kernel of one query, which gets a head_dim alone.

    Raises
    ------
    TypeError
        For a value that has no JSON, and might change without changing the key.
    """
    defaults = {x.name: x.default for x in dataclasses.fields(problem)}
    asked = sorted((name, value) for name, value in dataclasses.asdict(problem).items() if value != defaults[name])
    if config is None:
        return short_hash(json.dumps([asked, traits_of("cudnn").compiled_head_dim(problem.head_dim)]))
    traits = config.traits
    formats = config.dtype, config.out_dtype, config.is_fp8, config.p_offset_log2, config.promotion_interval
    tiles = config.head_dim, config.tile_m, config.tile_n, config.pack_gqa, traits.pads_group, config.intra_wg_overlap
    channels = traits.compiled_head_dim(problem.head_dim, config.is_fp8)
    parts = config.num_splits, traits.sequence_splits(problem, config)
    return short_hash(json.dumps([asked, formats, tiles, channels, parts, *_order_values(traits.order)]))


def _order_values(order: Order) -> Iterator[list[Any]]:
    """Yield the values of the fields that every key has, and then those of later ones that are not the default."""
    fields = dataclasses.fields(order)
    yield [getattr(order, x.name) for x in fields[:_ORDER_FIELDS]]
    if later := [[x.name, value] for x in fields[_ORDER_FIELDS:] if (value := getattr(order, x.name)) != x.default]:
        yield later
