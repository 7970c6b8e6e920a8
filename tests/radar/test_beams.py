"""Beams: rows with fields, and messages that hold them."""

import numpy as np
import pyarrow as pa
import pytest

from penstock.core.decoding import decoder_for
from penstock.core.errors import Malformed
from penstock.radar.beams import (
    BEAM_SCHEMA,
    RAY_SCHEMA,
    batch_from_beams,
    beams_from_batch,
    check_beams,
    field_names,
    make_beams,
    together,
    values_of,
)


def some_beams(rays: int = 3, gates: int = 5, **more: object) -> pa.Table:
    columns = {
        "time_ns": np.arange(rays) * 1_000_000 + 1_750_000_000_000_000_001,
        "azimuth": np.arange(rays, dtype=np.float32),
        "elevation": np.full(rays, 0.5, np.float32),
        "start_range": np.full(rays, 75.0),
        "gate_spacing": np.full(rays, 150.0),
        "radar": ["GOLDEN"] * rays,
        "calibration": [[("noise_hc", -75.0)]] * rays,
        "DBZ": np.arange(rays * gates, dtype=np.float32).reshape(rays, gates),
    }
    return make_beams({**columns, **more})


def test_a_beam_travels_as_a_message_and_comes_back_equal() -> None:
    beams = some_beams()
    batch = batch_from_beams(beams)
    assert batch.column("time_ns").to_pylist() == beams.column("time_ns").to_pylist()
    assert beams_from_batch(batch).equals(beams)


def test_the_arrow_decoder_of_pipelines_reads_a_beam() -> None:
    decoder = decoder_for(format="arrow", schema="azimuth FLOAT, radar STRING, DBZ ARRAY<FLOAT>")
    rows = decoder.decode(batch_from_beams(some_beams())).rows
    assert rows.column("DBZ").to_pylist()[1] == [5.0, 6.0, 7.0, 8.0, 9.0]
    assert rows.column("radar").to_pylist() == ["GOLDEN"] * 3


def test_a_field_that_only_some_beams_have_is_missing_in_the_others() -> None:
    both = together([some_beams(), some_beams(VEL=np.ones((3, 5), np.float32))])
    assert field_names(both.schema) == ["DBZ", "VEL"]
    velocity = values_of(both, "VEL", 5)
    assert np.isnan(velocity[:3]).all()
    assert (velocity[3:] == 1).all()


def test_beams_of_fewer_gates_are_filled_up() -> None:
    beams = together([some_beams(1, 2), some_beams(1, 4)])
    assert np.isnan(values_of(beams, "DBZ", 4)[0]).tolist() == [False, False, True, True]


def test_a_column_that_does_not_fit_is_named() -> None:
    with pytest.raises(Malformed, match="column azimuth"):
        check_beams(some_beams().drop_columns(["azimuth"]))
    with pytest.raises(Malformed, match="column note"):
        check_beams(some_beams().append_column("note", pa.array(["x"] * 3)))


@pytest.mark.parametrize("payload", [b"", b"no beam", b"\xff" * 64])
def test_a_payload_that_is_no_beam_is_refused(payload: bytes) -> None:
    batch = batch_from_beams(some_beams(1))
    index = batch.schema.get_field_index("payload")
    batch = batch.set_column(index, batch.schema.field(index), pa.array([payload], pa.binary()))
    with pytest.raises(Malformed, match="beam 0"):
        beams_from_batch(batch)


def test_no_messages_are_no_beams() -> None:
    batch = batch_from_beams(some_beams(0))
    assert beams_from_batch(batch).schema == BEAM_SCHEMA
    assert RAY_SCHEMA.names == BEAM_SCHEMA.names[: len(RAY_SCHEMA)]
