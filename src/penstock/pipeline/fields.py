"""What may stand in the fields of a pipeline's description?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, JsonValue

from penstock.core.endpoints import endpoint_of
from penstock.core.errors import InvalidOption, InvalidURL, PenstockError, UnknownScheme
from penstock.core.overflow import DropReason
from penstock.core.units import parse_size
from penstock.core.url import URL
from penstock.pipeline.timing import Trigger, parse_interval

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "PLACES",
    "Bytes",
    "Conf",
    "Decode",
    "Delay",
    "Function",
    "LogUrl",
    "Names",
    "Offsets",
    "SparkTrigger",
    "Text",
    "Url",
    "Urls",
    "Watermark",
    "function_name",
]

#: Kafka's numbers for places of which the number is not known.
PLACES = {"earliest": -2, "latest": -1}
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class _Wrong(PenstockError, ValueError):
    """The reason alone: the field and its line are said by whoever read the file."""


def function_name(use: str | Callable[..., Any]) -> str:
    """Return `module:function`, also for a function that was given as such."""
    if isinstance(use, str):
        return use
    name = getattr(use, "__qualname__", type(use).__qualname__)
    return f"{getattr(use, '__module__', '?')}:{name}"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Wrong("should be text")
    if not value.strip():
        raise _Wrong("should not be empty")
    return value


def _url(value: object) -> str:
    text = _text(value)
    try:
        endpoint_of(text)
    except UnknownScheme as error:
        scheme = f"{URL.parse(text).scheme}:"
        raise _Wrong(f"no endpoint answers to {scheme}", hint=error.hint) from None
    except InvalidURL as error:
        raise _Wrong(str(error), hint=error.hint) from None
    return text


def _log_url(value: object) -> str:
    text = _url(value)
    if endpoint_of(text).oldest_go_by is not DropReason.RETENTION:  # others overwrite them
        raise _Wrong("should be the URL of a log", hint="as in log:/path/name")
    return text


def _listed(value: object) -> object:
    """Let one stand for a list of one."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple):
        raise _Wrong("should be text, or a list of texts")
    if not value:
        raise _Wrong("should have at least one")
    return value


def _watermark(value: object) -> object:
    if isinstance(value, dict) and len(value) == 1:
        return value
    raise _Wrong("should be one column and a time", hint='as in {time: "10 seconds"}')


def _offsets(value: object) -> object:
    if isinstance(value, str) and value.strip().lower() in {"earliest", "latest"}:
        return value.strip().lower()
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, dict) and value:
        numbers = {url: PLACES.get(str(at).strip().lower(), at) for url, at in value.items()}
        if all(type(seq) is int for seq in numbers.values()):
            return numbers
    raise _Wrong("should be earliest, latest, a sequence number, or a mapping of one for each url")


def _function(value: object) -> object:
    if callable(value):
        return value
    if isinstance(value, str) and _FUNCTION.fullmatch(value):
        return value
    raise _Wrong("should be module:function", hint="the function takes a DataFrame and returns one")


def _decode(value: object) -> object:
    if isinstance(value, dict) and not isinstance(value.get("format"), str):
        raise _Wrong("needs the key format", hint="as in {format: json}")
    return value


def _conf(value: object) -> object:
    """Spark takes text only, and writes what is true as `true`."""
    if not isinstance(value, dict):
        return value
    return {
        key: str(setting).lower() if isinstance(setting, bool) else str(setting)
        for key, setting in value.items()
        if _is_plain(key, setting)
    }


def _is_plain(key: str, setting: object) -> bool:
    if isinstance(setting, str | int | float):
        return True
    raise _Wrong(f"{key} should be text, a number, true or false")


def _with_reason(parse: Callable[[Any], Any]) -> BeforeValidator:
    def parsed(value: object) -> object:
        try:
            return parse(value)
        except InvalidOption as error:
            raise _Wrong(error.reason, hint=error.hint) from None

    return BeforeValidator(parsed)


def _delay(value: object) -> float:
    return parse_interval(value)


#: Text that says something.
Text = Annotated[str, BeforeValidator(_text)]
#: The URL of an endpoint that is installed.
Url = Annotated[str, BeforeValidator(_url)]
#: The URL of a log.
LogUrl = Annotated[str, BeforeValidator(_log_url)]
#: One URL or several; a path may have wildcards.
Urls = Annotated[tuple[Url, ...], BeforeValidator(_listed)]
#: One name or several.
Names = Annotated[tuple[Text, ...], BeforeValidator(_listed)]
#: Where in the streams: `earliest`, `latest`, a sequence number, or one for each URL.
Offsets = Annotated[str | int | dict[str, int], BeforeValidator(_offsets)]
#: `module:function`, or in Python the function.
Function = Annotated[Any, BeforeValidator(_function)]
#: How payloads become columns; what else it has is for the format to say.
Decode = Annotated[dict[str, JsonValue], BeforeValidator(_decode)]
#: Options that Spark gets as text.
Conf = Annotated[dict[str, str], BeforeValidator(_conf)]
#: Bytes, as `64k` or `10M`.
Bytes = Annotated[int, _with_reason(parse_size), Field(ge=1)]
#: Seconds, as `10 seconds` or `10s`.
Delay = Annotated[float, _with_reason(_delay)]
#: One column and how late its rows may be.
Watermark = Annotated[dict[str, Delay], BeforeValidator(_watermark)]
#: `available now`, or an interval.
SparkTrigger = Annotated[Trigger, _with_reason(Trigger.parse)]
