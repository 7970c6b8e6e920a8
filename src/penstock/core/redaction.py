"""How is a value shown to people without its secrets?

Errors, plans, drawings, descriptions and logs of the command pass through here. A password before
the host of a URL, whatever its scheme, and the value of an option that is called a password,
secret or token become `…`. What a configuration takes from the environment is shown as it is
written there: `${NAME}`.
"""

from __future__ import annotations

import logging
import re
from itertools import pairwise
from typing import Any, Final
from urllib.parse import unquote

__all__ = ["Redacted", "as_written", "is_secret", "remember", "shown", "shown_data"]

_HIDDEN: Final = "…"

#: Words of a name whose value is for nobody to read; with `key` behind it, those of the second.
_WORDS: Final = frozenset(
    {"auth", "authorization", "credential", "credentials", "pass", "passphrase", "pw", "pwd", "sig"}
)
_KEYS: Final = frozenset({"access", "account", "api", "private", "shared"})
_PARTS: Final = re.compile(r"passwd|password|secret|signature|token|apikey", re.IGNORECASE)
_FILES: Final = re.compile(r"file|path|dir", re.IGNORECASE)
_WORD: Final = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")

#: Who asks, before the host: by RFC 3986, and as people write it who do not quote a slash. The
#: lengths are bounded, so that no text takes long.
_USER: Final = re.compile(
    r"(://)(?:[^/?#\s]{0,2048}@|(?![^/?#\s@:]*:\d*(?:[/?#\s]|$))[^/?#\s@:]*:[^\s?]{0,2048}@)"
    r"|(?<![\w:.+-])([a-z][\w+.-]*:)(?!/)[^/?#\s@:]{1,2048}:[^/?#\s@]{1,2048}@"
)
#: `name=value`, up to the next option, or the quote that an error puts around it.
_OPTION: Final = re.compile(
    r"(?<![\w.-])([\w.-]+)=(?:\$\{\w+\}|'[^']*'|\"[^\"]*\"|[^&\s]+?(?=['\")\]},;:]*(?:[&\s]|$)))"
)

#: A value that is shorter may stand in any text.
_SHORTEST: Final = 4
_MOST_VALUES: Final = 1_000

#: What configurations took from the environment: secrets, which are shown nowhere, and what else
#: is in their texts, and these as a whole.
_secrets: dict[str, str] = {}
_texts: dict[str, str] = {}


def is_secret(name: str) -> bool:
    """Tell by its name whether a value is for nobody to read."""
    words = [word.lower() for word in _WORD.findall(name)]
    if words and _FILES.fullmatch(words[-1]):
        return False
    pairs = pairwise(words)
    return (
        _PARTS.search(name) is not None
        or not _WORDS.isdisjoint(words)
        or any(first in _KEYS and second == "key" for first, second in pairs)
    )


def remember(written: str, variables: dict[str, str], text: str) -> None:
    """Keep what a configuration has in place of the variables of a text."""
    for name, value in variables.items():
        if value:
            is_for_nobody = is_secret(name) or name.upper().endswith("KEY")
            _keep(_secrets if is_for_nobody else _texts, value, f"${{{name}}}")
    if text and variables:
        _keep(_texts, text, written)


def shown(text: str) -> str:
    """Return a text without the secrets in it."""
    for value, name in list(_secrets.items()):
        if value in text:
            text = _replaced(text, value, name)
    if "@" in text:
        text = _USER.sub(lambda found: f"{found[1] or found[2]}{_HIDDEN}@", text)
    if "=" in text:
        text = _OPTION.sub(_without_value, text)
    return text


def as_written(text: str) -> str:
    """Return a text of a configuration, with the names of variables instead of their values."""
    longest_first = sorted(_texts.items(), key=lambda item: -len(item[0]))
    for value, written in longest_first:
        if value == text or (len(value) > _SHORTEST and value in text):
            text = text.replace(value, written)
    return shown(text)


def shown_data(data: Any) -> Any:
    """Return the values of a configuration without the secrets among them."""
    if isinstance(data, dict):
        return {
            key: _HIDDEN if is_secret(str(key)) and _is_value(value) else shown_data(value)
            for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [shown_data(each) for each in data]
    return as_written(data) if isinstance(data, str) else data


class Redacted(logging.Filter):
    """Lets a handler write every line without the secrets in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if (safe := shown(said)) != said:
            record.msg, record.args = safe, None
        return True


def _is_value(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _without_value(found: re.Match[str]) -> str:
    if found[0].startswith(f"{found[1]}=${{") or not is_secret(found[1]):
        return found[0]
    return f"{found[1]}={_HIDDEN}"


def _replaced(text: str, value: str, name: str) -> str:
    if len(value) >= _SHORTEST:
        return text.replace(value, name)
    return re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", lambda _: name, text)


def _keep(kept: dict[str, str], value: str, shown_as: str) -> None:
    # Also as an error quotes it, and as it is taken out of a URL.
    for form in (value, repr(value)[1:-1], unquote(value)):
        kept.pop(form, None)
        kept[form] = shown_as
    while len(kept) > _MOST_VALUES:
        del kept[next(iter(kept))]
