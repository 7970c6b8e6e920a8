"""Requests and replies: LROSE's recorded sessions byte for byte, and errors in words."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path

import pytest

from penstock import PenstockError
from penstock.core.clock import ManualClock
from penstock.protocols.lrose.datamapper_info import INFO_SIZE, DataSetInfo
from penstock.protocols.lrose.datamapper_messages import (
    DATAMAPPER_TYPE,
    MapReply,
    MapRequest,
    ReplyKind,
    RequestKind,
)
from penstock.protocols.lrose.ds_message import DsMessage, Part
from penstock.registry.data_map import DataMap
from penstock.registry.data_map_answers import MapAnswers
from penstock.registry.data_map_state import state_bytes
from support.mutation import mutator, set_byte, truncate

WIRE = Path(__file__).parents[1] / "vectors" / "lrose" / "wire"
#: When the recorded server got its first registration, its questions, and its last registration:
#: from the fields of its replies and of its state file.
FIRST, ASKED, LAST = 0x6AF96FEF, 0x6AF96FF0, 0x6AF97009
FRAME = 20


def payload(name: str) -> bytes:
    return (WIRE / name).read_bytes()[FRAME:]


def answers(now: int = FIRST, max_entries: int = 100) -> tuple[MapAnswers, ManualClock]:
    clock = ManualClock(now * 10**9)
    return MapAnswers(DataMap(max_entries=max_entries, clock=clock), clock=clock), clock


def ask(of: MapAnswers, request: MapRequest) -> MapReply:
    return MapReply.from_message(of.reply_to(request.to_message()))


def test_the_recorded_sessions_get_the_recorded_replies_byte_for_byte() -> None:
    ours, clock = answers()
    for number in range(8):
        now = FIRST if number < 2 else LAST if number == 7 else ASKED
        clock.advance(now - clock.now_ns() // 10**9)
        request = DsMessage.from_bytes(payload(f"dmap_{number:02d}.c2s"))
        reply = ours.reply_to(request).to_bytes()
        assert reply == payload(f"dmap_{number:02d}.s2c"), number
    assert state_bytes(ours.map.all()) == (WIRE / "dmap_table.bin").read_bytes()
    assert ours.statistics() == (8, 3, 0, 5, 0, 0)


@pytest.mark.parametrize("number", range(8))
def test_a_recorded_request_is_written_byte_for_byte(number: int) -> None:
    recorded = payload(f"dmap_{number:02d}.c2s")
    request = MapRequest.from_message(DsMessage.from_bytes(recorded))
    assert request.to_message().to_bytes() == recorded


@pytest.mark.parametrize("number", range(8))
def test_a_recorded_reply_is_read_and_written_byte_for_byte(number: int) -> None:
    recorded = payload(f"dmap_{number:02d}.s2c")
    reply = MapReply.from_message(DsMessage.from_bytes(recorded))
    assert reply.error is None
    assert reply.to_message().to_bytes() == recorded


@pytest.mark.parametrize("kind", [each for each in RequestKind if each.name.startswith("REG_")])
def test_every_registration_gets_an_empty_reply_that_says_ok(kind: RequestKind) -> None:
    ours, _ = answers()
    info = DataSetInfo(dir="mdv/a", hostname="h", status="s")
    assert ask(ours, MapRequest(kind, (info,))) == MapReply(ReplyKind.REG_STATUS)
    assert [each.dir for each in ours.map.all()] == ["mdv/a"]
    assert ours.statistics().registered == 1


def test_full_entries_come_any_number_at_a_time() -> None:
    ours, _ = answers()
    infos = tuple(DataSetInfo(dir=str(i), latest_time=i) for i in range(10))
    assert ask(ours, MapRequest(RequestKind.REG_FULL, infos)).error is None
    assert ask(ours, MapRequest(RequestKind.REG_FULL)).error is None
    found = ask(ours, MapRequest(RequestKind.REQ_ALL))
    assert {each.dir: each.latest_time for each in found.infos} == {str(i): i for i in range(10)}
    assert {each.check_time for each in found.infos} == {FIRST}


def test_a_delete_is_answered_and_done() -> None:
    ours, _ = answers()
    for directory in ("a", "b"):
        ours.map.register_latest(DataSetInfo(dir=directory, datatype="t", hostname="h"))
    wanted = DataSetInfo(dir="a", datatype="all", hostname="all")
    assert ask(ours, MapRequest(RequestKind.DELETE, (wanted,))) == MapReply(ReplyKind.REG_STATUS)
    assert [each.dir for each in ours.map.all()] == ["b"]
    assert ours.statistics().deleted == 1


def test_a_full_map_is_told_to_the_client() -> None:
    ours, _ = answers(max_entries=1)
    ours.map.register_latest(DataSetInfo(dir="a"))
    reply = ask(ours, MapRequest(RequestKind.REG_LATEST_DATA, (DataSetInfo(dir="b"),)))
    assert reply.error is not None
    assert "full" in reply.error
    assert ours.statistics() == (1, 0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (DsMessage(43000), "type should be 3818000"),
        (DsMessage(DATAMAPPER_TYPE, 5), "subType"),
        (DsMessage(DATAMAPPER_TYPE, ReplyKind.REG_STATUS), "subType"),
        (DsMessage(DATAMAPPER_TYPE, RequestKind.REG_LATEST_DATA), "INFO parts"),
        (
            DsMessage(
                DATAMAPPER_TYPE, RequestKind.DELETE, parts=(Part(3818400, bytes(INFO_SIZE)),) * 2
            ),
            "INFO parts",
        ),
        (
            DsMessage(DATAMAPPER_TYPE, RequestKind.REG_FULL, parts=(Part(3818400, bytes(10)),)),
            "864",
        ),
    ],
)
def test_what_is_no_request_gets_an_error_in_words(message: DsMessage, reason: str) -> None:
    ours, _ = answers()
    reply = MapReply.from_message(ours.reply_to(message))
    assert reply.error is not None
    assert reason in reply.error
    assert len(ours.map) == 0
    assert ours.statistics().refused == 1


def test_the_hosts_that_a_question_has_to_pass_are_kept_in_order() -> None:
    request = MapRequest(RequestKind.REQ_ALL, (), ("gate", "inner"))
    message = request.to_message()
    assert message.parts == (Part(3818402, b"gate:inner\0"),)
    assert MapRequest.from_message(message) == request


def test_an_error_is_seen_in_the_flags_where_lroses_client_does_not_look() -> None:
    reply = MapReply(ReplyKind.WITH_INFO, error="no way")
    message = reply.to_message()
    assert (message.sub_type, message.flags) == (3818205, 3818303)
    assert message.parts == (Part(3818401, b"no way\0"),)
    assert MapReply.from_message(message) == reply
    wordless = MapReply.from_message(message._replace(parts=()))
    assert wordless.error == "it does not say why"


@pytest.mark.parametrize(
    "message",
    [
        DsMessage(1, ReplyKind.REG_STATUS, flags=3818302),
        DsMessage(DATAMAPPER_TYPE, RequestKind.REQ_ALL, flags=3818302),
        DsMessage(DATAMAPPER_TYPE, ReplyKind.REG_STATUS, flags=0),
        DsMessage(DATAMAPPER_TYPE, ReplyKind.WITH_INFO, flags=3818302, parts=(Part(3818400, b""),)),
    ],
)
def test_what_is_no_reply_is_refused(message: DsMessage) -> None:
    with pytest.raises(PenstockError):
        MapReply.from_message(message)


# --- bytes of no meaning --------------------------------------------------------------------

SEEDS = [
    *(payload(path.name) for path in sorted(WIRE.glob("dmap_*.c2s"))),
    *(
        MapRequest(kind, (DataSetInfo(dir="all", datatype="all", hostname="all", status="s"),))
        .to_message()
        .to_bytes()
        for kind in RequestKind
    ),
    MapRequest(RequestKind.REG_FULL, tuple(DataSetInfo(dir=d) for d in "abc"))
    .to_message()
    .to_bytes(),
    MapRequest(RequestKind.REQ_ALL, (), ("a", "b")).to_message().to_bytes(),
    *(payload(path.name) for path in sorted(WIRE.glob("dmap_*.s2c"))),
]
TELLING = (0, 1, -1, 2, 63, 64, 88, 863, 864, 865, 2**31 - 1, -(2**31), DATAMAPPER_TYPE,
           *RequestKind, 3818400, 3818402, 3818302)  # fmt: skip


def set_header_word(data: bytearray, _: int, chance: random.Random) -> None:
    if len(data) >= 4:
        # Mostly in the headers: what follows is text.
        word = chance.randrange(min(len(data), chance.choice((64, 136, 4000))) // 4) * 4
        value = chance.choice((*TELLING, chance.randint(-(2**31), 2**31 - 1)))
        data[word : word + 4] = struct.pack(">i", value)


def insert_noise(data: bytearray, at: int, chance: random.Random) -> None:
    data[at:at] = chance.randbytes(chance.randrange(30))


def fill(data: bytearray, at: int, chance: random.Random) -> None:
    end = at + chance.randrange(1, 300)
    data[at:end] = chance.choice((b"\xff", b"x", b"\0")) * len(data[at:end])


mutated = mutator((1, 1, 2, 5), set_byte, set_header_word, truncate, insert_noise, fill)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(20_000, id="some"),
        pytest.param(1_000_000, id="all", marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
    ],
)
def test_fuzz_any_bytes_get_a_reply_or_a_typed_error(count: int) -> None:
    chance = random.Random(5)
    ours, _ = answers(max_entries=20)
    understood = 0
    for _ in range(count):
        data = mutated(chance.choice(SEEDS), chance)
        try:
            message = DsMessage.from_bytes(data)
        except PenstockError:
            continue
        with contextlib.suppress(PenstockError):
            MapReply.from_message(message)
        reply = ours.reply_to(message).to_bytes()
        understood += 1
        assert len(reply) < 20 * 1000
        MapReply.from_message(DsMessage.from_bytes(reply))
        assert len(ours.map) <= 20
        if chance.random() < 0.01:  # else a full map answers everything alike
            ours.map.delete("all", "all", "all")
    books = ours.statistics()
    assert books.requests == understood == sum(books[1:])
    assert min(books.registered, books.asked, books.refused, books.deleted) > count // 200
    state_bytes(ours.map.all())


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(20_000, id="some"),
        pytest.param(1_000_000, id="all", marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
    ],
)
def test_fuzz_an_entry_of_any_bytes_is_read_or_refused(count: int) -> None:
    chance = random.Random(6)
    table = (WIRE / "dmap_table.bin").read_bytes()
    read = 0
    for _ in range(count):
        at = chance.randrange(3) * INFO_SIZE
        data = mutated(table[at : at + INFO_SIZE], chance)
        if chance.random() < 0.8:
            data = data[:INFO_SIZE].ljust(INFO_SIZE, b"\0")
        try:
            info = DataSetInfo.read(data)
        except PenstockError:
            continue
        read += 1
        assert DataSetInfo.read(info.write()) == info
    assert read > count // 4
