"""The outbox: a durable queue of one receiver, in classes of priority."""

from penstock.dispatch.outbox.books import OutboxBooks
from penstock.dispatch.outbox.common_log import CommonLog, FirstMessages
from penstock.dispatch.outbox.outbox import Appended, Order, Outbox
from penstock.dispatch.outbox.records import Columns, Entry, Item
from penstock.dispatch.outbox.settled import Reason

__all__ = [
    "Appended",
    "Columns",
    "CommonLog",
    "Entry",
    "FirstMessages",
    "Item",
    "Order",
    "Outbox",
    "OutboxBooks",
    "Reason",
]
