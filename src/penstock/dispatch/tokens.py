"""Does a request prove by its token whose it is? (spec uprotocol 10.2, UNAUTHENTICATED)."""

from __future__ import annotations

import hmac
import importlib
import logging
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from penstock.core.errors import InvalidOption
from penstock.protocols.uprotocol import UMessageType, UUri

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.protocols.uprotocol import UAttributes

__all__ = ["TokenRule", "Tokens", "load_check"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRule:
    """What the requests of some sources have to bring with them: one of these tokens."""

    source: UUri = UUri.ANY
    #: Of tokens that are accepted: in hexadecimal digits, so that no file has the token itself.
    sha256: frozenset[str] = frozenset()
    #: Or one that this function accepts. It gets the token and the source.
    check: Callable[[str, UUri], bool] | None = None


class Tokens:
    """The rules for tokens. Requests of sources that no rule matches need none."""

    def __init__(self, rules: Iterable[TokenRule] = ()) -> None:
        self._rules = tuple(rules)

    def refuses(self, attributes: UAttributes) -> str | None:
        """Say why a request is not its source's; its addresses name their authority."""
        source = attributes.source
        if not self._rules or attributes.type != UMessageType.REQUEST or source is None:
            return None
        rules = [rule for rule in self._rules if rule.source.matches(source)]
        if not rules:
            return None
        token = attributes.token
        if not token:
            return f"requests of {source} need a token"
        if any(_accepts(rule, token, source) for rule in rules):
            return None
        return f"its token is none of {source}"


def _accepts(rule: TokenRule, token: str, source: UUri) -> bool:
    # A string from outside may hold what UTF-8 cannot: that is no token, and no reason to fail.
    found = sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
    if any([hmac.compare_digest(found, known) for known in rule.sha256]):  # noqa: C419 - always all
        return True
    if rule.check is None:
        return False
    try:
        return rule.check(token, source) is True
    except Exception as error:  # noqa: BLE001 - whatever it is, it has not accepted the token
        # Neither its text nor its trace: they may hold the token.
        log.warning("the check of tokens failed for %s: %s", source, type(error).__name__)
        return False


def load_check(name: str) -> Callable[[str, UUri], bool]:
    """Return the function that `module:function` names.

    :raises InvalidOption: there is none.
    """
    module_name, _, function_name = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in function_name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidOption("check", name, f"cannot be loaded: {error}") from error
    if not callable(found):
        raise InvalidOption("check", name, "is no function", hint="name one as module:function")
    checked: Callable[[str, UUri], bool] = found
    return checked
