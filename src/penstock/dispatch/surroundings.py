"""What do all outlets of a dispatcher share?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from penstock.core.clock import Clock
    from penstock.dispatch.books import Ledger
    from penstock.dispatch.delivering import Outlet
    from penstock.dispatch.giving_up import GivingUp
    from penstock.dispatch.policies import Policies
    from penstock.dispatch.routing import Routing
    from penstock.dispatch.settings import Limits, Retry
    from penstock.dispatch.switches import Switches

__all__ = ["Surroundings"]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all outlets of a dispatcher share."""

    routing: Routing
    policies: Policies
    switches: Switches
    retry: Retry
    limits: Limits
    giving_up: GivingUp
    ledger: Ledger
    clock: Clock
    rng: random.Random
    #: Told when an outlet has got a message that expires: milliseconds since 1970 UTC.
    expires: Callable[[Outlet, int], None]
    #: Told that an outlet has something to do.
    wake: Callable[[Outlet], None]
