"""How does a test run a pipeline, from a queue of 100 messages through stages of its own?"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from penstock import open_writer
from penstock.pipeline import Pipeline, plan
from penstock.pipeline.run import Outcome, run

__all__ = ["STAGES", "base", "once", "stages", "write"]

STAGES = """
from pyspark.sql import functions as f


def numbered(frame):
    return frame.withColumn("n", f.col("seq").cast("int"))


def halves(frame, by=2):
    return frame.where(f.col("seq") % by == 0)


def twice(frame):
    return frame.groupBy("type").count()


def nothing(frame):
    return None


def raises(frame):
    raise ValueError("no dbz\\nin it")


def table(frame):
    return frame.sparkSession.range(3).selectExpr("cast(id as string) as payload")


def counted(frame):
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    class Count(StatefulProcessor):
        def init(self, handle):
            self.count = handle.getValueState("count", "n LONG")

        def handleInputRows(self, key, rows, timers):
            before = self.count.get()[0] if self.count.exists() else 0
            n = before + sum(map(len, rows))
            self.count.update((n,))
            yield pd.DataFrame({"kind": [key[0]], "n": [n]})

        def close(self):
            pass

    return frame.groupBy("type").transformWithStateInPandas(
        Count(), "kind INT, n LONG", "Update", "None"
    )


def broken(frame):
    def fail(batches):
        for batch in batches:
            raise KeyError("dbz")
            yield batch
    return frame.mapInArrow(fail, frame.schema)
"""


def stages(folder: Path) -> str:
    """Return the name of the module with the stages of a test."""
    return f"stages_{folder.name}"


def write(folder: Path, first: int, end: int) -> None:
    """Append messages of these numbers to the queue."""
    with open_writer(f"fmq:{folder}/a?slots=10000") as writer:
        writer.write_many([b"message %d" % i for i in range(first, end)], type=7)


def once(
    pipeline: Pipeline | list[Pipeline], spark: SparkSession, folder: Path, **more: object
) -> Outcome:
    """Run it until all that is there is through."""
    return run(
        plan(pipeline),
        spark=spark,
        once=True,
        checkpoint=str(folder / "checkpoints"),
        **more,  # type: ignore[arg-type]
    )


def base(folder: Path) -> Pipeline:
    """Return the pipeline `p` with the queue as its source `a`."""
    return Pipeline("p").source("a", url=f"fmq:{folder}/a")
