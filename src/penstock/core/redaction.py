"""How is a value shown to people without its secrets?

Errors, plans, drawings, descriptions and logs of the command pass through here. A password before
the host of a URL, whatever its scheme, and the value of an option that is called a password,
secret or token become `…`. Values that a configuration takes from the
environment are shown as `${NAME}`.
"""

from __future__ import annotations

import logging
import re
from itertools import pairwise
from typing import Any, Final
from urllib.parse import unquote

__all__ = ["Redacted", "as_written", "is_secret", "remember", "shown", "shown_data"]

_HIDDEN: Final = "…"

#: Words in the name of a secret; the second group only before `key`.
_WORDS: Final = frozenset(
    {"auth", "authorization", "credential", "credentials", "pass", "passphrase", "pw", "pwd", "sig"}
)
_KEYS: Final = frozenset({"access", "account", "api", "private", "shared"})
_PARTS: Final = re.compile(r"passwd|password|secret|signature|token|apikey", re.IGNORECASE)
_FILES: Final = re.compile(r"file|path|dir", re.IGNORECASE)
_WORD: Final = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")

#: The user info before the host: by RFC 3986, or with a slash that is not quoted. The lengths
#: are bounded, so that no text takes long.
_USER: Final = re.compile(
    r"(://)(?:[^/?#\s]{0,2048}@|(?![^/?#\s@:]*:\d*(?:[/?#\s]|$))[^/?#\s@:]*:[^\s?]{0,2048}@)"
    r"|(?<![\w:.+-])([a-z][\w+.-]*:)(?!/)[^/?#\s@:]{1,2048}:[^/?#\s@]{1,2048}@"
)
#: `name=value`, up to the next option, or the quote that an error puts around it.
_OPTION: Final = re.compile(
    r"(?<![\w.-])([\w.-]+)=(?:\$\{\w+\}|'[^']*'|\"[^\"]*\"|[^&\s]+?(?=['\")\]},;:]*(?:[&\s]|$)))"
)

#: A shorter value may occur in any text by chance.
_SHORTEST: Final = 4
_MOST_VALUES: Final = 1_000

#: Values that configurations took from the environment: secrets, which are always redacted; other
#: values; and the texts that contain them.
_secrets: dict[str, str] = {}
_texts: dict[str, str] = {}


def is_secret(name: str) -> bool:
    """Tell by its name whether a value is secret."""
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
    """Remember the values that a configuration took from the environment."""
    for name, value in variables.items():
        if value:
            is_for_nobody = is_secret(name) or name.upper().endswith("KEY")
            _keep(_secrets if is_for_nobody else _texts, value, f"${{{name}}}")
    if text and variables:
        _keep(_texts, text, written)


def shown(text: str) -> str:
    """Return a text with its secrets redacted."""
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
    """Return the values of a configuration with secrets redacted."""
    if isinstance(data, dict):
        return {
            key: _HIDDEN if is_secret(str(key)) and _is_value(value) else shown_data(value)
            for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [shown_data(each) for each in data]
    return as_written(data) if isinstance(data, str) else data


class Redacted(logging.Filter):
    """Redacts the secrets in every line of a log handler, and in tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if (safe := shown(said)) != said:
            record.msg, record.args = safe, None
        if record.exc_info and not record.exc_text:  # a formatter uses this text, if there is one
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = shown(record.exc_text)
        if record.stack_info:
            record.stack_info = shown(record.stack_info)
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
    # Also as `repr` quotes it, and unquoted from a URL.
    for form in (value, repr(value)[1:-1], unquote(value)):
        kept.pop(form, None)
        kept[form] = shown_as
    while len(kept) > _MOST_VALUES:
        del kept[next(iter(kept))]
