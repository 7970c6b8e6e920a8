"""Data pipelines on Spark: what they are, which queries they become, and how they look.

pipelines = load_pipelines("storm-watch.yaml")
for query in plan(pipelines).queries:
    print(query.name, query.kind, query.reason)
"""

from penstock.pipeline.model import Pipeline, Settings, Sink, Source, Stage
from penstock.pipeline.plan import Plan, Query, plan
from penstock.pipeline.reading import load_pipelines, parse_pipelines
from penstock.pipeline.task_process import end_quietly

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

end_quietly()  # if this is a process of Spark's: some only load us, and hear no more
