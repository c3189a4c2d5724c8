"""What users' stored results rest on, as short digests: drawn operands, planned cases and trials, options of the verbs.

    python -m tests.bless plans

writes them anew after a change that is meant to move them; stored baselines and replay files then are of other inputs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from fa3_reference.problem import AttentionProblem
from fa3verify.campaign.introduction import introduce
from fa3verify.campaign.plan import plan
from fa3verify.campaign.profiles import PROFILES, family_cases
from fa3verify.cases import space
from fa3verify.cases.dimensions import TURNS
from fa3verify.cli.main import main
from fa3verify.compare.axes import AXES
from fa3verify.inputs.recipe import FAMILIES, UNCOMMON, Recipe
from fa3verify.kernels import record
from fa3verify.known import registry
from fa3verify.properties.law import Law, Trial
from fa3verify.properties.runner import run_law
from fa3verify.properties.table import LAWS
from fa3verify.records import plain

FILE = Path(__file__).with_suffix(".json")
PROBLEM = AttentionProblem(2, 4, 2, 21, 70, 64)
KERNELS = ("twin.fp16", "twin.e4m3", "twin.quantize", "twin.backward.bf16", "twin.flash2.bf16")
TRIALS = 5  # the plainest one first


def digest(*parts: bytes) -> str:
    """Return twelve hexadecimal digits of the parts, one behind the other."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def of_json(value: Any) -> str:
    """Return the digest of a value as canonical JSON."""
    return digest(json.dumps(value, sort_keys=True).encode())


def draws() -> dict[str, str]:
    """Return the digest of q, k and v of every family that needs no file, as float64, for two seeds."""
    found = {}
    for family in (*FAMILIES, *UNCOMMON):
        if family.distribution == "activations":
            continue
        recipes = [Recipe(family.distribution, family.params, seed) for seed in (0, 5)]
        arrays = [np.ascontiguousarray(x, np.float64) for recipe in recipes for x in recipe.draw(PROBLEM)]
        found[family.name] = digest(*(x.tobytes() for x in arrays))
    return found


def plans() -> dict[str, str]:
    """Return the digest of the tasks of a campaign and of all cases of its families, by kernel and profile."""
    found = {}
    for name in KERNELS:
        for profile in PROFILES:
            introduced = introduce(name, profile)
            tasks = [(task.kind, task.label, plain(task)) for task in plan([introduced], profile, 0)]
            cases = [
                case.to_json()
                for family in introduced.families
                for case in family_cases(registry.find(name), family, PROFILES[profile], 0)
            ]
            found[f"{name} {profile}"] = of_json([tasks, cases])
    return found


def trials() -> dict[str, str]:
    """Return the digest of the first trials of a property that draws them, on each kernel that it applies to."""
    return {law.name: of_json([_trials(law, registry.find(name)) for name in KERNELS]) for law in LAWS if law.draw}


def _trials(law: Law, kernel: record.Kernel) -> list[Any]:
    drawn: list[Trial] = []
    run_law(replace(law, check=lambda _, trial: drawn.append(trial)), kernel, max_examples=TRIALS, seed=0)
    return [trial.to_json() for trial in drawn]


def classes() -> dict[str, str]:
    """Return the digest of a case of every class that a kernel claims, with the classes that it has, by kernel."""
    found = {}
    for name in KERNELS:
        kernel = registry.find(name)
        chosen = [{dimension: one} for dimension, some in space.claimed(kernel).items() for one in some]
        cases = [space.case_of(kernel, point, seed) for point in chosen for seed in range(TURNS)]
        found[name] = of_json([(case.to_json(), space.point(kernel, case)) for case in cases])
    return found


def axes() -> dict[str, str]:
    """Return the digest of the problems that ``compare`` makes of an axis's own values, by axis."""
    sizes: list[dict[str, Any]] = [{}, {"nheads": 8, "nheads_kv": 4}]
    found = {}
    for axis in AXES:
        fitting = [kernel for name in KERNELS if axis.fits(kernel := registry.find(name))]
        problems = [axis.problem_for(kernel, x, given) for kernel in fitting for x in axis.values for given in sizes]
        found[axis.name] = of_json([axis.words, [problem.to_json() for problem in problems]])
    return found


def options() -> dict[str, dict[str, str]]:
    """Return type, range, default and number of every parameter of every verb."""
    verbs = main.commands if isinstance(main, click.Group) else {}
    return {verb: {x.name or "": _parameter(x) for x in command.params} for verb, command in sorted(verbs.items())}


def _parameter(x: click.Parameter) -> str:
    """Return how a parameter is written, and what it takes."""
    kind = x.type.name if isinstance(x.type, click.Path) else repr(x.type)
    facts = [" ".join(x.opts), kind, f"nargs {x.nargs}", "required" * x.required]
    if isinstance(x, click.Option):
        is_given = isinstance(x.default, (str, int, float)) and not isinstance(x.default, bool)
        facts += [f"default {x.default!r}" * is_given, "flag" * x.is_flag, "several" * x.multiple]
    return ", ".join(fact for fact in facts if fact)


TABLES = (draws, plans, trials, classes, axes, options)


def all_pinned() -> dict[str, dict[str, Any]]:
    """Return everything, by kind."""
    return {make.__name__: make() for make in TABLES}


def renew() -> None:
    """Write everything as it is."""
    FILE.write_text(json.dumps(all_pinned(), indent=1, sort_keys=True) + "\n")
