"""The outbox: the durable queue of one receiver, with priority classes."""

from penstock.dispatch.outbox.log import (
    CLASSES,
    Columns,
    CommonLog,
    Entry,
    FirstMessages,
    Item,
    Part,
    in_order,
    key_of,
)
from penstock.dispatch.outbox.outbox import Appended, Order, Outbox, OutboxBooks
from penstock.dispatch.outbox.state import Reason

__all__ = [
    "CLASSES",
    "Appended",
    "Columns",
    "CommonLog",
    "Entry",
    "FirstMessages",
    "Item",
    "Order",
    "Outbox",
    "OutboxBooks",
    "Part",
    "Reason",
    "in_order",
    "key_of",
]
