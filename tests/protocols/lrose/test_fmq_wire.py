from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import Malformed
from penstock.protocols.lrose.ds_message import CommonPart, DsMessage, Part, text_part
from penstock.protocols.lrose.fmq_messages import (
    Messages,
    decode_messages,
    encode_message,
    encode_messages,
    is_write,
    written_reply,
)
from penstock.protocols.lrose.fmq_wire import (
    OURS,
    Init,
    Op,
    OpenMode,
    PartType,
    decode_init,
    encode_init,
)
from protocols.lrose.recordings import frames_of, messages_of, recording

INT32 = st.integers(-(2**31), 2**31 - 1)
ROW = st.tuples(INT32, INT32, INT32, INT32, INT32, INT32, st.binary(max_size=40))
HEAD = DsMessage(Op.WRITE)


def columns(rows: list[tuple[int, int, int, int, int, int, bytes]]) -> Messages:
    return Messages(*(list(column) for column in zip(*rows, strict=True)))


def one_by_one(head: DsMessage, messages: Messages, *, wide: bool = False) -> bytes:
    """Encode by the general rules of a DsMessage."""
    parts = []
    for type, subtype, packed, plain, id, time, payload in zip(*messages, strict=True):
        info = struct.pack(">7i", type, subtype, len(payload), packed, plain, id, time)
        parts += [Part(PartType.INFO, info), Part(PartType.DATA, payload)]
    return head._replace(parts=tuple(parts)).to_bytes(wide=wide)


@given(st.lists(ROW, min_size=1, max_size=20), st.booleans())
def test_messages_are_encoded_by_the_general_rules_and_come_back(
    rows: list[tuple[int, int, int, int, int, int, bytes]], wide: bool
) -> None:
    messages = columns(rows)
    data = encode_messages(
        HEAD,
        messages.payloads,
        types=messages.types,
        subtypes=messages.subtypes,
        pre_compressed=messages.pre_compressed,
        uncompressed_lens=messages.uncompressed_lens,
        ids=messages.ids,
        times=messages.times,
    )
    assert data == one_by_one(HEAD, messages)
    assert decode_messages(data) == (HEAD, messages)
    assert decode_messages(one_by_one(HEAD, messages, wide=wide)) == (HEAD, messages)


@given(ROW)
def test_one_message_is_encoded_as_many_are(
    row: tuple[int, int, int, int, int, int, bytes],
) -> None:
    type, subtype, packed, plain, id, time, payload = row
    data = encode_message(
        HEAD, payload, type, subtype, pre_compressed=packed, uncompressed_len=plain, id=id,
        time=time,
    )  # fmt: skip
    assert data == one_by_one(HEAD, columns([row]))
    assert decode_messages(data) == (HEAD, columns([row]))


@given(st.lists(ROW, min_size=6, max_size=8))
def test_parts_in_another_order_go_together_by_their_number(
    rows: list[tuple[int, int, int, int, int, int, bytes]],
) -> None:
    messages = columns(rows)
    message = DsMessage.from_bytes(one_by_one(HEAD, messages))
    infos, datas = message.parts_of(PartType.INFO), message.parts_of(PartType.DATA)
    shuffled = message._replace(parts=(*datas, *infos))
    assert decode_messages(shuffled.to_bytes()) == (HEAD, messages)


def test_a_request_without_messages_has_none() -> None:
    assert encode_messages(HEAD, [], types=0, subtypes=0) == HEAD.to_bytes()
    assert decode_messages(HEAD.to_bytes()) == (HEAD, Messages([], [], [], [], [], [], []))


def test_recorded_writes_and_replies_are_encoded_the_same() -> None:
    for frame in frames_of(recording("fmq_01.c2s"))[2:6] + frames_of(recording("fmq_05.s2c"))[2:3]:
        head, found = decode_messages(frame.payload)
        assert one_by_one(head, found) == frame.payload
    write = frames_of(recording("fmq_01.c2s"))[2].payload
    assert is_write(write)
    assert not is_write(frames_of(recording("fmq_05.c2s"))[2].payload)
    assert written_reply(-1) == frames_of(recording("fmq_01.s2c"))[2].payload
    assert DsMessage.from_bytes(written_reply(-5)).mode == -5


def test_the_recorded_opening_is_read_and_encoded_the_same() -> None:
    opening = messages_of(recording("fmq_03.c2s"))[0]
    init = decode_init(opening)
    assert init == Init(
        "fmqp:://localhost:15444:/tmp/fq/srv/rq", OpenMode.READ_WRITE, 1, True, 20, 8192, "fmqdrv"
    )
    assert encode_init(init) == opening
    assert encode_init(init._replace(is_ours=True)).flags == OURS


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (Part(PartType.INIT, bytes(96)),),
        (text_part(CommonPart.URL, "x"),),
        (Part(PartType.INIT, bytes(95)), text_part(CommonPart.URL, "x")),
    ],
)
def test_an_opening_that_is_not_whole_is_refused(parts: tuple[Part, ...]) -> None:
    with pytest.raises(Malformed):
        decode_init(DsMessage(Op.INIT, parts=parts))


def test_what_follows_the_known_fields_of_a_part_is_ignored() -> None:
    opening = encode_init(Init("fmqp:://h:1:q", OpenMode.CREATE, 0, num_slots=7, proc_name="x"))
    init, url = opening.parts
    longer = opening._replace(parts=(Part(init.type, init.data + b"more"), url))
    assert decode_init(longer) == decode_init(opening)
    parts = (Part(PartType.INFO, info(2).data + b"more"), Part(PartType.DATA, b"ab"))
    for copies in (1, 10):
        _, found = decode_messages(HEAD._replace(parts=parts * copies).to_bytes())
        assert (found.types, found.payloads) == ([1] * copies, [b"ab"] * copies)


def info(size: int) -> Part:
    return Part(PartType.INFO, struct.pack(">7i", 1, 2, size, 0, size, 0, 0))


@pytest.mark.parametrize("copies", [1, 10])
@pytest.mark.parametrize(
    "parts",
    [
        (info(1),),
        (info(3), Part(PartType.DATA, b"ab")),
        (info(-1), Part(PartType.DATA, b"ab")),
        (Part(PartType.INFO, bytes(27)), Part(PartType.DATA, b"ab")),
        (info(2), Part(PartType.DATA, b"ab"), Part(PartType.DATA, b"ab")),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(parts: tuple[Part, ...], copies: int) -> None:
    with pytest.raises(Malformed):
        decode_messages(HEAD._replace(parts=parts * copies).to_bytes())


def test_a_message_shorter_than_its_part_is_cut_to_its_own_length() -> None:
    parts = (info(1), Part(3, b""), Part(PartType.DATA, b"ab"))
    _, found = decode_messages(HEAD._replace(parts=parts).to_bytes())
    assert found.payloads == [b"a"]
