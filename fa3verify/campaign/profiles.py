"""How much each profile runs (:data:`PROFILES`), and the cases of each family of inputs that follow from it.

:mod:`fa3verify.campaign.plan` judges these cases. Cases of the covering array come from
:mod:`fa3verify.campaign.cover`, cases of practice from :mod:`fa3verify.cases.practice`.
"""

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
    name : {"quick", "release", "soak"}
    shapes : tuple of AttentionProblem
        Problems of the forward that each family is judged on; a kernel gets them in its own dtype.
    seeds : int
        Draws per family and shape.
    law_examples, bound_examples : int
        Hypothesis examples per law and for the error bound, per kernel.
    strength : int
        How many classes meet in every combination in the covering array: 2 for pairs, 3 for triples.
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

ACTIVATIONS = "activations"  # families of stored real activations begin so
CAPTURED = "captured"  # families of a user's own files begin so


def families(kernel: Kernel, profile: Profile, captures: tuple[Capture, ...] = ()) -> tuple[str, ...]:
    """Return the families of inputs of which a kernel takes a case: synthetic, real activations, then the user's."""
    own = tuple(family_of(capture) for capture in captures if captured_case(kernel, capture, profile, 0))
    return *(name for name in claimed_families() if _inputs(kernel, name, profile, 0)), *own


def claimed_families(captures: tuple[Capture, ...] = ()) -> tuple[str, ...]:
    """Return every family of inputs: a kernel claims all of them, whether or not it takes a case of each."""
    models = sorted({stored.model for stored in list_activations()})
    synthetic = tuple(template.name for template in FAMILIES if template.distribution != ACTIVATIONS)
    return (*synthetic, *(f"{ACTIVATIONS}:{model}" for model in models), *map(family_of, captures))


def family_of(capture: Capture) -> str:
    """Return the family of a user's file, which has one case, the file's."""
    return f"{CAPTURED}:{capture.name}"


def constraint(kernel: Kernel, profile: Profile, captures: tuple[Capture, ...] = ()) -> str | None:
    """Return why a kernel refuses a problem of a campaign, of a class that it claims, or of a user's file; None if it
    takes all of them.

    Problems of the profile are first adapted to what the kernel claims.
    """
    points = ({name: each} for name, classes in space.claimed(kernel).items() for each in classes)
    problems = [adapted(kernel, p) for p in _shapes(kernel, profile)]
    problems += [space.case_of(kernel, point).problem for point in points]
    own = (captured_refusal(kernel, capture, profile) for capture in captures)
    return next(filter(None, (*map(kernel.refusal, problems), *own)), None)


def family_cases(kernel: Kernel, family: str, profile: Profile, seed: int) -> list[Case]:
    """Return the cases of one family, which depend on the seed alone: stored baselines rest on these."""
    return [_case(kernel, *inputs) for inputs in _inputs(kernel, family, profile, seed)]


def judged_cases(kernel: Kernel, family: str, profile: Profile, seed: int) -> list[Case]:
    """Return the cases of one family that a campaign judges: those of its seed, and those of the seed that ranks.

    Bits lost compare kernels on the cases of one seed (:data:`fa3verify.judging.bits_lost.SEED`).
    """
    own = family_cases(kernel, family, profile, seed)
    if any(case.recipe.seed == bits_lost.SEED for case in own):
        return own
    ranked = family_cases(kernel, family, profile, bits_lost.SEED)
    return [*own, *(case for case in ranked if case.recipe.seed == bits_lost.SEED)]


def _case(kernel: Kernel, index: int, problem: AttentionProblem, recipe: Recipe) -> Case:
    """Return the case of a problem; ``index``, its place among the shapes, decides the scheme and the changes."""
    operation = operations.find(kernel.operation)
    scheme, changes = operation.choices(problem, recipe, index, kernel.features, kernel.changeable)
    return Case(kernel.name, problem, recipe, scheme, changes, operation.name)


def captured_case(kernel: Kernel, capture: Capture, profile: Profile, index: int) -> Case | None:
    """Return the case of a user's file, the one at ``index`` among them; None if the kernel does not take it."""
    if captured_refusal(kernel, capture, profile):
        return None
    tokens = _tokens(kernel, capture.seqlen, profile)
    recipe = Recipe(CAPTURED, {"file": capture.file, "sha256": capture.sha256, "tokens": tokens})
    return _case(kernel, index, capture.problem(dtype=kernel.dtype, tokens=tokens), recipe)


def captured_refusal(kernel: Kernel, capture: Capture, profile: Profile) -> str | None:
    """Return why a kernel does not take a user's file, None if it does."""
    tokens = _tokens(kernel, capture.seqlen, profile)
    if not tokens:
        return (
            f"lengths must be multiples of {kernel.sizes.seqlen_multiple}, {capture.file} has {capture.seqlen} tokens"
        )
    try:
        return kernel.refusal(capture.problem(dtype=kernel.dtype, tokens=tokens))
    except ValueError as error:
        return str(error)


def _tokens(kernel: Kernel, seqlen: int, profile: Profile) -> int:
    """Return how many of the first tokens of activations a profile uses, rounded down to lengths the kernel takes."""
    tokens = min(seqlen, profile.activation_tokens or seqlen)
    return tokens - tokens % kernel.sizes.seqlen_multiple


def _inputs(kernel: Kernel, family: str, profile: Profile, seed: int) -> list[tuple[int, AttentionProblem, Recipe]]:
    """Return what a kernel takes of one family: place among the shapes, problem adapted to the kernel, and recipe."""
    if family.startswith(ACTIVATIONS):
        return _activations(kernel, family.partition(":")[2], profile)
    template = next(f for f in FAMILIES if f.name == family)
    recipes = [template.recipe(seed=seed + draw) for draw in range(profile.seeds)]
    taken = [(i, adapted(kernel, p)) for i, p in enumerate(_shapes(kernel, profile))]
    turn = FAMILIES.index(template)  # every second shape has a term of scores, if the kernel takes one
    return [
        (i, space.termed(kernel, p, turn + recipe.seed) if i % 2 else p, recipe)
        for i, p in taken
        if kernel.supports(p)
        for recipe in recipes
    ]


def _shapes(kernel: Kernel, profile: Profile) -> list[AttentionProblem]:
    """Return the problems of every synthetic family in a kernel's dtype, not yet adapted to what it claims."""
    shapes = operations.find(kernel.operation).shapes(profile.shapes, is_quick=profile.name == "quick")
    return [replace(problem, dtype=kernel.dtype) for problem in shapes]


def _activations(kernel: Kernel, model: str, profile: Profile) -> list[tuple[int, AttentionProblem, Recipe]]:
    """Return the stored activations of a model that a kernel takes, by their first tokens, as :func:`_inputs` does."""
    inputs = []
    for index, stored in enumerate(a for a in list_activations() if a.model == model):
        tokens = _tokens(kernel, stored.seqlen, profile)
        if tokens and kernel.supports(problem := stored.problem(dtype=kernel.dtype, tokens=tokens)):
            inputs.append((index, problem, Recipe(ACTIVATIONS, {"name": stored.name, "tokens": tokens})))
    return inputs
