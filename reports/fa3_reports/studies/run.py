"""Run all studies on the cores here, and write their data and one page; the same command goes on where it stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import xarray as xr

from fa3_reports.studies import STUDIES, accumulator_loss
from fa3_reports.studies.study import Study
from fa3verify import __version__
from fa3verify.campaign.pool import AN_HOUR_S, processes
from fa3verify.campaign.profiles import ProfileName
from fa3verify.campaign.tasks import CallTask, Outcome, execute, journal_stamp, source_stamp
from fa3verify.files import replacing, write_text
from fa3verify.kernels import twins
from fa3verify.report import svg
from fa3verify.report.build import both_pages

PARTIAL = ".partial"
DATA = "studies.nc"
PAGE = "studies.html"
TEMPLATES = Path(__file__).with_name("templates")
LIMITS = (
    "The paper's table does not state its sequence length, number of heads or which operand carries the softmax scale; "
    "length 8192 is inferred from the figures.",
    "The paper's metric, RMSE from unrounded inputs, is nearly blind for FP16: most of it is input rounding. V of mean "
    "0 hides accumulator loss.",
    "Real activations come from two small pretrained models, at most 512 tokens; larger models are known to have "
    "stronger outliers.",
    "H200 figures are measurements of production kernels, quoted for comparison; they are not part of this run.",
)


def plan(profile: ProfileName, seed: int, kernels: Sequence[str] = ()) -> list[CallTask]:
    """Return the units of all studies, with the accumulator loss of these kernels beside that of our twins."""
    tasks = []
    for study in STUDIES:
        units = study.units(profile, seed)
        if study is accumulator_loss.STUDY:
            units = accumulator_loss.units(profile, seed, (*accumulator_loss.KERNELS, *kernels))
        for unit in units:
            durable = unit.get("kernel") not in kernels or twins.is_twin(unit["kernel"])
            tasks.append(CallTask(_label(study), study.measure, unit, durable=durable))
    return tasks


def _label(study: Study) -> str:
    return f"study: {study.name}"


def assembled(outcomes: Sequence[Outcome]) -> dict[Study, xr.Dataset]:
    """Return the data of every study that has any; a lost unit costs a NaN."""
    found = {}
    for study in STUDIES:
        results = [outcome.value for outcome in outcomes if outcome.task.label == _label(study) and not outcome.error]
        if results:
            found[study] = study.assemble(results)
    return found


def run(
    profile: ProfileName,
    seed: int,
    out: Path,
    kernels: Sequence[str] = (),
    *,
    workers: int = 0,
    progress: Callable[[str], None] = lambda label: None,
) -> list[str]:
    """Write ``studies.nc``, ``studies.html`` and ``studies.md`` below ``out``; return the errors of lost units.

    Parameters
    ----------
    profile : {"quick", "release", "soak"}
    seed : int
        Equal seeds give equal data, on however many processes.
    out : Path
    kernels : sequence of str
        FP8 forwards whose accumulator loss is measured beside that of our twins.
    workers : int
        Processes; 0 is one per core.
    progress : callable
        Gets the label of each unit that has ended.
    """
    journal = out / PARTIAL
    tasks = plan(profile, seed, kernels)
    with processes(workers, AN_HOUR_S) as executor:
        outcomes = execute(
            tasks,
            executor,
            journal=journal,
            stamp=journal_stamp() + source_stamp(["fa3_reports.studies"]),
            progress=lambda outcome: progress(outcome.task.label),
        )
    write(assembled(outcomes), out, f"Profile {profile}, seed {seed}, by fa3verify {__version__}.")
    shutil.rmtree(journal, ignore_errors=True)
    return [f"{outcome.task.label}: {outcome.error}" for outcome in outcomes if outcome.error]


def write(found: dict[Study, xr.Dataset], out: Path, effort: str) -> None:
    """Write the data and both pages."""
    with replacing(out / DATA) as temporary:
        xr.DataTree.from_dict({study.name: data for study, data in found.items()}).to_netcdf(
            temporary, engine="h5netcdf"
        )
    for name, text in render(found, effort).items():
        write_text(out / name, text)


def render(found: dict[Study, xr.Dataset], effort: str) -> dict[str, str]:
    """Return both pages by file name."""
    with svg.styled():
        drawn = {
            study.name: svg.render(study.draw(data), f"f-{study.name}", f"{study.title}. {study.reading}")
            for study, data in found.items()
        }
    shown = [
        {
            "name": study.name,
            "title": study.title,
            "reading": study.reading,
            "comment": data.attrs["comment"],
            "table": study.table(data) if study.table else None,
        }
        for study, data in found.items()
    ]
    context = {
        "version": __version__,
        "lede": f"Questions about the twins that are answered with data of our own. {effort} Every figure is drawn "
        f"from {DATA}; the caption names the group.",
        "studies": shown,
        "limits": LIMITS,
    }
    return both_pages("studies", context, folder=TEMPLATES, svg=drawn)
