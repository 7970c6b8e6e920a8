"""Data pipelines on Spark: what they are, which queries they become, and how they look.

pipelines = load_pipelines("storm-watch.yaml")
for query in plan(pipelines).queries:
    print(query.name, query.kind, query.reason)
"""

from typing import TYPE_CHECKING

from penstock.core.late_names import late_names
from penstock.pipeline.spark_process import end_quietly

if TYPE_CHECKING:
    from penstock.pipeline.graph.description import load_pipelines, parse_pipelines
    from penstock.pipeline.graph.model import Pipeline, Settings, Sink, Source, Stage
    from penstock.pipeline.graph.plan import Plan, Query, plan

__all__ = [
    "Pipeline",
    "Plan",
    "Query",
    "Settings",
    "Sink",
    "Source",
    "Stage",
    "load_pipelines",
    "parse_pipelines",
    "plan",
]

# Spark's worker processes import this package for a source, and need no descriptions.
__getattr__ = late_names(__name__)

end_quietly()  # if this is a process of Spark's: some only load us, and hear no more
