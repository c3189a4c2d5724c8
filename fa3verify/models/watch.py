"""A sanitizer for attention in a program that runs: some calls are drawn, and some rows of them are checked.

Users call it as ``fa3verify.watch``. Nothing that goes wrong in here reaches the program, unless it is asked to.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import runpy
import sys
import threading
import timeit
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from fa3verify.checking.call import AttentionCall
from fa3verify.checking.check import check
from fa3verify.checking.gradients import MOST_PAIRS, SOME_ROWS
from fa3verify.checking.screen import can_screen, worst_rows
from fa3verify.files import write_text
from fa3verify.judging.verdict import EXIT_CODES
from fa3verify.models.calls import Facts, HeldCall, cut, shape_of
from fa3verify.models.report import CallSite, WatchedPart, WatchReport, site_of
from fa3verify.models.targets import SDPA, Function, Replacements, Target, called, lookers, target_of, traced
from fa3verify.operations.operation import Accumulator
from fa3verify.tensors.convert import to_torch

_MOST_DUMPS = 8
# On a GPU: the worst rows of one head, pairs that are computed, in about 20 ms of an H200, and held at once, in 0.5 GB.
_SCREEN: Facts = {"rows": 8, "heads": 1, "pairs": 1 << 27, "scores": 1 << 24}
_MOST_ELEMENTS = 1 << 28  # of a tensor that is searched for NaN and infinities


class Watch(WatchReport):
    """What watches, from ``with`` to its end; parameters are those of :func:`fa3verify.watch`."""

    def __init__(
        self,
        *,
        one_in: float,
        budget: float,
        rows: int,
        seed: int,
        memory_bytes: int,
        folder: str | Path,
        raises: bool,
    ) -> None:
        super().__init__(one_in, budget, seed, int(os.environ.get("RANK", "0")), Path(folder))
        self._rows = rows
        self._memory_bytes = memory_bytes
        self._raises = raises
        self._random = random.Random(f"{seed} {self.rank}")
        self._lock = threading.RLock()
        self._held: weakref.WeakSet[HeldCall] = weakref.WeakSet()
        self._replacements = Replacements(self._wrapped)

    def __enter__(self) -> Watch:
        if lookers:
            raise ValueError("another watch is running, and there is one at a time")
        torch.overrides.get_testing_overrides()  # torch keeps this table of functions: of the originals
        if torch.cuda.is_initialized():  # its float64 is loaded; a program that has no GPU yet is not given one
            x = torch.zeros(1, 16, 1, 16, device="cuda", dtype=torch.bfloat16)
            check(x, x, x, x, layout="bshd")
        parts = (self._wrapped(target_of("", SDPA, lambda: None)), lambda: self._is_drawn("", math.inf))
        self._call_s = sum(timeit.timeit(part, number=1000) for part in parts) / 1000  # of a call that is not drawn
        hook = register_optimizer_step_post_hook(lambda *_: setattr(self, "steps", self.steps + 1))
        self._replacements.callback(hook.remove)
        lookers.append(self._look_compiled)
        self._replacements.callback(lookers.clear)
        self.calls.clear()
        self._replacements.start()
        self._began_s = timeit.default_timer()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended_s = timeit.default_timer()
        self.spent_s["calls not drawn"] = self._call_s * self.calls.total()
        self._replacements.close()
        lines = (
            {"schema": "fa3verify.shapes/1", "function": function, "drawn": n, "problem": problem.to_json()}
            for (function, problem), n in self.shapes.most_common()
        )
        with self._guarded():
            write_text(self.folder / f"shapes-rank{self.rank}.jsonl", "".join(json.dumps(x) + "\n" for x in lines))
        print(self)

    def run(self, script: Path, arguments: Sequence[str]) -> int:
        """Run a script as the main program, watch it, and return an exit code: 1 if a call is wrong, 5 if none was.

        What the script raises passes, and so does an exit with a code of its own. ``sys.argv`` stays the script's.
        """
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent.resolve()))
        try:
            with self:
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        return EXIT_CODES["fail" if not self else "pass" if self.checked else "inconclusive"]

    def _wrapped(self, target: Target) -> Function:
        """Return what is called in the place of a function."""

        @functools.wraps(target.original)
        def attention(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return traced(target, args, kwargs)
            if self._look_compiled in lookers and self._is_drawn(target.name, self.one_in):
                return self._call(target, args, kwargs)
            return called(target, args, kwargs)

        vars(attention)["__signature__"] = target.signature
        del vars(attention)["__wrapped__"]  # it would be replaced, too
        return attention

    def _is_drawn(self, name: str, one_in: float) -> bool:
        """Count a call of a function, and tell whether it is looked at."""
        self.calls[name] += 1
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.reasons["calls captured in CUDA graphs, whose replays are not seen"] += 1
            return False
        return self._random.random() * one_in < 1

    def _call(self, target: Target, args: tuple[Any, ...], kwargs: Facts) -> Any:
        """Make the user's call with aliases of its operands where gradients are taken, and check what it returns."""
        held = HeldCall(self._guarded, target.swaps)
        facts: Facts = {}
        with self._guarded(), self._spending("outputs"):
            given = target.signature.bind(*args, **kwargs)
            again = target.signature.bind(*args, **kwargs)
            given.apply_defaults()
            facts = target.read(given.arguments)
            operands = [*target.signature.parameters][target.swaps :][:3]
            for name, operand in zip("vkq", operands[::-1], strict=True):  # so that gradients are added as without
                again.arguments[operand] = held.alias(name, given.arguments[operand])
            args = again.args
            kwargs = again.kwargs
        returned = called(target, args, kwargs)
        with self._guarded():
            if facts:
                self._look(target, facts, returned, site_of(target.name, self.steps), held)
        return returned

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Count whatever goes wrong by its reason, and hide from modes of torch that the user has."""
        try:
            with self._lock, _disable_current_modes():
                yield
        except ValueError as reason:
            self.reasons[f"calls with {reason}"[:100]] += 1
        except Exception as error:
            if self._raises:
                raise
            self.reasons[f"failures of the watch: {type(error).__name__}: {error}"[:150]] += 1

    def _look_compiled(self, words: str, out: torch.Tensor | None = None, given: Facts | None = None) -> None:
        """Look at a call that compiled code has made in the layer that ``words`` name; without one, count a reason."""
        if given is None:
            self.reasons[words] += 1
        elif self._is_drawn(SDPA, self.one_in):
            with self._guarded():
                target = target_of("", SDPA, print)
                site = site_of(SDPA, self.steps)._replace(layer=words)
                self._look(target, target.read(given), out, site, HeldCall(self._guarded, swaps=False))

    def _look(self, target: Target, facts: Facts, returned: Any, site: CallSite, held: HeldCall) -> None:
        """Check a head of a drawn call, and keep what its gradients will be checked with."""
        out, *rest = returned if isinstance(returned, tuple) else (returned,)
        if out.is_cuda:
            torch.cuda.current_stream(out.device).synchronize()  # the user's work is not our time
        with self._spending("outputs"):
            own = out.detach().transpose(1, 2) if target.swaps else out.detach()
            saved = getattr(out.grad_fn, "_saved_logsumexp", None) if out.is_cuda else None  # what a backward reads
            if saved is not None and saved.shape == own.shape[:-1]:
                rest.append(saved)
            lse = next((x.detach() for x in rest if isinstance(x, torch.Tensor) and x.ndim == own.ndim - 1), None)
            call = AttentionCall(**facts, out=own, lse=lse)
            self.shapes[target.name, shape_of(call)] += 1
            self._search(call, site)
            sequence = self._random.choice([i for i, n in enumerate(call.lengths_q) if n])
            head = self._random.randrange(call.nheads)
            head_kv = head * call.nheads_kv // call.nheads
            size = call.q.itemsize * (call.q.shape[-1] + call.v.shape[-1])
            keys = call.lengths_k[sequence]
            rows = call.lengths_q[sequence] * call.group
            judge = functools.partial(self._judge, site, _accumulator(call.q), sum(call.lengths_q) * call.nheads)
            # Gradients of some rows are computed without all pairs where lse is known, or dQ alone is checked.
            is_local = lse is not None or rows * keys > MOST_PAIRS
            work = (SOME_ROWS * (rows + keys) if is_local else rows * keys) * size
            if len(held.wanted) > 1 and self._affords("gradients", work, 2 * (rows + keys) * size):
                where = f"sequence {sequence}, kv head {head_kv} and its query heads"
                held.keep(out, call, sequence, head_kv, functools.partial(judge, "gradients", work, where))
                self._held.add(held)
                self.most_held_bytes = max(self.most_held_bytes, sum(x.n_bytes for x in self._held))
            if not self._affords("outputs", keys * size, (keys + call.lengths_q[sequence]) * size):
                return
            worst: Facts = {}
            if can_screen(call):
                chosen, screened = worst_rows(call, seed=self._random.getrandbits(32), **_SCREEN)
                (((sequence, head), worst_of_head),) = chosen.items()
                worst = {"rows": worst_of_head, "screened": screened}
            part = cut(call, sequence, slice(head, head + 1)) | worst
        judge("outputs", keys * size, f"sequence {sequence}, head {head}", part)

    def _affords(self, kind: str, work: int, n_bytes: int) -> bool:
        """Tell whether there are time and memory for a check, and count it if not."""
        room = self._memory_bytes - sum(x.n_bytes for x in self._held)
        affords = n_bytes <= room and self._has_time(kind, work)
        if not affords:
            self.reasons[f"{kind} for lack of time or memory"] += 1
        return affords

    def _search(self, call: AttentionCall, site: CallSite) -> None:
        """Look for the first NaN or infinity in operands and output; caches hold anything behind their keys."""
        for name in ("q", "k", "v", "out"):
            x = getattr(call, name)
            is_searched = call.cache_seqlens is None and x.itemsize > 1 and x.numel() <= _MOST_ELEMENTS
            if is_searched and not all(map(math.isfinite, x.aminmax())):  # NaN in both if there is one
                where = ", ".join(map(str, (~x.isfinite()).nonzero()[0].tolist()))
                kind = "operands" if name != "out" else "out" if call.attn_mask is None else "masked out"
                beside = "before attention" if name != "out" else "although q, k and v are finite"
                self.not_finite.setdefault(kind, f"{name}[{where}] is not finite {beside}, first seen at {site}")
                return

    def _judge(
        self,
        site: CallSite,
        sums: Accumulator,
        rows_of: int,
        kind: str,
        work: int,
        where: str,
        part: Facts,
    ) -> None:
        """Check a part of a call, and remember what was found; AssertionError where that is asked for.

        The part may name its rows, and say of how many that a GPU computed they are the worst.
        """
        with self._spending(kind, work):
            screened = part.pop("screened", 0)
            found = replace(
                check(**{"rows": self._rows} | part, seed=self._random.getrandbits(32), accumulator=sums),
                screened=screened,
            )
        seen = WatchedPart(site=site, kind=kind, rows_of=rows_of, where=where, found=found)
        self.checked.append(seen)
        if not found and site.layer not in self.dumps and len(self.dumps) < _MOST_DUMPS:
            path = self.folder / f"rank{self.rank}-step{site.step}-{site.layer}-{kind}.pt".replace("/", "-")
            self.dumps[site.layer] = path
            write_text(path.with_suffix(".txt"), f"{seen}\n\nCalled from:\n{''.join(reversed(site.stack.format()))}")
            values = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in part.items()}
            torch.save({name: x for name, x in values.items() if x is not None}, path)
        if self._raises and not found:
            raise AssertionError(str(seen))


def _accumulator(q: torch.Tensor) -> Accumulator:
    """Return what adds the products on the device of a tensor."""
    has_tf32 = q.is_cuda and q.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if has_tf32 else "fp32" if q.device.type == "cpu" else "either"
