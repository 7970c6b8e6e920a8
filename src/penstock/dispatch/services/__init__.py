"""The services inside a dispatcher: uSubscription, uDiscovery and uTwin."""

from penstock.dispatch.services.discovery import KnownTopic, UDiscovery
from penstock.dispatch.services.leg import ServicesLeg
from penstock.dispatch.services.subscriptions import Subscription, SubscriptionTable
from penstock.dispatch.services.twin import UTwin
from penstock.dispatch.services.usubscription import SubscriptionLimits, USubscription

__all__ = [
    "KnownTopic",
    "ServicesLeg",
    "Subscription",
    "SubscriptionLimits",
    "SubscriptionTable",
    "UDiscovery",
    "USubscription",
    "UTwin",
]
