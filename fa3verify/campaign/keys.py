"""The keys of ``summary.json`` as types; ``docs/summary.md`` says what each is."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

Verdict = Literal["pass", "fail", "inconclusive"]
Json = dict[str, object]  # a JSON object whose keys docs/summary.md lists


class BitsLost(TypedDict):
    """The number that ranks a kernel: bits lost over an ideal kernel (:mod:`~fa3verify.judging.bits_lost`)."""

    mean: float
    worst: float
    worst_family: str
    families: int


class KernelSummary(TypedDict):
    """Holds what a campaign found of one kernel, as ``summary["kernels"]`` holds it; ratios are error / bound.

    Every key is described in ``docs/summary.md``.
    """

    name: str
    description: str
    verdict: Verdict
    tried: Json
    coverage: Json
    inconclusive: str | None
    cases: int
    outputs: int
    worst_ratio: float | None
    bits_lost: BitsLost | None
    sketch: Json | None
    operation: str
    dtype: str | None
    identity: dict[str, str | None]
    states_order: bool
    assumed: NotRequired[Json]
    orders: list[Json]
    policy: list[str]
    worst_ratio_lse: float | None
    worst_ratios: dict[str, float | None]
    worst: Json | None
    search_effort: int
    families: list[Json]
    laws: list[Json]


class Summary(TypedDict):
    """Holds what :func:`fa3verify.verify` returns and ``summary.json`` holds: the verdict and everything behind it.

    Every key is described in ``docs/summary.md``. ``wall_s`` and ``cpu_s`` are seconds.
    """

    schema: str
    version: str
    command: str
    profile: str
    seed: int
    started: str
    wall_s: float
    cpu_s: dict[str, dict[str, float]]
    verdict: Verdict
    exit_code: int
    layers: dict[str, str]
    kernels: list[KernelSummary]
    gate: list[Json]
    baseline: dict[str, str] | None
    failures: list[Json]
    cases: list[Json]
    provenance: Json
