from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from typing import Any, Literal

import pyarrow as pa
import pytest

from core.decoding.batches import batch_of
from penstock.core.config import ConfigModel, parse_config
from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.decoding import (
    AnyDecodeOptions,
    DecodeError,
    Rows,
    decoder_for,
    parse_decoding,
)
from penstock.core.errors import ConfigError, InvalidOption
from penstock.core.message import Message
from penstock.core.stream_id import StreamId

PAYLOADS = [struct.pack("<d", 0.5), b"short", None, struct.pack("<d", 1.5)]


def rows_for(**options: Any) -> Rows:
    parsed = parse_decoding({"format": "struct", "layout": "<d", **options})
    return Rows(decoder_for(parsed), parsed, batch_of([]).schema.names)


def test_failing_names_the_message_what_was_expected_and_what_was_found() -> None:
    with pytest.raises(DecodeError) as caught:
        rows_for().of(batch_of(PAYLOADS, first=40))
    error = pickle.loads(pickle.dumps(caught.value))  # as it comes from a task
    assert str(error) == (
        "message 41 of fmq:/radar/iq does not decode as struct: its payload should be 8 bytes, "
        "found 5 bytes; 5 bytes that start with 73 68 6f 72 74"
    )
    assert (error.url, error.seq, error.format) == ("fmq:/radar/iq", 41, "struct")
    assert "on_error: skip" in error.hint


def test_the_columns_of_the_message_are_kept_but_its_payload() -> None:
    rows, failures = rows_for().of(batch_of([PAYLOADS[0]]))
    assert not failures
    assert rows.schema.names == [
        *("url", "seq", "time_ns", "created_ns", "type", "subtype", "stream", "attributes"),
        *("time", "f0"),
    ]
    few, _ = rows_for(keep=["seq", "payload"]).of(batch_of([PAYLOADS[0]]))
    assert few.to_pylist() == [{"seq": 0, "payload": PAYLOADS[0], "f0": 0.5}]


def test_skipping_leaves_rows_with_their_reason_to_be_counted() -> None:
    rows, failures = rows_for(on_error="skip", keep=["seq"]).of(batch_of(PAYLOADS))
    assert rows.to_pylist() == [
        {"seq": 0, "f0": 0.5, "decode_error": None},
        {"seq": 1, "f0": None, "decode_error": "expected 8 bytes, found 5 bytes"},
        {"seq": 2, "f0": None, "decode_error": "expected a payload, found null"},
        {"seq": 3, "f0": 1.5, "decode_error": None},
    ]
    assert len(failures) == 2


def test_a_dead_letter_has_the_whole_message_also_if_its_columns_were_not_kept() -> None:
    batch = batch_of(PAYLOADS, first=40)
    rows, _ = rows_for(on_error="dead_letter", keep=["seq"]).of(batch)
    found = rows.to_pylist()
    assert [row["decode_error"] is None for row in found] == [True, False, False, True]
    record = found[1]["decode_error"]
    del record["reason"]
    letter = DeadLetter.from_message(
        Message(seq=0, created_ns=0, **{**record, "stream": StreamId(record["stream"])})
    )
    assert letter.original == Message(
        41, 1_700_000_000_000_000_001, 1_700_000_000_000_000_501, 7, 8, StreamId(b"s" * 16),
        b"attributes", b"short",
    )  # fmt: skip
    assert letter.code is Code.INVALID_ARGUMENT
    assert letter.reason == "expected 8 bytes, found 5 bytes"
    assert letter.receiver == "decode as struct of fmq:/radar/iq"
    assert letter.attempts == 1


@pytest.mark.parametrize("on_error", ["skip", "dead_letter"])
def test_all_bad_none_bad_and_nothing_at_all_have_the_same_columns(
    on_error: Literal["skip", "dead_letter"],
) -> None:
    rows = rows_for(on_error=on_error)
    schemas = [
        rows.of(batch_of(payloads))[0].schema
        for payloads in ([], [b"x", b"y"], [PAYLOADS[0]], PAYLOADS)
    ]
    assert all(schema == schemas[0] for schema in schemas)


def test_failures_of_payloads_with_many_rows_stay_in_order() -> None:
    parsed = parse_decoding(
        {"format": "csv", "schema": "a INT", "on_error": "skip", "keep": ["seq"]}
    )
    rows = Rows(decoder_for(parsed), parsed, batch_of([]).schema.names)
    found, _ = rows.of(batch_of([b"1\n2", b"x", b"3", b"", b"4\n5"]))
    assert [(row["seq"], row["a"]) for row in found.to_pylist()] == [
        (0, 1), (0, 2), (1, None), (2, 3), (3, None), (4, 4), (4, 5)
    ]  # fmt: skip


def test_frames_of_others_need_a_payload_only() -> None:
    parsed = parse_decoding({"format": "struct", "layout": "<d", "on_error": "dead_letter"})
    batch = pa.record_batch({"payload": pa.array([b"x"], pa.binary())})
    rows, _ = Rows(decoder_for(parsed), parsed, ["payload"]).of(batch)
    assert rows.to_pylist()[0]["decode_error"]["payload"] == b"x"
    plain = parse_decoding({"format": "struct", "layout": "<d"})
    strict = Rows(decoder_for(plain), plain, ["payload"])
    with pytest.raises(DecodeError, match="a message does not decode"):
        strict.of(batch)


@pytest.mark.parametrize(
    ("options", "option", "reason", "hint"),
    [
        ({"names": ["Seq"]}, "decode.prefix", "both have a column Seq", "prefix: payload_"),
        ({"names": ["decode_error"], "on_error": "skip"}, "decode.prefix", "decode_error", None),
        ({"keep": ["seq", "tiem"]}, "decode.keep[1]", "no such column", "did you mean time?"),
        ({"on_error": "ignore"}, "decode.on_error", "should be 'fail', 'skip'", None),
        ({"layuot": 1}, "decode.layuot", "no such option", "did you mean layout?"),
        ({"format": "jsno"}, "decode.format", "no such format", "did you mean json?"),
        ({"format": None}, "decode.format", "is missing", "one of struct, json"),
        ({"layout": None}, "decode.layout", "string", None),
        ({"keep": "seq"}, "decode.keep", "tuple", None),
    ],
)
def test_an_option_that_is_wrong_is_named(
    options: dict[str, Any], option: str, reason: str, hint: str | None
) -> None:
    with pytest.raises(InvalidOption) as caught:
        rows_for(**options)
    assert caught.value.option == option
    assert reason in caught.value.reason
    if hint is not None:
        assert hint in str(caught.value.hint)


def test_a_prefix_keeps_names_apart() -> None:
    rows, _ = rows_for(names=["seq"], prefix="beam_").of(batch_of([PAYLOADS[0]]))
    assert rows.schema.names[-1] == "beam_seq"


def test_frames_without_a_payload_are_refused() -> None:
    parsed = parse_decoding({"format": "struct", "layout": "<d"})
    with pytest.raises(InvalidOption, match="no column payload"):
        Rows(decoder_for(parsed), parsed, ["seq"])


class _Described(ConfigModel):
    decode: AnyDecodeOptions


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("decode:\n  format: struct\n  layout: [{name: a, type: f5}]",
         "file.yaml:3: decode.layout[0].type: there is no type 'f5'", None),
        ("decode:\n  format: struct\n  layout: flaot x",
         "file.yaml:3: decode.layout: there is no type 'flaot'", "did you mean float?"),
        ("decode:\n  format: json\n  shcema: a INT\n  schema: a INT",
         "file.yaml:3: decode.shcema: unknown key", "did you mean schema?"),
        ("decode:\n  format: csv", "file.yaml:1: decode.schema: is required", None),
    ],
)  # fmt: skip
def test_in_a_file_the_line_is_named(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, _Described, "file.yaml")
    assert str(caught.value).splitlines()[0] == message
    if hint is not None:
        assert caught.value.hint == hint


def test_decoding_without_spark_does_not_import_it() -> None:
    program = (
        "import sys; from penstock.core.decoding import decoder_for; "
        "[decoder_for(format=name, schema='a INT') for name in ('json', 'csv', 'arrow')]; "
        "decoder_for(format='struct', layout='<d'); "
        "print([m for m in ('pyspark', 'google.protobuf', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"
