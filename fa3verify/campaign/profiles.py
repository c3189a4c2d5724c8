"""How much each profile runs: shapes, seeds and example counts, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fa3_reference.problem import AttentionProblem
from fa3verify import operations
from fa3verify.cases import space
from fa3verify.cases.case import Case
from fa3verify.cases.coverage import adapted
from fa3verify.inputs.activations import list_activations
from fa3verify.inputs.captures import Capture
from fa3verify.inputs.recipe import FAMILIES, Recipe
from fa3verify.judging import bits_lost
from fa3verify.kernels.record import Kernel

ProfileName = Literal["quick", "release", "soak"]


@dataclass(frozen=True, slots=True)
class Profile:
    """One size of campaign.

    Parameters
    ----------
    shapes : tuple of AttentionProblem
        Problems of the forward, one per entry and family, to be had in a kernel's own dtype.
    seeds : int
        Draws per family and shape.
    law_examples, bound_examples : int
        Hypothesis examples per law and for the error bound, per kernel.
    strength : int
        Classes of which every choice meets in a case of the covering array: 2 for pairs, 3 for triples.
    activation_tokens : int
        Leading tokens used of each stored activation; 0 is all.
    task_limit_s : float
        Time after which one task counts as hung.
    """

    name: ProfileName
    shapes: tuple[AttentionProblem, ...]
    seeds: int
    law_examples: int
    bound_examples: int
    strength: int
    activation_tokens: int
    task_limit_s: float


# Each shape is here for a reason: two kv heads for the head map, seqlen_q != seqlen_k for the diagonal, a short last
# tile for its mask, a window and a softcap because whole branches of a kernel run under nothing else.
_QUICK = (
    AttentionProblem(1, 4, 2, 129, 321, 64, causal=True),
    AttentionProblem(1, 1, 1, 128, 509, 128),
    AttentionProblem(1, 1, 1, 65, 200, 64, window=(40, 7), softcap=4.0),
)
_FULL = (
    *_QUICK,
    AttentionProblem(1, 1, 1, 128, 640, 256, window=(300, 20)),
    AttentionProblem(1, 1, 1, 256, 8192, 128),
    AttentionProblem(1, 4, 2, 1024, 1024, 64, causal=True),
    AttentionProblem(2, 2, 2, 200, 500, 96),
)

PROFILES: dict[str, Profile] = {
    "quick": Profile("quick", _QUICK, 1, 6, 40, 2, 192, 60.0),
    "release": Profile("release", _FULL, 4, 60, 600, 3, 0, 900.0),
    "soak": Profile("soak", _FULL, 16, 600, 6000, 3, 0, 3600.0),
}

ACTIVATIONS = "activations"
CAPTURED = "captured"


def families(kernel: Kernel, profile: Profile, captures: tuple[Capture, ...] = ()) -> tuple[str, ...]:
    """Return the families of which a kernel takes a case: synthetic ones, real activations by model, the user's."""
    own = tuple(family_of(capture) for capture in captures if captured_case(kernel, capture, profile, 0))
    return *(name for name in claimed_families() if _inputs(kernel, name, profile, 0)), *own


def claimed_families(captures: tuple[Capture, ...] = ()) -> tuple[str, ...]:
    """Return every family: what a kernel for any inputs claims."""
    models = sorted({stored.model for stored in list_activations()})
    synthetic = tuple(template.name for template in FAMILIES if template.distribution != ACTIVATIONS)
    return (*synthetic, *(f"{ACTIVATIONS}:{model}" for model in models), *map(family_of, captures))


def family_of(capture: Capture) -> str:
    """Return the family of a user's file, which is its only case."""
    return f"{CAPTURED}:{capture.name}"


def constraint(kernel: Kernel, profile: Profile, captures: tuple[Capture, ...] = ()) -> str | None:
    """Return why a kernel does not take some problem of a campaign, not even adapted, or of a class that it claims;
    None where it takes all.
    """
    points = ({name: each} for name, classes in space.claimed(kernel).items() for each in classes)
    problems = [adapted(kernel, p) for p in _shapes(kernel, profile)]
    problems += [space.case_of(kernel, point).problem for point in points]
    own = (captured_refusal(kernel, capture, profile) for capture in captures)
    return next(filter(None, (*map(kernel.refusal, problems), *own)), None)


def family_cases(kernel: Kernel, family: str, profile: Profile, seed: int) -> list[Case]:
    """Return the deterministic cases of one family; the stored baseline rests on these."""
    return [_case(kernel, *inputs) for inputs in _inputs(kernel, family, profile, seed)]


def judged_cases(kernel: Kernel, family: str, profile: Profile, seed: int) -> list[Case]:
    """Return the cases of one family that a campaign judges: its own, and those of the seed that bits lost are over."""
    own = family_cases(kernel, family, profile, seed)
    if any(case.recipe.seed == bits_lost.SEED for case in own):
        return own
    ranked = family_cases(kernel, family, profile, bits_lost.SEED)
    return [*own, *(case for case in ranked if case.recipe.seed == bits_lost.SEED)]


def _case(kernel: Kernel, index: int, problem: AttentionProblem, recipe: Recipe) -> Case:
    """The case of a problem that has this place among all shapes."""
    operation = operations.find(kernel.operation)
    scheme, changes = operation.choices(problem, recipe, index, kernel.features, kernel.changeable)
    return Case(kernel.name, problem, recipe, scheme, changes, operation.name)


def captured_case(kernel: Kernel, capture: Capture, profile: Profile, index: int) -> Case | None:
    """Return the case of a user's file that has this place among all of them; None if the kernel does not take it."""
    if captured_refusal(kernel, capture, profile):
        return None
    tokens = _tokens(kernel, capture.seqlen, profile)
    recipe = Recipe(CAPTURED, {"file": capture.file, "sha256": capture.sha256, "tokens": tokens})
    return _case(kernel, index, capture.problem(dtype=kernel.dtype, tokens=tokens), recipe)


def captured_refusal(kernel: Kernel, capture: Capture, profile: Profile) -> str | None:
    """Return why a kernel does not take a user's file, None if it does."""
    tokens = _tokens(kernel, capture.seqlen, profile)
    if not tokens:
        return f"lengths must be multiples of {kernel.seqlen_multiple}, {capture.file} has {capture.seqlen} tokens"
    try:
        return kernel.refusal(capture.problem(dtype=kernel.dtype, tokens=tokens))
    except ValueError as error:
        return str(error)


def _tokens(kernel: Kernel, seqlen: int, profile: Profile) -> int:
    """Return how many of the first tokens of activations a profile uses, as many as fit a kernel's lengths."""
    tokens = min(seqlen, profile.activation_tokens or seqlen)
    return tokens - tokens % kernel.seqlen_multiple


def _inputs(kernel: Kernel, family: str, profile: Profile, seed: int) -> list[tuple[int, AttentionProblem, Recipe]]:
    """Problems and recipes of one family that a kernel takes, adapted to it, with their places among all shapes."""
    if family.startswith(ACTIVATIONS):
        return _activations(kernel, family.partition(":")[2], profile)
    template = next(f for f in FAMILIES if f.name == family)
    recipes = [template.recipe(seed=seed + draw) for draw in range(profile.seeds)]
    taken = [(i, adapted(kernel, p)) for i, p in enumerate(_shapes(kernel, profile))]
    return [(i, p, recipe) for i, p in taken if kernel.supports(p) for recipe in recipes]


def _shapes(kernel: Kernel, profile: Profile) -> list[AttentionProblem]:
    """The problems of every synthetic family, before they are adapted."""
    shapes = operations.find(kernel.operation).shapes(profile.shapes, is_quick=profile.name == "quick")
    return [replace(problem, dtype=kernel.dtype) for problem in shapes]


def _activations(kernel: Kernel, model: str, profile: Profile) -> list[tuple[int, AttentionProblem, Recipe]]:
    """The stored activations of a model that a kernel takes: their first tokens, as many as fit its lengths."""
    inputs = []
    for index, stored in enumerate(a for a in list_activations() if a.model == model):
        tokens = _tokens(kernel, stored.seqlen, profile)
        if tokens and kernel.supports(problem := stored.problem(dtype=kernel.dtype, tokens=tokens)):
            inputs.append((index, problem, Recipe(ACTIVATIONS, {"name": stored.name, "tokens": tokens})))
    return inputs
