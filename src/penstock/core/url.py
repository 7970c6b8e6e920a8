"""What does an endpoint URL say?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.core.errors import InvalidURL

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["URL"]

_MAX_LENGTH = 8192


@dataclass(frozen=True, slots=True)
class URL:
    """An endpoint URL, taken apart: `scheme://host:port/path?option=value`."""

    #: As the person wrote it.
    text: str
    scheme: str
    host: str | None
    port: int | None
    #: Percent-decoded. `fmq:name` is relative to the current directory.
    path: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, options: Mapping[str, object] | None = None) -> URL:
        """Take a URL apart; `options` given as keywords win over those in the text.

        :raises InvalidURL: it has no scheme, a bad port, a NUL byte, or an option given twice.
        """
        if len(text) > _MAX_LENGTH:
            raise InvalidURL(text[:60] + "…", f"it is longer than {_MAX_LENGTH} characters")
        scheme, colon, _ = text.partition(":")
        if not colon or not scheme or "/" in scheme:
            raise InvalidURL(text, "it has no scheme", hint=f"for a queue, write fmq:{text}")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise InvalidURL(text, str(error)) from None
        path = unquote(parts.path)
        if "\0" in path:
            raise InvalidURL(text, "the path has a NUL byte")
        found: dict[str, str] = {}
        for key, value in parse_qsl(parts.query, keep_blank_values=True):
            if key in found:
                raise InvalidURL(text, f"the option {key} is given twice")
            found[key] = value
        for key, given in (options or {}).items():
            if given is not None:
                found[key] = str(given).lower() if isinstance(given, bool) else str(given)
        return cls(text, parts.scheme, parts.hostname, port, path, found)

    def __str__(self) -> str:
        return self.text
