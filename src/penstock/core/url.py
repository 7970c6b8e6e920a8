"""What does an endpoint URL say?"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.core.errors import InvalidURL
from penstock.core.redaction import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["URL", "escaped", "is_loopback"]

_MAX_LENGTH = 8192

#: RFC 3986, 3.1.
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE | re.ASCII)
#: Characters that `urlsplit` drops silently.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_WILD = frozenset("*[")


@dataclass(frozen=True, slots=True, repr=False)
class URL:
    """A parsed endpoint URL: `scheme://host:port/path?option=value`.

    Only `%` and `?` have a meaning in a path, and only `%`, `&` and `=` in the options: `#` and
    `+` stand for themselves, as in file names, times and topics.
    """

    #: As the user wrote it.
    text: str
    scheme: str
    host: str | None
    port: int | None
    #: Percent-decoded; bytes that are not UTF-8 as `os.fsdecode` gives them. `fmq:name` is
    #: relative to the current directory.
    path: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, options: Mapping[str, object] | None = None) -> URL:
        """Parse a URL; `options` given as keywords win over those in the text.

        :raises InvalidURL: it has no scheme, a bad port, a control character, or an option given
            twice.
        """
        text = text.strip()
        if len(text) > _MAX_LENGTH:
            raise InvalidURL(text[:60] + "…", f"it is longer than {_MAX_LENGTH} characters")
        if _CONTROL.search(text):
            raise InvalidURL(text, "it has a control character")
        if not _SCHEME.match(text):
            raise InvalidURL(
                text,
                "it has no scheme",
                hint=f"for a queue, write fmq:{text}, for a log log:{text}",
            )
        try:
            parts = urlsplit(text, allow_fragments=False)
            port = parts.port
        except ValueError as error:
            raise InvalidURL(text, str(error)) from None
        path = unquote(parts.path, errors="surrogateescape")
        if "\0" in path:
            raise InvalidURL(text, "the path has a NUL byte")
        found = _options(text, parts.query)
        for key, given in (options or {}).items():
            if given is not None:
                found[key] = str(given).lower() if isinstance(given, bool) else str(given)
        return cls(text, parts.scheme, parts.hostname, port, path, found)

    @property
    def has_wildcards(self) -> bool:
        """Whether the path may match many names. A `?` starts the options, so it is no wildcard."""
        return not _WILD.isdisjoint(urlsplit(self.text, allow_fragments=False).path)

    def with_path(self, path: str) -> str:
        """Return the text of this URL with another path."""
        head, mark, options = self.text.partition("?")
        server = "" if self.host is None else f"//{urlsplit(head, allow_fragments=False).netloc}"
        return f"{self.scheme}:{server}{escaped(path)}{mark}{options}"

    def __str__(self) -> str:
        """Return the URL with its secrets redacted."""
        return shown(self.text)

    def __repr__(self) -> str:
        return f"URL({str(self)!r})"


def escaped(path: str) -> str:
    """Escape a path for a URL."""
    return path.replace("%", "%25").replace("?", "%3F")


def _options(text: str, query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    # A plus sign is a space in the forms of web pages only.
    plain = query.replace("+", "%2B")
    for key, value in parse_qsl(plain, keep_blank_values=True, errors="surrogateescape"):
        if key in found:
            raise InvalidURL(text, f"the option {key} is given twice")
        if "\0" in value:
            raise InvalidURL(text, f"the option {key} has a NUL byte")
        found[key] = value
    return found


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine's own; of names only `localhost` is."""
    host = host.strip("[]").partition("%")[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
