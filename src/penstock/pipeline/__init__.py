"""Data pipelines on Spark: what they are, which queries they become, and how they look.

pipelines = load_pipelines("storm-watch.yaml")
for query in plan(pipelines).queries:
    print(query.name, query.kind, query.reason)
"""

from penstock.pipeline.model import Pipeline, Settings, Sink, Source, Stage
from penstock.pipeline.plan import Plan, Query, plan
from penstock.pipeline.reading import load_pipelines, parse_pipelines

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
