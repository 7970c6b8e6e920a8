from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidStreamId
from penstock.core.stream_id import (
    ANY_DEVICE,
    ANY_FILTER,
    ForwardDestination,
    StreamId,
    codelet_path,
    hash54,
    id_for_app,
    id_for_codelet,
    murmur64a,
)

VECTORS = Path(__file__).parents[1] / "vectors" / "jrtc"


def vectors(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((VECTORS / name).read_bytes())["vectors"]
    return rows


EXAMPLE = StreamId.parse("00101e30-97b1-454b-fcaf-cac30c2235d9")

sevens = st.integers(0, 127)
filters = st.integers(0, ANY_FILTER) | st.just(ANY_FILTER)
fields = st.tuples(st.integers(0, 63), sevens, sevens, filters, filters)
stream_ids = fields.map(lambda values: StreamId.from_fields(*values))
# Few values, so that ids and requests often meet.
near_ids = st.builds(
    StreamId.from_fields,
    st.sampled_from([0, 1]),
    st.sampled_from([1, 2, 3, ForwardDestination.ANY]),
    st.sampled_from([0, 1, 3, ANY_DEVICE]),
    st.sampled_from([1, 3, ANY_FILTER]),
    st.sampled_from([1, 3, ANY_FILTER]),
)


# --- against the original -------------------------------------------------------------------


@pytest.mark.parametrize("row", vectors("hash54.json"), ids=lambda row: repr(row["text"][:20]))
def test_hash_agrees_with_the_original_in_every_seed_and_bit(row: dict[str, Any]) -> None:
    for seed, expected in row["murmur64a"].items():
        number = int(seed.removeprefix("seed"))
        assert f"{murmur64a(row['text'].encode(), number):016x}" == expected
    hashed = hash54(row["text"])
    assert f"{hashed:014x}" == row["hash54"]
    assert [bit for bit in range(54) if hashed >> bit & 1] == row["bits"]


@pytest.mark.parametrize("row", vectors("stream_ids.json"), ids=lambda row: row["uuid"])
def test_id_agrees_with_the_original(row: dict[str, Any]) -> None:
    # The original cuts -1 to the seven ones that mean ANY; here ANY is asked for by name.
    fwd_dst, device_id = (None if row[key] == -1 else row[key] for key in ("fwd_dst", "device_id"))
    stream = StreamId.generate(
        fwd_dst, device_id, row["stream_path"], row["stream_name"], row["ver"]
    )
    expected = row["fields"]
    assert stream.hex() == row["hex"]
    assert stream.dashed() == str(stream) == row["uuid"]
    assert stream.to_bytes() == bytes.fromhex(row["hex"])
    assert stream.ver == expected["ver"]
    assert stream.fwd_dst == expected["fwd_dst"]
    assert stream.device_id == expected["device_id"]
    assert f"{stream.path:014x}" == expected["stream_path"]
    assert f"{stream.name:014x}" == expected["stream_name"]
    assert StreamId.parse(row["hex"]) == StreamId.parse(row["uuid"]) == stream


@pytest.mark.parametrize("row", vectors("matching.json"), ids=lambda row: row["note"])
def test_both_matching_rules_agree_with_the_original(row: dict[str, Any]) -> None:
    stream, request = StreamId.parse(row["sid"]), StreamId.parse(row["req"])
    assert stream.matches(request) == row["router_delivers"]
    assert stream.mask_matches(request) == row["mask_match"]
    assert (request in stream.lookup_keys()) == row["router_delivers"]


@pytest.mark.parametrize(
    ("key", "role"), [("sid", "sid_from"), ("req", "req_from")], ids=["streams", "requests"]
)
def test_matched_ids_are_made_from_the_parts_the_original_made_them_from(
    key: str, role: str
) -> None:
    for row in vectors("matching.json"):
        if parts := row[role]:
            made = StreamId.generate(
                parts["fwd_dst"], parts["device_id"], parts["stream_path"], parts["stream_name"]
            )
            assert made.hex() == row[key]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0", "1"),
        ("2", "3"),
        ("4", "5"),
        ("6", "7"),
        ("8", "9"),
        ("b", "c"),
        ("ul", "tl"),
        ("map_0", "lap_0"),
        ("ringbuf", "singbuf"),
        ("one", "nne"),
    ],
)
def test_short_names_collide_as_in_the_original(one: str, other: str) -> None:
    assert hash54(one) == hash54(other)


def test_names_of_eight_bytes_no_longer_collide() -> None:
    assert (hash54("ringbuf1") ^ hash54("singbuf1")).bit_count() == 27


# --- making ---------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["fwd_dst", "device_id", "ver"])
@pytest.mark.parametrize("value", [-1, 128, 130, 255, True, 1.0, "1"])
def test_a_number_that_does_not_fit_is_an_error_and_not_cut(field: str, value: Any) -> None:
    parts: dict[str, Any] = {"fwd_dst": 1, "device_id": 1, "path": "p", "name": "n"}
    with pytest.raises(InvalidStreamId) as caught:
        StreamId.generate(**parts | {field: value})
    assert caught.value.field == field
    assert caught.value.value == value


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("ver", (64, 0, 0, 0, 0)),
        ("fwd_dst", (0, 128, 0, 0, 0)),
        ("device_id", (0, 0, 128, 0, 0)),
        ("path", (0, 0, 0, ANY_FILTER + 1, 0)),
        ("name", (0, 0, 0, 0, -1)),
    ],
)
def test_fields_that_do_not_fit_their_bits_are_refused_by_name(
    field: str, values: tuple[int, int, int, int, int]
) -> None:
    with pytest.raises(InvalidStreamId) as caught:
        StreamId.from_fields(*values)
    assert caught.value.field == field


@pytest.mark.parametrize("text", [1, b"path", 1.5, ["path"]])
def test_a_path_or_name_that_is_not_text_is_refused(text: Any) -> None:
    with pytest.raises(InvalidStreamId, match="path"):
        StreamId.generate(1, 1, text, "name")
    with pytest.raises(InvalidStreamId, match="name"):
        StreamId.generate(1, 1, "path", text)


def test_text_that_has_no_utf8_form_is_refused() -> None:
    with pytest.raises(InvalidStreamId, match="UTF-8"):
        hash54("half \ud800 of a pair")


def test_omitted_parts_are_left_open() -> None:
    assert StreamId.generate(None, None, None, None) == StreamId.from_fields(
        0, ForwardDestination.ANY, ANY_DEVICE, ANY_FILTER, ANY_FILTER
    )


@pytest.mark.parametrize("open_part", range(4))
def test_an_id_with_any_part_left_open_is_not_concrete(open_part: int) -> None:
    parts: list[Any] = [1, 1, "path", "name"]
    assert StreamId.generate(*parts).is_concrete
    parts[open_part] = None
    assert not StreamId.generate(*parts).is_concrete


def test_an_empty_name_is_a_name_and_not_a_wildcard() -> None:
    assert StreamId.generate(1, 1, "", "").is_concrete


@given(st.text())
def test_a_text_never_hashes_to_nothing_or_to_the_wildcard(text: str) -> None:
    assert 1 <= hash54(text).bit_count() <= 38


def test_a_codelet_stream_has_the_path_that_jrtctl_builds() -> None:
    path = "AdvancedExample1://jbpf_agent/data_generator_codeletset/codelet"
    parts = ("AdvancedExample1", "data_generator_codeletset", "codelet")
    assert codelet_path(*parts) == path
    assert id_for_codelet(*parts, "ringbuf", 1).hex() == "0008139ccb59f5f191349d5613ddc6cf"
    assert id_for_codelet(*parts, "ringbuf", None, None) == StreamId.generate(
        None, None, path, "ringbuf"
    )


def test_an_app_stream_belongs_to_the_controller_and_stays_there_unless_asked() -> None:
    stream = id_for_app("AdvancedExample1://intraapp", "buffer_input")
    assert stream.hex() == "00080bac340fe85b828535a45b791b67"
    forwarded = id_for_app("app_name", "stream_name", fwd_dst=ForwardDestination.UDP)
    assert forwarded.fwd_dst == ForwardDestination.UDP
    assert forwarded.device_id == 0


# --- forms ----------------------------------------------------------------------------------


@given(fields)
def test_fields_survive_bytes_and_both_texts(values: tuple[int, int, int, int, int]) -> None:
    stream = StreamId.from_fields(*values)
    assert (stream.ver, stream.fwd_dst, stream.device_id, stream.path, stream.name) == values
    assert StreamId.from_bytes(stream.to_bytes()) == stream
    assert StreamId.parse(stream.hex()) == StreamId.parse(stream.dashed()) == stream
    assert StreamId.parse(stream.hex().upper()) == StreamId.parse(str(stream).upper()) == stream


@given(st.binary(min_size=16, max_size=16))
def test_any_sixteen_bytes_are_an_id_that_gives_them_back(data: bytes) -> None:
    stream = StreamId.from_bytes(data)
    rebuilt = StreamId.from_fields(
        stream.ver, stream.fwd_dst, stream.device_id, stream.path, stream.name
    )
    assert bytes(rebuilt) == data
    assert type(bytes(rebuilt)) is type(rebuilt.to_bytes()) is bytes


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_byte_buffer_is_taken(kind: Any) -> None:
    assert StreamId.from_bytes(kind(bytes(EXAMPLE))) == EXAMPLE


@pytest.mark.parametrize("size", [0, 15, 17, 4096])
def test_a_wrong_number_of_bytes_is_refused(size: int) -> None:
    with pytest.raises(InvalidStreamId, match="16 bytes"):
        StreamId.from_bytes(bytes(size))


@pytest.mark.parametrize("data", [16, "0" * 16, [0] * 16, None])
def test_what_is_not_bytes_is_refused(data: Any) -> None:
    with pytest.raises(InvalidStreamId, match="should be bytes"):
        StreamId.from_bytes(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00101e3097b1454bfcafcac30c2235d",
        "00101e3097b1454bfcafcac30c2235d9a",
        "00101e3097b1454bfcafcac30c2235dg",
        "{00101e30-97b1-454b-fcaf-cac30c2235d9}",
        "urn:uuid:00101e30-97b1-454b-fcaf-cac30c2235d9",
        " 00101e3097b1454bfcafcac30c2235d9",
        "00101e3097b1454bfcafcac30c2235d9\n",
        "00 10 1e 30 97 b1 45 4b fc af ca c3 0c 22 35 d9",
        "0010-1e30-97b1454b-fcaf-cac30c2235d9",
        "00101e30-97b1454b-fcaf-cac30c2235d9",
        "00101e30-97b1-454b-fcaf-cac30c2235d9-",
        "\u0660\u0660101e3097b1454bfcafcac30c2235d9",
        None,
        1,
    ],
)
def test_text_in_any_other_form_is_refused(text: Any) -> None:
    with pytest.raises(InvalidStreamId, match="not a stream id") as caught:
        StreamId.parse(text)
    assert caught.value.hint is not None


def test_repr_is_the_expression_that_makes_it() -> None:
    assert repr(EXAMPLE) == "StreamId.parse('00101e30-97b1-454b-fcaf-cac30c2235d9')"


# --- as a value -----------------------------------------------------------------------------


@given(stream_ids, stream_ids)
def test_ids_sort_and_compare_by_their_fields_in_order(one: StreamId, other: StreamId) -> None:
    def fields_of(stream: StreamId) -> tuple[int, ...]:
        return (stream.ver, stream.fwd_dst, stream.device_id, stream.path, stream.name)

    assert (one < other) == (fields_of(one) < fields_of(other))
    assert (one == other) == (fields_of(one) == fields_of(other))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_id_survives_pickling(protocol: int) -> None:
    loaded = pickle.loads(pickle.dumps(EXAMPLE, protocol))
    assert loaded == EXAMPLE
    assert type(loaded) is type(copy.deepcopy(EXAMPLE)) is StreamId


def test_an_id_cannot_be_changed_or_given_attributes() -> None:
    assert not hasattr(EXAMPLE, "__dict__")
    with pytest.raises(AttributeError):
        EXAMPLE.device_id = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        EXAMPLE.colour = "red"  # type: ignore[attr-defined]


def test_bytes_off_the_wire_find_the_id_in_a_dictionary() -> None:
    table: dict[bytes, str] = {EXAMPLE: "found"}
    assert table[bytes(EXAMPLE)] == "found"


def test_ids_go_into_an_arrow_column_as_they_are() -> None:
    column = pa.array([EXAMPLE, None], pa.binary(16))
    assert column.to_pylist() == [bytes(EXAMPLE), None]


# --- matching -------------------------------------------------------------------------------


@given(near_ids, near_ids)
def test_a_request_matches_exactly_when_it_is_one_of_the_lookup_keys(
    stream: StreamId, request: StreamId
) -> None:
    assert stream.matches(request) == (request in set(stream.lookup_keys()))


@given(near_ids, near_ids)
def test_whatever_the_router_delivers_passes_the_mask(stream: StreamId, request: StreamId) -> None:
    assert stream.mask_matches(request) or not stream.matches(request)


@given(stream_ids)
def test_each_lookup_key_comes_once_and_the_id_itself_first(stream: StreamId) -> None:
    keys = stream.lookup_keys()
    assert keys[0] == stream
    assert len(set(keys)) == len(keys)
    assert len(keys) == 16 or not stream.is_concrete
    assert all(stream.matches(key) for key in keys)
