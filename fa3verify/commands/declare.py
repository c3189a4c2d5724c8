"""The job of ``fa3verify declare``: draft the declaration of a bare function by calling it.

How it is called, its formats, features and head dims are tried first (:mod:`fa3verify.campaign.drafts`). Two campaigns
then ask of the draft, as of any kernel, which sizes it refuses and which contract it has
(:mod:`fa3verify.campaign.questions`); the second draws other calls, which may refute what the first one led to. A draft
takes nothing away that no contract explains.
"""

from __future__ import annotations

import ast
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from fa3_reference.problem import Dtype
from fa3_reference.rules import require
from fa3verify.campaign import drafts
from fa3verify.campaign.findings import Finding
from fa3verify.campaign.introduction import Only
from fa3verify.campaign.pool import processes
from fa3verify.campaign.run import Run
from fa3verify.campaign.tasks import CallTask, execute
from fa3verify.cases.dimensions import HEAD_DIMS
from fa3verify.commands import verify
from fa3verify.files import Json, write_text
from fa3verify.kernels.names import KernelName
from fa3verify.kernels.policy import Policy
from fa3verify.text import plural

DTYPES: tuple[Dtype, ...] = ("fp32", "fp16", "bf16")  # bounds of fp32 tell conventions and contracts apart best
LIMIT = 4  # cases of a family and trials of a property in each of the two campaigns
TRIED_S = 300.0  # for the calls of one hypothesis: Triton's interpreter takes minutes
_SIDES: tuple[Json, ...] = ({}, *({"policy": Policy(causal=side)} for side in ("bottom_right", "top_left")))
_MASKS = ("bias", "bias_fp32", "attn_mask")
Seen = tuple[str, ...]
Score = tuple[int, int, str]  # calls that were right, calls that returned, and what the first other one raised
_LAYOUTS = {"sdpa": "(batch, nheads, seqlen, head_dim)", "flash_attn": "(batch, seqlen, nheads, head_dim)"}
_WIDTH = 100


def declare(reference: str, workers: int, progress: Callable[[str], None]) -> str:
    """Draft the decorator of a function.

    Parameters
    ----------
    reference : str
        ``module:function`` or ``file.py:function``, which is not declared to be a kernel.
    workers : int
        Number of processes; 0 is one per core.
    progress : callable
        Is told, in a word, what was tried.

    Returns
    -------
    str
        Lines of Python. What was seen stands above each keyword, and what a keyword keeps from being judged.

    Raises
    ------
    ValueError
        If the function is not there, is declared already, or could not be called in any way that is known.
    """
    executor = processes(workers, TRIED_S)
    try:
        facts, seen = _drafted(reference, executor, progress)
        narrows: Seen = ()
        contracts: Seen = ()
        for seed in (0, 1):
            run = _judged(reference, facts, seed, workers)
            progress(f"campaign {seed}")
            said: Mapping[str, str] = {}
            for question in run.questions:
                meaning = question.meaning.partition(" (seen")[0]
                words = f"{meaning}. Seen: {_place(question.seen)}"
                if meaning.startswith("it refuses"):
                    narrows += (f"Narrows the verdict: {words}",)
                else:
                    contracts += (f"Its contract: {words}",)
                said = KernelName.parse(question.kernel).contract
            if said:
                more = _value(executor, drafts.answered, reference, facts=facts, said=said)
                facts = {name: x for name, x in facts.items() if name not in more} | more
                seen |= dict.fromkeys(more, ()) | {next(iter(more)): narrows}
                seen |= {"policy": contracts} if contracts else {}
    finally:
        executor.shutdown(cancel_futures=True)
    (kernel,) = run.kernels
    left = [f"{finding.what}: {_place(finding)}" for finding in run.failures]
    found = f"{plural(len(left), 'finding')}{', such as ' + left[0] if left else ''}"
    told = f"Drafted by fa3verify declare from calls: read each line. Of {kernel.cases} fresh ones: {found}."
    body = [line for name, value in facts.items() for line in _argument(name, value, seen.get(name, ()))]
    return "\n".join([*_comment(told), "@fa3verify.kernel(", *(f"    {line}" for line in body), ")"])


def _drafted(reference: str, executor: Executor, progress: Callable[[str], None]) -> tuple[Json, dict[str, Seen]]:
    """Return what is found without a campaign: convention, formats, features and head dims, and what was seen of each.

    ValueError as :func:`declare` says.
    """
    callings: list[Json] = _value(executor, drafts.callings, reference)
    ways: list[tuple[Score, Json, Dtype]] = []
    for each in DTYPES:
        tries = [(calling | {"dtypes": (each,), "features": ()}, drafts.PLAIN) for calling in callings]
        ways.extend((score, calling, each) for calling, score in zip(callings, _scores(executor, reference, tries)))
        progress(f"calls in {each}")
        if any(score[0] for score, _, _ in ways):  # in another format it may be right
            break
    best, calling, dtype = max(ways, key=lambda way: way[0][:2])
    require(best[1], f"{reference} could not be called by any convention that is known: {ways[0][0][2]}")
    facts = calling | {"dtypes": (dtype,), "features": ()}
    features = _value(executor, drafts.features, reference, like=calling["like"])
    trials: list[tuple[str, Any, Json, tuple[Json, ...]]] = [
        *(("dtypes", other, {"dtypes": (other,)}, drafts.PLAIN) for other in DTYPES if other != dtype),
        *(("head_dims", d, {}, tuple(call | {"head_dim": d} for call in drafts.PLAIN)) for d in sorted(HEAD_DIMS)),
        *(("features", name, {"features": (name,)}, calls) for name, calls in features.items() if name != "causal"),
        *(
            ("policy", side, {"features": ("causal",), **side}, tuple(call | {"causal": True} for call in drafts.PLAIN))
            for side in (_SIDES if "causal" in features or "always" in calling else _SIDES[:1])
        ),
    ]
    scores = _scores(executor, reference, [(facts | more, calls) for _, _, more, calls in trials])
    progress("formats, features, head dims")
    tried = [("dtypes", dtype, best), *((name, value, score) for (name, value, *_), score in zip(trials, scores))]
    return _composed(facts, tried, best, features)


def _composed(
    facts: Json, tried: list[tuple[str, Any, Score]], best: Score, features: Json
) -> tuple[Json, dict[str, Seen]]:
    """Return the facts that trials speak for, and what was seen of each.

    What returned is judged, be it right or wrong. Only where it is one of several meanings of an argument, or where the
    function does not say that it takes it, must it be right.
    """
    library = facts.get("library", "torch")
    calls = f"{best[0]} of {len(drafts.PLAIN)} calls right with arrays of {library} {_LAYOUTS.get(facts['like'], '')}"
    seen: dict[str, Seen] = {"like": (calls.strip() + ".",)}
    kept: dict[str, list[Any]] = {"dtypes": [], "features": [], "head_dims": []}
    sides = [(side, score) for name, side, score in tried if name == "policy"]
    side, causal = max(sides, key=lambda scored: scored[1][:2])
    kept["features"] += ["causal"] if "causal" in features and causal[1] else []
    is_mask_known = any(score[0] for _, value, score in tried if value in _MASKS)
    must_be_right = {"fp32", "gqa", "key_padding", *(_MASKS if is_mask_known else ())} - set(facts["dtypes"])
    for name, value, (right, returned, raised) in tried:
        if name in kept and (right or (returned and value not in must_be_right)):
            kept[name].append(value)
        elif name in kept:
            why = f"raised {raised}" if raised else "returned another result"
            seen[name] = *seen.get(name, ()), f"Narrows the verdict: {value} {why}."
    return facts | {name: tuple(values) for name, values in kept.items()} | side, seen


def _scores(executor: Executor, reference: str, tries: list[tuple[Json, tuple[Json, ...]]]) -> list[Score]:
    """Return what became of calls under each of several facts; a process that ended or hung returned nothing."""
    tasks = [
        CallTask("calls", drafts.tried, {"reference": reference, "facts": facts, "calls": calls})
        for facts, calls in tries
    ]
    return [outcome.value or (0, 0, str(outcome.error)) for outcome in execute(tasks, executor)]


def _value(executor: Executor, function: Callable[..., Any], reference: str, **arguments: Any) -> Any:
    """Return the value of a function of a reference in a worker; ValueError for what it raises."""
    (outcome,) = execute([CallTask("", function, {"reference": reference, **arguments})], executor)
    if outcome.error:
        raise ValueError(outcome.error)
    return outcome.value


def _judged(reference: str, facts: Json, seed: int, workers: int) -> Run:
    """Run a part of a quick campaign on a draft, in the format in which its convention was found."""
    with tempfile.TemporaryDirectory() as folder:
        module, _, name = reference.partition(":")
        module = str(Path(module).resolve()) if module.endswith(".py") else module
        arguments = ", ".join(f"{key}={_python(value)}" for key, value in facts.items())
        made = f"fa3verify.kernel({arguments})(drafts.refusing({f'{module}:{name}'!r}))"
        file = Path(folder) / f"draft_{seed}_of_{name}.py"
        write_text(file, f"import fa3verify\nfrom fa3verify.campaign import drafts\n\n{name} = {made}\n")
        dtype = f".{facts['dtypes'][0]}" if len(facts["dtypes"]) > 1 else ""
        kernels = (f"{file}:{name}{dtype}",)
        settings = verify.Settings(
            kernels, "quick", seed, Path(folder) / "out", workers=workers, only=Only(limit=LIMIT)
        )
        return verify.run(settings, lambda count, outcome: None)


def _place(finding: Finding) -> str:
    return (finding.case or finding.message).partition(":")[2].partition(" ")[2]


def _python(value: Any) -> str:
    return value.declaration.removeprefix("policy=") if isinstance(value, Policy) else repr(value).replace("'", '"')


def _argument(name: str, value: Any, seen: Seen) -> list[str]:
    return [*(line for words in seen for line in _comment(words)), f"{name}={_python(value)},"]


def _comment(words: str) -> list[str]:
    return textwrap.wrap(f"# {words}", _WIDTH, subsequent_indent="# ")


def write(reference: str, text: str) -> None:
    """Put a draft above its function in the function's file, and the import of fa3verify where there is none.

    Raises
    ------
    ValueError
        If the reference names no file, or the file defines no such function on its top level.
    """
    module, _, name = reference.partition(":")
    path = Path(module)
    source = path.read_text(encoding="utf-8") if module.endswith(".py") else ""
    body = ast.parse(source).body
    places = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    require(places, f"{module} defines no function {name} that a decorator could stand above: declare a copy of it")
    lines = source.splitlines(keepends=True)
    first = min([places[0].lineno, *(each.lineno for each in places[0].decorator_list)]) - 1
    lines.insert(first, text + "\n")
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    if not any(isinstance(node, ast.Import) and node.names[0].name == "fa3verify" for node in imports):
        behind = [node for node in imports if isinstance(node, ast.Import) or node.module != "__future__"]
        lines.insert(min(behind[0].lineno - 1, first) if behind else first, "import fa3verify\n")
    write_text(path, "".join(lines))
