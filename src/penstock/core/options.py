"""How are the options of a URL checked?"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from penstock.core.errors import InvalidOption
from penstock.core.units import parse_duration, parse_patience, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.url import URL

__all__ = [
    "Directory",
    "Duration",
    "Options",
    "Patience",
    "Size",
    "nearest",
    "parse_options",
    "reason_of",
]


def _is_there(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"there is no directory {folder}")
    return folder


#: Bytes, written as `4096`, `64k`, `10M` or `1G`.
Size = Annotated[int, BeforeValidator(parse_size)]
#: Seconds, written as `5`, `5s`, `10ms` or `2m`.
Duration = Annotated[float, BeforeValidator(parse_duration)]
#: Seconds, or `true` for ever.
Patience = Annotated[float, BeforeValidator(parse_patience)]
#: An existing directory.
Directory = Annotated[Path, AfterValidator(_is_there)]


class Options(BaseModel):
    """Base of an endpoint's options: one field per option; unknown options are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a hint with the most similar known name, or with all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"{otherwise}: {', '.join(names) or 'none'}"


_AnyOptions = TypeVar("_AnyOptions", bound=Options)


def parse_options(url: URL, model: type[_AnyOptions]) -> _AnyOptions:
    """Check the options of a URL against those of its endpoint.

    :raises InvalidOption: an option is unknown or missing, or its value does not fit.
    """
    try:
        return model.model_validate(dict(url.options))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "options"
        known = sorted(model.model_fields)
        if first["type"] == "extra_forbidden":
            hint = nearest(name, known, "known options")
            raise InvalidOption(
                name, first["input"], f"{url.scheme}: has no such option", hint=hint
            ) from None
        if first["type"] == "missing":
            raise InvalidOption(name, None, f"{url.scheme}: needs this option") from None
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, InvalidOption):  # by a unit's parser, without the option's name
            raise InvalidOption(name, first["input"], cause.reason, hint=cause.hint) from None
        raise InvalidOption(
            name, first["input"], reason_of(first["type"], str(first["msg"]))
        ) from None


#: Our wording of pydantic's errors about values that people write.
_REASONS: Final = {
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
}


def reason_of(kind: str, said: str) -> str:
    """Return our wording of an error of pydantic's, by its type and its message."""
    plain = said.removeprefix("Value error, ").replace("Input should be", "must be", 1)
    return _REASONS.get(kind, plain)
