"""Which options do several commands have: all servers, and all that draw a diagram?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from penstock.core.errors import StorageError
from penstock.core.options import Options, parse_options
from penstock.core.url import URL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.drawing import Diagram

__all__ = [
    "AllowShutdown",
    "Dot",
    "Host",
    "MaxClients",
    "MaxQueue",
    "Mermaid",
    "Png",
    "Quiet",
    "Svg",
    "checked_options",
    "write_diagram",
]

# --- servers ------------------------------------------------------------------------------------

Host = Annotated[str, typer.Option(help="The address to listen on.")]
MaxClients = Annotated[int, typer.Option(help="Clients served at the same time.")]
MaxQueue = Annotated[
    str, typer.Option(metavar="SIZE", help="The largest queue that a client may create.")
]
#: For servers of LROSE's protocols.
AllowShutdown = Annotated[
    bool, typer.Option("--allow-shutdown", help="Let any client stop the server, as LROSE's.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Log problems only.")]

_AnyOptions = TypeVar("_AnyOptions", bound=Options)


def checked_options(
    service: str, given: Mapping[str, object], model: type[_AnyOptions]
) -> _AnyOptions:
    """Check the options of `serve SERVICE`. None: not given.

    :raises InvalidOption: a value does not fit.
    """
    said = {name: str(value) for name, value in given.items() if value is not None}
    url = URL(f"{service} server", f"serve {service}", None, None, "", said)
    return parse_options(url, model)


# --- diagrams -----------------------------------------------------------------------------------

Svg = Annotated[
    Path | None,
    typer.Option("--svg", metavar="OUT", help="Draw it into an SVG file (with matplotlib)."),
]
Png = Annotated[
    Path | None,
    typer.Option("--png", metavar="OUT", help="Draw it into a PNG file (with matplotlib)."),
]
Dot = Annotated[bool, typer.Option("--dot", help="Print it for Graphviz.")]
Mermaid = Annotated[bool, typer.Option("--mermaid", help="Print it for Mermaid.")]


def write_diagram(
    diagram: Diagram[Any], *, svg: Path | None, png: Path | None, dot: bool, mermaid: bool
) -> bool:
    """Write a diagram to files and print it, as requested; tell whether it was printed.

    :raises Unsupported: matplotlib is not installed.
    :raises StorageError: a file cannot be written.
    """
    from penstock.core.drawing import draw, to_dot, to_mermaid  # noqa: PLC0415

    wanted: tuple[tuple[Path | None, Literal["svg", "png"]], ...] = ((svg, "svg"), (png, "png"))
    for path, kind in wanted:
        if path is not None:
            try:
                draw(diagram, path, kind)
            except OSError as error:
                raise StorageError("writing", str(path), error) from error
    for is_wanted, to_text in ((dot, to_dot), (mermaid, to_mermaid)):
        if is_wanted:
            typer.echo(to_text(diagram), nl=False)
    return dot or mermaid
