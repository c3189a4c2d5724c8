"""Families of kernels, a file each: the traits in which they differ.

Configurations, simulator, tuner, twin and error bound read them by :func:`traits_of`. A family is a kernel of a stated
version. Ours is the only one that is built here; for the others the files state what their sources say and what ptxas
made of the binaries that they ship. A file that is added to this folder adds the families in its ``FAMILIES``. The
record of a family is :class:`fa3_kernels.plan.families.record.Traits`.

>>> [traits_of(name).takes_keys(176) for name in ("gluon", "flash3")]
[False, True]
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from fa3_kernels.plan.families.learned import SUFFIX, traits_of_file
from fa3_kernels.plan.families.ours import OURS
from fa3_kernels.plan.families.record import Traits

__all__ = ["FAMILIES", "OURS", "traits_of"]


def _found() -> dict[str, Traits]:
    """Return the families of all files of this folder, ours first."""
    files = sorted((file.name for file in iter_modules(__path__)), key=lambda name: (name != "ours", name))
    named = (vars(import_module(f"{__name__}.{file}")).get("FAMILIES", {}) for file in files)
    return {name: traits for families in named for name, traits in families.items()}


FAMILIES: Mapping[str, Traits] = _found()


def traits_of(family: str) -> Traits:
    """Return the traits of a family, by its name or by the file of a learned order; ValueError for an unknown one."""
    if family.endswith(SUFFIX):
        return traits_of_file(family)
    if family not in FAMILIES:
        raise ValueError(f"kernel family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return FAMILIES[family]
