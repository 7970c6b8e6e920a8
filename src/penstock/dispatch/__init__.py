"""The dispatcher: every accepted message is delivered, or becomes a dead letter."""

from penstock.dispatch.access import Access, Rule, TokenRule, Tokens
from penstock.dispatch.books import Books, Counts
from penstock.dispatch.dead_letters import DeadLetters, Letter, dead_letter_topic
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.outlets import ReceiverInfo
from penstock.dispatch.routes import Receiver, Routes, Subscriber, Subscriptions
from penstock.dispatch.settings import Delivery, Limits, Policy, Rate, Retry
from penstock.dispatch.switches import Stop

__all__ = [
    "Access",
    "Books",
    "Counts",
    "DeadLetters",
    "Delivery",
    "Dispatcher",
    "Letter",
    "Limits",
    "Policy",
    "Rate",
    "Receiver",
    "ReceiverInfo",
    "Retry",
    "Routes",
    "Rule",
    "Stop",
    "Subscriber",
    "Subscriptions",
    "TokenRule",
    "Tokens",
    "dead_letter_topic",
]
