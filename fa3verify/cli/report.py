"""Verb report: pages again, from their data, and what moved between two sets of data."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from fa3verify.cli.exits import EPILOG, one_line_errors

_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(epilog=EPILOG)
@click.argument("data", type=_FILE, nargs=-1)
@click.option("--out", type=_FOLDER, help="[default: out, or where the data of --device and --claims are]")
@click.option("--against", type=_FILE, metavar="OLD", help="Show what moved against an older run.nc or atlas.json.")
@click.option("--device", type=_FOLDER, metavar="DIR", help="The page of a device from its folder, as reports/h200.")
@click.option("--claims", type=_FILE, metavar="FILE", help="The page of papers' claims, from reports/claims.toml.")
def report(
    data: tuple[Path, ...], out: Path | None, against: Path | None, device: Path | None, claims: Path | None
) -> None:
    """Build pages again from DATA: a run.nc that verify wrote, or atlases that atlas wrote, as one page.

    Beside atlases a page takes the table.json of compare, the curves.csv of hunt, and reports/findings/known.json.
    """
    with one_line_errors():
        if bool(data) + (device is not None) + (claims is not None) != 1:
            raise ValueError("name one of DATA, a --device and --claims")
        if against and not data:
            raise ValueError("--against is of DATA")
        click.echo(_of_data(data, out or Path("out"), against) if data else _published(out, device, claims))


def _of_data(data: tuple[Path, ...], out: Path, against: Path | None) -> str:
    from fa3verify.campaign import verify
    from fa3verify.report import atlas_page, build, moved

    runs = [path for path in data if path.suffix == ".nc"]
    if runs and len(data) > 1:
        raise ValueError("a page is of one run.nc, or of atlases")
    verify.prepare_output(out)
    if against is not None:
        page, count = moved.write_pages(out, data, against)
        return f"{count} moved: {page}"
    return str(build.rebuild(runs[0], out) if runs else atlas_page.write_pages(out, data))


def _published(out: Path | None, device: Path | None, claims: Path | None) -> str:
    if device:
        from fa3verify.report.device import page

        return str(page.write(device, out))
    from fa3verify.report import claims as said

    assert claims is not None
    return str(said.write(claims, out))
