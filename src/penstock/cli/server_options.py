"""What do all servers have on their command line?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from penstock.core.options import Options, parse_options
from penstock.core.url import URL

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AllowShutdown", "Host", "MaxClients", "MaxQueue", "Quiet", "checked_options"]

Host = Annotated[str, typer.Option(help="The address to listen on.")]
MaxClients = Annotated[int, typer.Option(help="Clients served at the same time.")]
MaxQueue = Annotated[
    str, typer.Option(metavar="SIZE", help="The largest queue that a client may create.")
]
#: Of those who speak LROSE's protocols.
AllowShutdown = Annotated[
    bool, typer.Option("--allow-shutdown", help="Let any client stop the server, as LROSE's.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Log problems only.")]

_AnyOptions = TypeVar("_AnyOptions", bound=Options)


def checked_options(
    service: str, given: Mapping[str, object], model: type[_AnyOptions]
) -> _AnyOptions:
    """Check the options of `serve SERVICE`. What is None was not given.

    :raises InvalidOption: a value does not fit.
    """
    said = {name: str(value) for name, value in given.items() if value is not None}
    url = URL(f"{service} server", f"serve {service}", None, None, "", said)
    return parse_options(url, model)
