"""The former place of `run` and what it returns, which are in `penstock.pipeline.run` now."""

import warnings

from penstock.pipeline.run import SHOWN, NotStarted, Outcome, Progress, QueryFailed, run

__all__ = ["SHOWN", "NotStarted", "Outcome", "Progress", "QueryFailed", "run"]

warnings.warn(
    "penstock.pipeline.running goes with the next release: import from penstock.pipeline.run",
    DeprecationWarning,
    stacklevel=2,
)
