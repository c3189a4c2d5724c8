"""Which launches of ours a row of a table is evidence of: those whose features it has, at its formats and head_dim.

A row of a causal launch with splits runs the code that is compiled for a causal launch and that for splits, so that it
is stale where either has changed. What a table does not say counts as if the row had it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from fa3_kernels.plan.families import OURS, traits_of
from fa3_reports.audit.probes import probes


class Kind(NamedTuple):
    """What tells launches apart: the function, whether operands have 8 bits, the compiled head_dim, and features."""

    function: str
    is_fp8: bool
    head_dim: int
    features: frozenset[str]


@cache
def _kinds() -> dict[str, Kind]:
    """Return the kinds of all probes, by name."""
    found = {}
    for probe in probes():
        p = probe.problem
        choices = probe.choices
        values: dict[str, Any] = {"dtype": p.dtype, "left": p.window[0], "right": 0 if p.causal else p.window[1]}
        values |= {"softcap": p.softcap, "varlen": p.is_varlen, "pack_gqa": choices.get("pack_gqa", False)}
        values |= {"num_splits": choices.get("num_splits", 1), "v_scope": choices.get("descale_blocks", (0, 0))[1]}
        values |= {"promotion_interval": choices.get("promotion_interval", 128 if p.dtype == "e4m3" else 0)}
        values |= {"pingpong": choices.get("pingpong", True), "overlap": choices.get("intra_wg_overlap", True)}
        values |= {"warp_specialized": choices.get("warp_specialize", True)}
        values |= {"tile_m": choices.get("tile", (0, 0))[0]}  # 0: none is chosen
        values["attention_chunk"] = p.attention_chunk
        row = {name: str(value) for name, value in values.items()}
        head_dim, _ = traits_of(OURS).compiled_head_dims(p)
        found[probe.name] = Kind(probe.function, p.dtype == "e4m3", head_dim, _features(row))
    return found


def _may_split(row: Mapping[str, str]) -> bool:
    """Tell whether keys may have been split. Tables of the bench have no such column: it splits them in its grid of
    decoding alone, whose cells are those of one query.
    """
    if "num_splits" in row or "kernel" not in row:
        return row.get("num_splits") != "1"
    return row["seqlen_q"] == "1" and row["kernel"] != "gluon.one_split"


def _features(row: Mapping[str, str]) -> frozenset[str]:
    """Return what a row has beyond a dense launch of fp16, or of e4m3; of what it does not say, everything."""
    is_fp8 = row["dtype"] == "e4m3"
    interval = row.get("promotion_interval") or "128"
    is_right = row.get("causal") == "True" or int(row.get("right") or -1) >= 0
    has = {
        row["dtype"]: not is_fp8,
        "left": int(row.get("left") or 0) >= 0,
        "right": is_right,
        "softcap": float(row.get("softcap") or 1) > 0,
        "varlen": row.get("varlen") != "False",
        "chunk": row.get("attention_chunk", "0") != "0",  # a table without the column is older than chunks
        "packed": row.get("pack_gqa") != "False",
        "splits": _may_split(row),
        "blocks": row.get("v_scope", "1") not in ("none", "tensor", "head", "0"),
        f"promoted by {interval}": is_fp8 and interval != "128",
        "no pingpong": row.get("pingpong") != "True",
        "no overlap": row.get("overlap") != "True",
        "lockstep": row.get("warp_specialized") != "True",
        "dense, 128 rows": (row.get("tile_m") or "128") == "128" and not is_right and int(row.get("left") or -1) < 0,
    }
    return frozenset(name for name, is_so in has.items() if is_so) - {"fp16"}


def concerns(row: Mapping[str, str], changed: frozenset[str], evidence_of: str = "forward") -> bool:
    """Tell whether a row of a table was measured on one of the launches that have changed since.

    Parameters
    ----------
    row : mapping
        Its columns: ``launch``, the name of a probe; or those of ``bits/gluon_forward_bits.csv``, or some of them. Rows
        of other kernels than ours are of no launch of ours.
    changed : frozenset of str
        Names of probes.
    evidence_of : str
        What was launched, as in :func:`fa3_kernels.audit.evidence.launch_keys`: forwards, also packed and over caches,
        or backwards.

    Raises
    ------
    KeyError
        Without a launch, and without a dtype or a head_dim: nothing tells of which launches it is.
    """
    if "launch" in row:
        return row["launch"] in changed
    if not row.get("kernel", "gluon").startswith("gluon"):
        return False
    head_dim = traits_of(OURS).compiled_head_dim(max(int(row["head_dim"]), int(row.get("head_dim_v") or 0)))
    function = "backward" if evidence_of == "backward" else "forward"
    own = Kind(function, row["dtype"] == "e4m3", head_dim, _features(row))
    kinds = (_kinds().get(name) for name in changed)
    return any(kind is None or (kind[:3] == own[:3] and kind.features <= own.features) for kind in kinds)
