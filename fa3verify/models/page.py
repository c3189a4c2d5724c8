"""The page of a run of :mod:`fa3verify.models.logprobs`: a table of its kernels, and panels that show where they part.

Kernels of one format share a colour, since rounding makes the same of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fa3verify.models.divergence import LogprobsRun
from fa3verify.models.logprobs import attention_of, format_of
from fa3verify.models.measured import Explained
from fa3verify.report.build import environment, stylesheet
from fa3verify.report.svg import GRID, MUTED, SERIES, new_figure, render, styled

_LEAST = 1e-6  # nats: what is predicted below it drowns in the model's own binary32
_STRETCH = 16  # tokens of a text that are drawn as one
_Z = np.linspace(-6, 6, 49)


def page(found: LogprobsRun | Explained, model: str = "") -> str:
    """Return the page as HTML that refers to nothing outside itself.

    Parameters
    ----------
    found : LogprobsRun or Explained
        Kernels, or the difference of programs that ran elsewhere, with a panel of mistakes that may explain it.
    model : str
        Where the model is that it was explained with.
    """
    kernels = found.kernels if isinstance(found, LogprobsRun) else ()
    formats = {kernel.name: format_of(attention_of(kernel.name)) for kernel in kernels}
    colours = dict(zip(dict.fromkeys(formats.values()), SERIES, strict=False))
    lines = [(kernel, {"color": colours[formats[kernel.name]]}) for kernel in kernels]
    known = [(kernel, line) for kernel, line in lines if kernel.predicted > _LEAST]
    first = {formats[kernel.name]: (kernel, line) for kernel, line in known[::-1]}
    depth = range(max((len(kernel.shares("layer")) for kernel, _ in first.values()), default=0))
    panels = {
        "Measured over predicted RMS; the band is 0.8 to 1.25": (
            [
                mark
                for kernel, line in known[::-1]
                for mark in (
                    ("axvspan", (0.8, 1.25), {"color": GRID}),
                    ("plot", ([kernel.found.rms / kernel.predicted], [kernel.name], "o"), line),
                )
            ],
            {"xlabel": "measured / predicted"},
        ),
        "RMS that each layer adds, as predicted": (
            [
                ("plot", ([*layers], [kernel.predicted * layers[x] ** 0.5 for x in layers]), line)
                for kernel, line in first.values()
                for layers in [dict(sorted(kernel.shares("layer").items()))]
            ],
            {"xlabel": "layer", "ylabel": "nats", "yscale": "log", "xticks": depth[:: 1 + len(depth) // 10]},
        ),
        f"RMS by position in a text, of {_STRETCH} tokens at a time": (
            [("plot", _by_position(kernel.differences), line) for kernel, line in lines],
            {"xlabel": "position", "ylabel": "nats", "yscale": "log"},
        ),
        "Differences in deviations of their token; dashed: the normal distribution": (
            [
                mark
                for kernel, line in known
                if kernel.deviations
                for z in [np.concatenate(kernel.differences) / np.concatenate(kernel.deviations)]
                for mark in (
                    ("stairs", np.histogram(z.clip(_Z[0], _Z[-1]), _Z, density=True), line),
                    ("plot", (_Z, np.exp(-(_Z**2) / 2) / np.sqrt(2 * np.pi), "--"), {"color": MUTED}),
                )
            ],
            {"xlabel": "deviations", "ylabel": "density"},
        ),
    }
    return (
        environment(autoescape=True)
        .get_template("logprobs.html.j2")
        .render(
            found=found,
            formats={name: [kernel for kernel in formats if formats[kernel] == name] for name in colours},
            budget={name: kernel for name, (kernel, _) in first.items()},
            panels=[
                (title, _drawn(f"p{i}", title, *each)) for i, (title, each) in enumerate(panels.items()) if each[0]
            ],
            kernels=kernels,
            model=model,
            mistakes=[]
            if isinstance(found, LogprobsRun)
            else sorted(((str(each), each.z) for each in found.suspects), key=lambda each: -abs(each[1])),
            least=_LEAST,
            css=stylesheet(),
        )
    )


def _drawn(name: str, title: str, marks: Iterable[tuple[str, Iterable[Any], Any]], axes: Mapping[str, Any]) -> str:
    """Draw with the named methods of matplotlib's axes and their arguments."""
    with styled():
        figure = new_figure(width=5.2, height=3.2)
        ax = figure.subplots()
        for method, given, how in marks:
            getattr(ax, method)(*given, **how)
        ax.set(**axes)
        return render(figure, name, title)


def _by_position(differences: Sequence[np.ndarray]) -> Iterable[Any]:
    at = np.concatenate([np.arange(len(each)) for each in differences]) // _STRETCH
    squares = np.bincount(at, np.concatenate(differences) ** 2)
    return np.arange(len(squares)) * _STRETCH, np.sqrt(squares / np.bincount(at))
