"""How far a call travels: our functions from ``flash_attn_func`` to the launch, and from ``verify`` to the twin.

Run as a program: ``python tests/quality/count_functions.py``. Needs torch and Triton, no GPU: the launch is a stand-in.
Prints for each trip the functions on the stack at its end, and how many different functions were entered until then.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.kernels.no_gpu import no_gpu

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(str(ROOT / x) for x in ("fa3verify", "kernels", "simulator", "reference"))
_INNER = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


class _Arrived(BaseException):
    """The trip's end."""


class Inline(Executor):
    """Runs what is submitted at once, here."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(fn(*args, **options))
        except Exception as error:  # as an executor does
            future.set_exception(error)
        return future


def trip(start: Callable[[], Any], ends: Callable[[FrameType], bool]) -> tuple[list[str], int]:
    """Call ``start`` until a function is entered for which ``ends`` holds.

    Returns
    -------
    stack : list of str
        Our functions from the start to the end.
    entered : int
        Different functions of ours that were entered.
    """
    entered: set[str] = set()
    stack: list[str] = []

    def name(frame: FrameType) -> str:
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(OURS):
            return
        if not frame.f_code.co_qualname.endswith(_INNER):
            entered.add(name(frame))
        if ends(frame):
            at: FrameType | None = frame
            while at:
                if at.f_code.co_filename.startswith(OURS):
                    stack.append(name(at))
                at = at.f_back
            sys.setprofile(None)
            raise _Arrived

    sys.setprofile(watch)
    try:
        start()
    except _Arrived:
        pass
    finally:
        sys.setprofile(None)
    return stack[::-1], len(entered)


def of_a_call() -> tuple[list[str], int]:
    """From ``flash_attn_func`` to where a kernel bound to its call is started, on a call like the one before."""
    import torch

    from fa3_kernels.api import flash_attn_func

    with no_gpu():
        q = torch.zeros(1, 64, 2, 128, dtype=torch.float16)
        flash_attn_func(q, q, q)
        return trip(lambda: flash_attn_func(q, q, q), lambda frame: frame.f_code.co_qualname == "BoundCall.__call__")


def of_a_verdict() -> tuple[list[str], int]:
    """From the settings of ``verify`` to the twin, in one process, on a verdict like the one before."""
    from fa3verify.campaign import plan as planned
    from fa3verify.commands import verify

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as out:
        plan = planned.plan
        patch.setattr(verify, "make_executor", lambda settings: Inline())
        patch.setattr(planned, "plan", lambda *given: [x for x in plan(*given) if "family" in x.kind][:1])
        settings = verify.Settings(("twin.fp16",), "quick", 0, Path(out))
        is_twin = str(ROOT / "kernels" / "fa3_kernels" / "twin" / "forward.py")

        def once() -> tuple[list[str], int]:
            return trip(
                lambda: verify.run(settings, lambda count, outcome: None),
                lambda frame: frame.f_code.co_filename == is_twin and frame.f_code.co_name == "forward",
            )

        once()  # imports modules, whose bodies would count as functions
        return once()


if __name__ == "__main__":
    for title, found in (("a call, to the launch", of_a_call()), ("a verdict, to the twin", of_a_verdict())):
        print(f"{title}: {len(found[0])} functions on the way, {found[1]} entered")
        print("  " + " -> ".join(found[0]))
