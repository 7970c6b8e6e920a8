from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.errors import NotFound, PenstockError
from penstock.pipeline.source.checkpoint import DamagedCheckpoint, check_whole


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Make one as Spark does, of three batches; the last is planned and not committed."""
    for name, numbers, content in (
        ("offsets", (0, 1, 2), 'v1\n{"batchWatermarkMs":0}\n{"a": {"seq": 7}}\n-'),
        ("commits", (0, 1), 'v1\n{"nextBatchWatermarkMs":0}'),
    ):
        (tmp_path / name).mkdir()
        for number in numbers:
            (tmp_path / name / str(number)).write_text(content, encoding="utf-8")
    (tmp_path / "metadata").write_text('{"id":"5b2c"}', encoding="utf-8")
    return tmp_path


def test_a_whole_checkpoint_is_taken_and_so_is_none(checkpoint: Path, tmp_path: Path) -> None:
    check_whole(str(checkpoint))
    check_whole(f"file:{checkpoint}")
    check_whole(str(tmp_path / "new"))
    check_whole("hdfs://far/away")


def cut(name: str, size: int) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:size])

    return harm


def remove(*names: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return harm


@pytest.mark.parametrize(
    ("harm", "kind", "said"),
    [
        (remove("metadata"), NotFound, "metadata"),
        (remove("offsets/2", "offsets/1"), NotFound, "commits of batch 1, offsets of batch 0"),
        (remove("offsets/0", "offsets/1", "offsets/2"), NotFound, "commits of batch 1, no offsets"),
        (cut("offsets/2", 0), DamagedCheckpoint, "offsets/2"),
        (cut("offsets/2", 3), DamagedCheckpoint, "cut off"),
        (cut("offsets/2", 40), DamagedCheckpoint, "line 2"),
        (cut("offsets/1", 30), DamagedCheckpoint, "offsets/1"),
        (cut("commits/1", 1), DamagedCheckpoint, "commits/1"),
        (cut("commits/1", 9), DamagedCheckpoint, "line 1"),
        (cut("metadata", 5), DamagedCheckpoint, "metadata"),
    ],
)
def test_what_a_checkpoint_has_lost_is_told_with_the_file_and_what_to_do(
    checkpoint: Path, harm: Callable[[Path], None], kind: type[PenstockError], said: str
) -> None:
    harm(checkpoint)
    with pytest.raises(kind, match=said) as caught:
        check_whole(str(checkpoint))
    assert caught.value.hint is not None


@pytest.mark.parametrize("harm", [remove("offsets/2"), remove("commits/1"), cut("offsets/0", 0)])
def test_what_spark_can_do_without_is_no_damage(
    checkpoint: Path, harm: Callable[[Path], None]
) -> None:
    harm(checkpoint)
    check_whole(str(checkpoint))
