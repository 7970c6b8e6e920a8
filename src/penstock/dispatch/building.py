"""Where is `build`? In `penstock.dispatch.bus`: this name is removed in the next release."""

from __future__ import annotations

import warnings
from typing import Any

from penstock.dispatch import bus


def __getattr__(name: str) -> Any:
    if name not in ("Bus", "build", "check"):
        raise AttributeError(name)
    warnings.warn(
        f"penstock.dispatch.building.{name} is penstock.dispatch.bus.{name} now",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(bus, name)
