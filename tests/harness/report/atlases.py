"""Atlases of made-up kernels, for the tests of what reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fa3_reference.problem import Dtype
from fa3verify import __version__
from fa3verify.campaign import atlas
from fa3verify.campaign.findings import Finding
from fa3verify.campaign.run import Introduction, KernelRun, Loss, Provenance, Run
from fa3verify.cases import coverage
from fa3verify.judging.family import FamilyRow
from fa3verify.kernels.record import Identity
from fa3verify.properties import LawOutcome

FIGURES = {
    "cases": 3,
    "ratio_max": 0.875,
    "max_error": 0.02,
    "rms": 0.5,
    "nonfinite": 0,
    "rel_rmse_seen": 1.25e-3,
    "determined": 0.5,
    "rel_rmse_unrounded": 4e-3,
    "outside": 0,
    "ulp_max": 0.75,
    "bits_differing": 0,
    "outputs": 4096,
}


GPU = Identity("lib 3", "lib.so", "a" * 64, "NVIDIA H200")


def entry(
    name: str,
    *,
    families: tuple[str, ...] = ("normal", "fa3_outliers"),
    dtype: Dtype = "fp16",
    identity: Identity = GPU,
    policy: tuple[str, ...] = ("causal top_left",),
    **changes,
) -> KernelRun:
    rows = [FamilyRow(f, dict(FIGURES), f"worst/{name}.json", seeds=(0,), largest=f"case of {f}") for f in families]
    law = LawOutcome("repeated_run_is_identical", "pass", kind="exact", examples=6, outputs=1234)
    known = Introduction(
        name,
        "a <b>kernel</b>",
        dtype=dtype,
        identity=identity,
        states_order=True,
        policy=policy,
    )
    found = KernelRun(
        introduction=known,
        families=tuple(rows),
        verdict="pass",
        laws=(law,),
        cases=321,
        outputs=98765,
        coverage=coverage.judged([], [], None),
        loss=(Loss(131072, 128, 0.573, -0.57, None),),
    )
    return replace(found, **changes)


def not_run(name: str, reason: str) -> KernelRun:
    return KernelRun(introduction=Introduction(name), verdict="not run", inconclusive=reason, loss=())


def made_of(
    *kernels: KernelRun,
    findings: tuple[Finding, ...] = (),
    version: str = __version__,
    started: str = "2026-01-01T00:00:00+00:00",
) -> Run:
    return Run(
        profile="quick",
        seed=0,
        verdict="pass",
        exit_code=0,
        layers={},
        kernels=kernels,
        gate=(),
        baseline=None,
        failures=findings,
        cases=(),
        provenance=Provenance(version, "3.12.0", "linux x86_64", 2, "abc", "", 0, {"torch": "2.11.0"}),
        version=version,
        started=started,
        schema=atlas.SCHEMA,
    )


def stored(folder: Path, *kernels: KernelRun, **said) -> Path:
    atlas.write(folder / atlas.FILE, made_of(*kernels, **said))
    return folder / atlas.FILE
