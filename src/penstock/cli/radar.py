"""The commands for radar files: `radar plot` and `radar finish`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import note
from penstock.core.endpoints import open_writer

__all__ = ["add_to"]

_app = typer.Typer(no_args_is_help=True, help="Look at files of volumes and grids.")


def add_to(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.add_typer(_app, name="radar", rich_help_panel="Files")


@_app.command()
def plot(
    place: Annotated[
        str,
        typer.Argument(
            metavar="FILE|URL",
            help="A file, or cfradial:DIR, cfgrid:DIR or latest:DIR for the newest one there.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture: .png, .svg, .pdf.")] = Path(
        "radar.png"
    ),
    field: Annotated[
        list[str] | None,
        typer.Option(help="Which field, by default DBZ; give it several times for several."),
    ] = None,
    sweep: Annotated[
        list[int] | None, typer.Option(help="Which sweep; give it several times for several.")
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(help="Height in a grid, km; by default the largest value of each column."),
    ] = None,
    min_snr: Annotated[
        float | None,
        typer.Option(help="Leave out gates of a volume whose SNR is below so many dB."),
    ] = None,
    colourblind: Annotated[
        bool, typer.Option("--colorblind", help="Colours that everybody can tell apart.")
    ] = False,
) -> None:
    """Paint a volume (PPI or RHI) or a grid."""
    from penstock.radar import pictures  # noqa: PLC0415 - it needs an extra

    path = pictures.file_of(place)
    words = pictures.plot(
        path,
        out,
        field=field or (),
        sweeps=sweep or (),
        level=level,
        min_snr=min_snr,
        colourblind=colourblind,
    )
    sys.stdout.write(f"{out}: {words}\n")


@_app.command()
def finish(
    url: Annotated[str, typer.Argument(metavar="URL", help="cfradial:DIR or cfgrid:DIR.")],
) -> None:
    """Write volumes that are still open, as after the last run of a pipeline."""
    open_writer(url, close="write").close()
    note(f"{url}: no volume is open")
