"""The former place of `spark_session`, which is in `penstock.pipeline.run` now."""

import warnings

from penstock.pipeline.run.spark import MissingSpark, spark_session

__all__ = ["MissingSpark", "spark_session"]

warnings.warn(
    "penstock.pipeline.session goes with the next release: import from penstock.pipeline.run",
    DeprecationWarning,
    stacklevel=2,
)
