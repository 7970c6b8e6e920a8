"""Changed bytes, texts and properties are read, or refused with a typed error."""

from __future__ import annotations

import contextlib
import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.cloud_events import (
    from_json,
    from_protobuf,
    to_json,
    to_protobuf,
)
from penstock.protocols.uprotocol.errors import InvalidMessage, InvalidUUID, InvalidUUri
from penstock.protocols.uprotocol.message import UAttributes, UMessage, is_expired
from penstock.protocols.uprotocol.mqtt_wire import (
    MqttProperties,
    attributes_of,
    properties_of,
    topic_d2d,
    topic_e2e,
)
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri
from penstock.protocols.uprotocol.validation import RULES
from penstock.protocols.uprotocol.zenoh_wire import decode_attachment, encode_attachment, key_of
from protocols.uprotocol.vectors import cases
from support.mutation import (
    cut,
    double,
    insert,
    mutator,
    set_byte,
    set_piece,
    sizes,
    truncate,
)

TYPED = (InvalidMessage, InvalidUUID, InvalidUUri)
WORDS = [
    *("", "*", "/", "//", ":", "up:", "0", "FF", "FFFF", "FFFFFFFF", "100000000", "-", "A", "\n"),
    *("\u0661", "\ud800", "1_0", "+1", " ", "[::1]", "[", "]", "?", "#", "{}", "1" * 5000, "\0"),
    *("CS1", "CS9", "up-pub.v1", "up-req.v1", "4294967295", "4294967296"),
]
ENCODABLE = [word for word in WORDS if word != "\ud800"]
NAMED = ["sink", "priority", "ttl", "token", "plevel", "reqid", "commstatus", "pformat", "other"]
#: Varints at their limits, lengths that lie, tags of every field and of none.
PIECES = [
    *(bytes([tag]) for tag in (0x0A, 0x10, 0x12, 0x1A, 0x22, 0x28, 0x30, 0x40, 0x4A, 0x52, 0x5A)),
    *(b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\x80\x80\x04", b"\x80\x02", b"\x7f"),
    *(b"\x0b\x0c", b"\xc2\x3e\x03abc", b"\x00", b"\xff" * 12),
]


changed_bytes = mutator(
    (1, 1, 2, 5), set_byte, cut(19), insert(PIECES), set_piece(PIECES), double(39), truncate
)


def changed_text(seed: str, chance: random.Random) -> str:
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(seed) + 1)
        match chance.randrange(4):
            case 0:
                seed = seed[:at] + chance.choice(WORDS) + seed[at:]
            case 1:
                seed = seed[:at] + seed[at + chance.randrange(1, 6) :]
            case 2:
                seed = (
                    seed[:at] + chr(chance.choice((chance.randrange(128), 0x3B1))) + seed[at + 1 :]
                )
            case _:
                seed = seed[:at] + chance.choice(WORDS) + seed[at + 1 :]
    return seed


def changed_value(seed: Any, chance: random.Random) -> Any:
    if isinstance(seed, str) and chance.random() < 0.6:
        return changed_text(seed, chance)
    values: tuple[Any, ...] = (
        None,
        True,
        -1,
        2**31,
        2**70,
        1.5,
        [],
        {},
        "",
        [[]],
        {"a": "\ud800"},
        *WORDS,
    )
    return chance.choice(values)


def use(message: UMessage) -> None:
    """Do with a message what a dispatcher does: none of it may fail otherwise."""
    attributes = message.attributes
    rules = message.validate()
    assert set(rules) <= set(RULES)
    is_expired(attributes, 1_700_000_000_000)
    data = message.to_bytes()
    again = UMessage.from_bytes(data)
    assert again == message
    stripped = UMessage.from_bytes(message.with_attributes(token=None, sink=None).to_bytes())
    assert stripped.attributes == attributes.replace(token=None, sink=None)
    writers: list[Callable[[], object]] = [
        lambda: key_of(attributes, "local"),
        lambda: topic_e2e(attributes, "local"),
        lambda: topic_d2d(attributes, "local"),
        lambda: properties_of(attributes),
        lambda: json.dumps(to_json(message)),
        lambda: to_protobuf(message),
    ]
    for write in writers:
        with contextlib.suppress(InvalidMessage):
            write()
    if not rules:
        assert key_of(attributes, "local").count("/") == 10
        assert "+" not in topic_e2e(attributes, "local")


def seeds() -> list[Any]:
    return [case.values[0] for case in cases("umessages")]


def fuzz_messages(chance: random.Random, there: list[Any]) -> None:
    data = changed_bytes(bytes.fromhex(chance.choice(there)["hex"]), chance)
    try:
        expected = proto.UMessage.FromString(data)
    except proto.UNDECODABLE:
        expected = None
    try:
        message = UMessage.from_bytes(data)
    except InvalidMessage:
        assert expected is None
        raise
    assert expected is not None
    assert message.payload == (expected.payload if expected.HasField("payload") else None)
    values = UAttributes.from_bytes(expected.attributes.SerializeToString())
    assert message.attributes == values
    assert message.to_bytes() == data
    assert UMessage.attributes_of(data) == message.attributes
    use(message)


def fuzz_attachments(chance: random.Random, there: list[Any]) -> None:
    data = changed_bytes(bytes.fromhex(chance.choice(there)["zenoh"]["attachment_hex"]), chance)
    attributes = decode_attachment(data)
    assert encode_attachment(attributes) == data
    use(UMessage.from_parts(attributes, b""))


def fuzz_properties(chance: random.Random, there: list[Any]) -> None:
    seed = properties_of(UMessage.from_bytes(bytes.fromhex(chance.choice(there)["hex"])).attributes)
    pairs, content, expiry = list(seed.user_properties), seed.content_type, seed.message_expiry
    correlation = seed.correlation_data
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(pairs)) if pairs else 0
        match chance.randrange(8):
            case 0 if pairs:
                pairs[at] = (pairs[at][0], changed_text(pairs[at][1], chance))
            case 1 if pairs:
                pairs[at] = (changed_text(pairs[at][0], chance), pairs[at][1])
            case 2 if pairs:
                del pairs[at]
            case 3:
                pairs.insert(at, (str(chance.randrange(13)), chance.choice(WORDS)))
            case 4:
                content = changed_text(content or "", chance)
            case 5:
                correlation = changed_bytes(correlation or bytes(16), chance)
            case 6:
                expiry = chance.choice((None, -1, 0, 1, 2**32 - 1, 2**32, 2**70))
            case _ if pairs:
                pairs.append(chance.choice(pairs))
    attributes = attributes_of(MqttProperties(pairs, content, correlation, expiry))
    use(UMessage.from_parts(attributes, chance.randbytes(chance.randrange(3))))
    assert attributes_of(properties_of(attributes, exact_ttl=True)) == attributes


def fuzz_json_events(chance: random.Random, there: list[Any]) -> None:
    event = dict(chance.choice(there)["cloudevent_json"])
    if chance.random() < 0.3:
        use(from_json(changed_text(json.dumps(event), chance)))
        return
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice([*event, "sink", "ttl", "data", "data_base64", "pformat", "reqid"])
        if chance.random() < 0.3:
            event.pop(name, None)
        else:
            event[name] = changed_value(event.get(name), chance)
    use(from_json(event))


def fuzz_protobuf_events(chance: random.Random, there: list[Any]) -> None:
    data = to_protobuf(UMessage.from_bytes(bytes.fromhex(chance.choice(there)["hex"])))
    if chance.random() < 0.5:
        use(from_protobuf(changed_bytes(data, chance)))
        return
    event = proto.CloudEvent.FromString(data)
    match chance.randrange(4):
        case 0:
            event.attributes[chance.choice(NAMED)].ce_integer = chance.randrange(-2, 20)
        case 1:
            event.attributes[chance.choice(NAMED)].ce_string = chance.choice(ENCODABLE)
        case 2:
            event.attributes[chance.choice(NAMED)].ce_bytes = chance.randbytes(3)
        case _:
            event.attributes.pop(chance.choice(NAMED), None)
    match chance.randrange(6):
        case 0:
            event.text_data = chance.choice(ENCODABLE)
        case 1:
            event.binary_data = chance.randbytes(5)
        case 2:
            event.proto_data.value = chance.randbytes(5)
        case _:
            pass
    use(from_protobuf(event.SerializeToString()))


def fuzz_uris(chance: random.Random, there: list[Any]) -> None:
    uri = UUri.parse(changed_text(chance.choice(there), chance))
    assert UUri.parse(str(uri)) == uri
    assert UUri.from_bytes(uri.to_bytes()) == uri
    assert UUri.ANY.matches(uri)


def fuzz_uri_bytes(chance: random.Random, there: list[Any]) -> None:
    uri = UUri.from_bytes(changed_bytes(UUri.parse(chance.choice(there)).to_bytes(), chance))
    assert UUri.parse(str(uri)) == uri


def fuzz_ids(chance: random.Random, there: list[Any]) -> None:
    if chance.random() < 0.3:
        id = UUID7.from_bytes(changed_bytes(UUID7.new().to_bytes(), chance))
    elif chance.random() < 0.3:
        id = UUID7.from_big_endian(changed_bytes(UUID7.new().to_big_endian(), chance))
    else:
        id = UUID7.parse(changed_text(chance.choice(there), chance))
    assert UUID7.parse(str(id)) == id


def uris() -> list[str]:
    return [case.values[0]["uri"] for case in cases("uuri_strings") if case.values[0]["valid"]]


def ids() -> list[str]:
    return [case.values[0]["string"] for case in cases("uuids") if case.values[0]["valid"]]


Fuzz = Callable[[random.Random, list[Any]], None]
ALL: list[tuple[Fuzz, Callable[[], list[Any]]]] = [
    (fuzz_messages, seeds),
    (fuzz_attachments, seeds),
    (fuzz_properties, seeds),
    (fuzz_json_events, seeds),
    (fuzz_protobuf_events, seeds),
    (fuzz_uris, uris),
    (fuzz_uri_bytes, uris),
    (fuzz_ids, ids),
]
NAMES = [fuzz.__name__ for fuzz, _ in ALL]


@pytest.mark.parametrize("count", sizes(20_000, 1_000_000))
@pytest.mark.parametrize(("fuzz", "make"), ALL, ids=NAMES)
def test_fuzz_what_is_changed_is_read_or_refused(
    fuzz: Fuzz, make: Callable[[], list[Any]], count: int
) -> None:
    chance = random.Random(5)
    there = make()
    refused = 0
    for _ in range(count):
        try:
            fuzz(chance, there)
        except TYPED:
            refused += 1
    assert count // 20 < refused < count - count // 20  # both ways are taken


def test_fuzz_what_is_changed_costs_no_memory() -> None:
    chance = random.Random(6)
    made = [(fuzz, make()) for fuzz, make in ALL]
    tracemalloc.start()
    try:
        for _ in range(4000):
            fuzz, there = chance.choice(made)
            with contextlib.suppress(*TYPED):
                fuzz(chance, there)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30_000_000  # what is remembered of addresses and attributes is bounded
