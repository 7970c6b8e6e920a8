"""Who may publish, notify, call and subscribe? (spec uprotocol 10.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.protocols.uprotocol import UMessageType, UUri

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.protocols.uprotocol import UAttributes

__all__ = ["Access", "Action", "Rule"]

Action = Literal["publish", "notify", "call", "subscribe"]

_ACTIONS: dict[int, Action] = {
    UMessageType.PUBLISH: "publish",
    UMessageType.NOTIFICATION: "notify",
    UMessageType.REQUEST: "call",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Something that is allowed."""

    allow: Action
    source: UUri = UUri.ANY
    #: To whom; for `subscribe`, the topic. A publish goes to nobody in particular.
    sink: UUri = UUri.ANY


class Access:
    """The list of what is allowed. An empty list allows everything."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self._rules = tuple(rules)

    def allows(self, attributes: UAttributes) -> bool:
        """Tell whether a message may pass, whose addresses name their authority."""
        source, sink = attributes.source, attributes.sink
        if not self._rules or source is None:
            return True
        action = _ACTIONS.get(attributes.type)
        if action is None and sink is not None:
            # Who may call may be answered; nobody else may send him responses.
            return self.may("call", sink, source)
        if action is None:
            return False
        return self.may(action, source, None if action == "publish" else sink)

    def may(self, action: Action, source: UUri, sink: UUri | None = None) -> bool:
        """Tell whether a rule allows it."""
        return not self._rules or any(
            rule.allow == action
            and rule.source.matches(source)
            and (sink is None or rule.sink.matches(sink))
            for rule in self._rules
        )
