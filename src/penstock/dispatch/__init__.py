"""The dispatcher: what is accepted is delivered, or is on the dead-letter topic."""

from penstock.dispatch.access import Access, Rule
from penstock.dispatch.books import Books, Counts
from penstock.dispatch.dead_letters import DeadLetters
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.letters import Letter, dead_letter_topic
from penstock.dispatch.outlets import ReceiverInfo
from penstock.dispatch.policies import Delivery, Policy
from penstock.dispatch.rates import Rate
from penstock.dispatch.receivers import Receiver
from penstock.dispatch.routing import Routes, Subscriber, Subscriptions
from penstock.dispatch.settings import Limits, Retry
from penstock.dispatch.switches import Stop
from penstock.dispatch.tokens import TokenRule, Tokens

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
