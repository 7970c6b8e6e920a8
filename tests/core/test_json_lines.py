"""A line of JSON becomes the message that it says."""

from __future__ import annotations

import pytest

from penstock.core.errors import Malformed
from penstock.core.json_lines import message_from_json


def payload_of(line: bytes) -> bytes:
    return message_from_json(line, "lines", 3, 0, 0).payload


@pytest.mark.parametrize("number", [b"1e400", b"-1e400", b"123456789e999"])
@pytest.mark.parametrize("payload", [b'{"x": [%s]}', b"%s"])
def test_a_number_that_would_become_infinite_is_refused(payload: bytes, number: bytes) -> None:
    with pytest.raises(Malformed, match=rf"line 3 payload .*{number.decode()}"):
        payload_of(b'{"payload": %s, "type": 1}' % (payload % number))


@pytest.mark.parametrize(
    "payload",
    [
        *(b'{"x":1e+308}', b"[1.5,12345678901234567890]", b'{"x":NaN}', b'{"x":"1e400"}'),
        *('{"x":"é"}'.encode(), rb'{"x":"\ud800"}', rb'{"x":["\udfff",NaN]}'),
    ],
)
def test_other_values_stay_as_they_are(payload: bytes) -> None:
    assert payload_of(b'{"payload": %s}' % payload) == payload


def test_a_payload_in_base64_is_taken_whatever_stands_beside_it() -> None:
    assert payload_of(b'{"payload": 1e400, "payload_b64": "AP8="}') == b"\x00\xff"
