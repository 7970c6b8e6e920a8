"""Who may publish, notify, call and subscribe, and does a token prove who it is?"""

from __future__ import annotations

import hmac
import importlib
import logging
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from penstock.core.errors import InvalidOption
from penstock.protocols.uprotocol import UMessageType, UUri

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.protocols.uprotocol import UAttributes

__all__ = ["Access", "Action", "Rule", "TokenRule", "Tokens", "load_check"]

log = logging.getLogger(__name__)

Action = Literal["publish", "notify", "call", "subscribe"]

_ACTIONS: dict[int, Action] = {
    UMessageType.PUBLISH: "publish",
    UMessageType.NOTIFICATION: "notify",
    UMessageType.REQUEST: "call",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A permission."""

    allow: Action
    source: UUri = UUri.ANY
    #: The receiver; for `subscribe`, the topic. A publish has no receiver.
    sink: UUri = UUri.ANY


class Access:
    """The list of permissions. An empty list allows everything."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self._rules = tuple(rules)

    def allows(self, attributes: UAttributes) -> bool:
        """Tell whether a message is allowed; its addresses must name their authority."""
        source, sink = attributes.source, attributes.sink
        if not self._rules or source is None:
            return True
        action = _ACTIONS.get(attributes.type)
        if action is None and sink is not None:
            # A permitted call implies its response; no other response is allowed.
            return self.may("call", sink, source)
        if action is None:
            return False
        return self.may(action, source, None if action == "publish" else sink)

    def may(self, action: Action, source: UUri, sink: UUri | None = None) -> bool:
        """Tell whether a rule allows an action."""
        return not self._rules or any(
            rule.allow == action
            and rule.source.matches(source)
            and (sink is None or rule.sink.matches(sink))
            for rule in self._rules
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRule:
    """The tokens that requests of some sources must carry one of."""

    source: UUri = UUri.ANY
    #: SHA-256 of accepted tokens, in hexadecimal: no file has a token itself.
    sha256: frozenset[str] = frozenset()
    #: A function of the token and the source that accepts further tokens.
    check: Callable[[str, UUri], bool] | None = None


class Tokens:
    """The token rules. A request whose source matches no rule needs no token."""

    def __init__(self, rules: Iterable[TokenRule] = ()) -> None:
        self._rules = tuple(rules)

    def refuses(self, attributes: UAttributes) -> str | None:
        """Return why the token of a request, with resolved addresses, is rejected, or None."""
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
    # A string from outside may not be encodable in UTF-8; then it is no valid token.
    found = sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
    if any([hmac.compare_digest(found, known) for known in rule.sha256]):  # noqa: C419 - always all
        return True
    if rule.check is None:
        return False
    try:
        return rule.check(token, source) is True
    except Exception as error:  # noqa: BLE001 - whatever it is, it has not accepted the token
        # Log neither its text nor its traceback: they may contain the token.
        log.warning("the check of tokens failed for %s: %s", source, type(error).__name__)
        return False


def load_check(name: str) -> Callable[[str, UUri], bool]:
    """Import the function named `module:function`.

    :raises InvalidOption: no such function exists.
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
