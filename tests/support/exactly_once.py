"""Did every message of a stream get through Spark exactly once, and unharmed?"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow.dataset as ds

from penstock import open_reader, open_writer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame

__all__ = [
    "check_nothing_left",
    "check_pipeline",
    "check_stream",
    "hashed",
    "messages",
    "write_messages",
    "write_pipeline",
]

#: Bytes of a payload: its number, then what only that number has.
_SIZE: Final = 100
_BLOCK: Final = 10_000
_SHA256: Final = 32
#: What becomes of a message: the number that the source gave it, a hash, and the payload.
_RESULT: Final = np.dtype([("seq", "<i8"), ("sha256", f"V{_SHA256}"), ("payload", f"V{_SIZE}")])


#: Two logs and a directory of files from one stage: batch by batch, to each of them.
_PIPELINE: Final = """
pipeline: numbers
sources:
  numbers: {{url: "log:{folder}/in", maxOffsetsPerTrigger: {per_batch}, minPartitions: 2}}
stages:
  results: {{from: numbers, use: "support.exactly_once:hashed"}}
  odd: {{from: results, sql: "select * from results where seq % 2 = 1"}}
sinks:
  all_of_them: {{from: results, url: "log:{folder}/all"}}
  half_of_them: {{from: odd, url: "log:{folder}/odd"}}
  files: {{from: results, parquet: "{folder}/files"}}
settings:
  spark:
    spark.driver.host: "127.0.0.1"
    spark.executor.memory: "512m"
    spark.sql.shuffle.partitions: "2"
"""


def messages(numbers: range) -> NDArray[np.void]:
    """Return payloads, each of which can be told from its number."""
    made = [_block(i) for i in range(numbers.start // _BLOCK, -(-numbers.stop // _BLOCK))]
    first = numbers.start // _BLOCK * _BLOCK
    return np.concatenate(made)[numbers.start - first : numbers.stop - first]


def _block(index: int) -> NDArray[np.void]:
    payloads = np.random.default_rng(index).integers(0, 256, (_BLOCK, _SIZE), np.uint8)
    numbers = np.arange(index * _BLOCK, (index + 1) * _BLOCK, dtype="<i8")
    payloads[:, :8] = numbers.view(np.uint8).reshape(_BLOCK, 8)
    return payloads.view(f"V{_SIZE}").reshape(_BLOCK)


def write_messages(url: str, numbers: range) -> None:
    """Append the messages of these numbers."""
    with open_writer(url) as writer:
        for start in range(numbers.start, numbers.stop, _BLOCK):
            some = messages(range(start, min(start + _BLOCK, numbers.stop)))
            writer.write_many([payload.tobytes() for payload in some])


def hashed(frame: DataFrame) -> DataFrame:
    """Do what the stage of these pipelines does."""
    return frame.mapInArrow(_hash, "seq BIGINT, sha256 BINARY, payload BINARY")


def _hash(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        numbers = batch.column("seq")
        payloads = batch.column("payload").to_pylist()
        hashes = [hashlib.sha256(payload).digest() for payload in payloads]
        rows = zip(numbers.to_pylist(), hashes, payloads, strict=True)
        results = [number.to_bytes(8, "little") + hash_ + p for number, hash_, p in rows]
        columns = {"seq": numbers, "sha256": pa.array(hashes), "payload": pa.array(results)}
        yield pa.RecordBatch.from_pydict(columns)


def check_stream(url: str, expected: range) -> None:
    """Make sure that the results of these messages are in a stream, each once."""
    found: list[bytes] = []
    with open_reader(url) as reader:
        while (batch := reader.read_batch(_BLOCK, timeout=0)).num_rows:
            found += batch.column("payload").to_pylist()
    assert {len(payload) for payload in found} <= {_RESULT.itemsize}
    results = np.frombuffer(b"".join(found), _RESULT)
    _check_numbers(url, results["seq"], expected)
    _check_hashes(results["seq"], (value.tobytes() for value in results["sha256"]))
    in_order = results[np.argsort(results["seq"])]
    wanted = messages(range(expected.stop))[expected.start :: expected.step]
    assert in_order["payload"].tobytes() == wanted.tobytes()


def write_pipeline(folder: Path, numbers: range, per_batch: int) -> Path:
    """Write a pipeline to a file, and messages to what it reads."""
    write_messages(f"log:{folder}/in", numbers)
    file = folder / "numbers.yaml"
    file.write_text(_PIPELINE.format(folder=folder, per_batch=per_batch))
    return file


def check_pipeline(folder: Path, expected: range) -> None:
    """Make sure that what the pipeline writes is there once: in its streams and in its files."""
    check_stream(f"log:{folder}/all", expected)
    check_stream(f"log:{folder}/odd", expected[1::2])
    _check_files(folder / "files", expected)
    check_nothing_left(folder)


def check_nothing_left(folder: Path) -> None:
    """Make sure that nobody has left behind what was staged."""
    hidden = (*folder.rglob(".penstock-staging/**/*"), *folder.rglob("_penstock/**/*.parquet"))
    assert not [path for path in hidden if path.is_file()]


def _check_files(folder: Path, expected: range) -> None:
    """Look at the Parquet files that anybody finds in a directory."""
    rows = ds.dataset(folder, format="parquet").to_table(["seq", "sha256"])
    numbers = rows["seq"].to_numpy()
    _check_numbers(str(folder), numbers, expected)
    _check_hashes(numbers, rows["sha256"].to_pylist())


def _check_numbers(where: str, found: NDArray[np.int64], expected: range) -> None:
    wanted = np.arange(expected.start, expected.stop, expected.step)
    numbers, counts = np.unique(found, return_counts=True)
    missing = np.setdiff1d(wanted, numbers)
    strange = np.setdiff1d(numbers, wanted)
    twice = numbers[counts > 1]
    said = [
        f"{len(some)} {what} ({', '.join(map(str, some[:5]))} … {some[-1]})"
        for what, some in (("missing", missing), ("twice", twice), ("strange", strange))
        if len(some)
    ]
    assert not said, f"{where}: of {len(wanted)} messages {'; '.join(said)}"


def _check_hashes(numbers: NDArray[np.int64], hashes: Iterable[bytes]) -> None:
    payloads = messages(range(int(numbers.max(initial=-1)) + 1))
    for number, found in zip(numbers, hashes, strict=True):
        assert hashlib.sha256(payloads[number].tobytes()).digest() == found
