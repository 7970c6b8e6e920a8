"""Addresses: text, bytes, what they are, and what a pattern covers (docs/specs/uprotocol.md 1)."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PenstockError
from penstock.protocols.uprotocol.errors import InvalidUUri
from penstock.protocols.uprotocol.uuri import UUri
from protocols.uprotocol.strategies import UURI
from protocols.uprotocol.vectors import cases, uuri


@pytest.mark.parametrize("case", cases("uuri_strings"))
def test_text_of_the_vectors_is_read_or_refused(case: Any) -> None:
    if not case["valid"]:
        with pytest.raises(InvalidUUri) as caught:
            UUri.parse(case["uri"])
        assert caught.value.rule
        assert isinstance(caught.value, PenstockError)
        assert isinstance(caught.value, ValueError)
        return
    uri = UUri.parse(case["uri"])
    assert uri == uuri(case["uuri"])
    assert str(uri) == case["canonical"]
    assert uri.without_scheme == case["canonical_no_scheme"]
    assert uri.to_bytes().hex() == case["proto_hex"]
    assert UUri.from_bytes(bytes.fromhex(case["proto_hex"])) == uri
    assert uri.has_wildcard == case["wildcard"]


@pytest.mark.parametrize("case", cases("uuri_protobuf"))
def test_bytes_of_the_vectors_are_read_or_refused(case: Any) -> None:
    data = bytes.fromhex(case["hex"])
    if not case["valid"]:
        with pytest.raises(InvalidUUri):
            UUri.from_bytes(data)
        return
    uri = UUri.from_bytes(data)
    assert uri == uuri(case["uuri"])
    if case.get("python_encodes_same"):
        assert uri.to_bytes() == data


@pytest.mark.parametrize("case", cases("uuri_matching"))
def test_patterns_of_the_vectors_match_or_do_not(case: Any) -> None:
    pattern, candidate = UUri.parse(case["pattern"]), UUri.parse(case["candidate"])
    assert pattern.matches(candidate) is case["match"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "no / before"),
        ("//host", "0 path segments"),
        ("/1/1", "2 path segments"),
        ("/1/1/1/1", "4 path segments"),
        ("/1//1", "segment is empty"),
        ("xy:/1/1/1", "scheme is not up"),
        ("UP:/1/1/1", "scheme is not up"),
        ("/1/1/1?a", "query or a fragment"),
        ("/1/1/1#a", "query or a fragment"),
        ("/1/1/1\n", "not a hexadecimal"),
        ("\n/1/1/1", "no / before"),
        ("/0x1/1/1", "not a hexadecimal"),
        ("/1_0/1/1", "not a hexadecimal"),
        ("/ 1/1/1", "not a hexadecimal"),
        ("/-1/1/1", "not a hexadecimal"),
        ("/\u0661/1/1", "not a hexadecimal"),
        ("/100000000/1/1", "32 bits"),
        ("/1/100/1", "8 bits"),
        ("/1/1/10000", "16 bits"),
        ("//Host/1/1/1", "upper-case"),
        ("//host:80/1/1/1", "a character"),
        ("//me@host/1/1/1", "a character"),
        ("//ho*st/1/1/1", "whole authority"),
        ("//" + "a" * 129 + "/1/1/1", "128 characters"),
        ("//[::1/1/1/1", "a character"),
        ("//[]/1/1/1", "IPv6"),
        ("//[fe80::1%eth0]/1/1/1", "zone"),
        ("//[::1]:80/1/1/1", "a character"),
    ],
)
def test_a_refusal_says_which_rule(text: str, rule: str) -> None:
    with pytest.raises(InvalidUUri, match=rule):
        UUri.parse(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"ue_id": 1 << 32},
        {"ue_id": -1},
        {"ue_version_major": 256},
        {"resource_id": 65536},
        {"authority_name": "A"},
        {"authority_name": "a/b"},
        {"authority_name": "a\n"},
    ],
)
def test_an_address_that_breaks_a_rule_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidUUri):
        UUri(**fields)
    with pytest.raises(InvalidUUri):
        UUri().replace(**fields)
    made: dict[str, Any] = {
        "authority_name": "",
        "ue_id": 0,
        "ue_version_major": 0,
        "resource_id": 0,
    }
    made |= fields
    assert UUri.unchecked(*made.values()).problem is not None


@pytest.mark.parametrize(
    ("resource", "kinds"),
    [
        (0, {"is_rpc_response", "is_notification_destination"}),
        (1, {"is_rpc_method"}),
        (0x7FFF, {"is_rpc_method"}),
        (0x8000, {"is_topic", "is_event"}),
        (0xFFFE, {"is_topic", "is_event"}),
        (0xFFFF, {"has_wildcard_resource_id", "has_wildcard"}),
    ],
)
def test_a_resource_says_what_an_address_is(resource: int, kinds: set[str]) -> None:
    uri = UUri("a", 1, 1, resource)
    names = [name for name in dir(UUri) if name.startswith(("is_", "has_"))]
    assert {name for name in names if getattr(uri, name)} == kinds | {"is_valid"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("//*/1/1/1", "has_wildcard_authority"),
        ("/FFFF/1/1", "has_wildcard_service_id"),
        ("/FFFF0001/1/1", "has_wildcard_instance_id"),
        ("/1/FF/1", "has_wildcard_version"),
        ("/1/1/FFFF", "has_wildcard_resource_id"),
    ],
)
def test_each_wildcard_is_told_from_the_others(text: str, name: str) -> None:
    uri = UUri.parse(text)
    names = [name for name in dir(UUri) if name.startswith("has_wildcard_")]
    assert [found for found in names if getattr(uri, found)] == [name]
    assert uri.has_wildcard


def test_an_entity_has_a_type_and_an_instance() -> None:
    uri = UUri.parse("/1A40101/1/8000")
    assert (uri.service_id, uri.instance_id) == (0x101, 0x1A4)


def test_an_address_without_authority_is_local() -> None:
    assert UUri().is_empty
    assert str(UUri()) == "up:/0/0/0"
    local = UUri.parse("/1/1/8000")
    assert local.is_local
    assert not local.is_empty
    assert str(local.resolved("me")) == "up://me/1/1/8000"
    assert str(local.with_authority("you").resolved("me")) == "up://you/1/1/8000"
    assert str(local.with_resource(3)) == "up:/1/1/3"


def test_long_texts_are_not_remembered() -> None:
    tracemalloc.start()
    try:
        for number in range(300):
            long = f"{number}" + "a" * 100_000
            with pytest.raises(InvalidUUri, match="128"):
                UUri.parse(f"//{long}/1/1/1")
            assert UUri.unchecked(long, 1, 1, 1).problem is not None
            assert UUri.parse("/" + "0" * 100_000 + f"{number:X}/1/1").ue_id == number
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < 10_000_000  # of 60 MB that went by; the collector may not have been there yet


def test_the_pattern_of_everything_matches_everything() -> None:
    assert str(UUri.ANY) == "up://*/FFFFFFFF/FF/FFFF"
    for text in ("/0/0/0", "//a/20001/3/8000", "//*/FFFFFFFF/FF/FFFF"):
        assert UUri.ANY.matches(UUri.parse(text))


@given(UURI)
def test_text_and_bytes_come_back(uri: UUri) -> None:
    assert UUri.parse(str(uri)) == uri
    assert UUri.parse(uri.without_scheme.lower()) == uri
    assert UUri.from_bytes(uri.to_bytes()) == uri
    again = pickle.loads(pickle.dumps(uri))
    assert again == uri
    assert hash(again) == hash(uri) == hash(UUri.parse(str(uri)))


@given(
    UURI, UURI, st.sets(st.sampled_from(["authority", "type", "instance", "version", "resource"]))
)
def test_a_pattern_matches_what_it_was_made_from(uri: UUri, other: UUri, wild: set[str]) -> None:
    def parts(of: UUri) -> dict[str, object]:
        return {
            "authority": of.authority_name,
            "type": of.service_id,
            "instance": of.instance_id,
            "version": of.ue_version_major,
            "resource": of.resource_id,
        }

    pattern = UUri(
        "*" if "authority" in wild else uri.authority_name,
        (0xFFFF if "instance" in wild else uri.instance_id) << 16
        | (0xFFFF if "type" in wild else uri.service_id),
        0xFF if "version" in wild else uri.ue_version_major,
        0xFFFF if "resource" in wild else uri.resource_id,
    )
    assert pattern.matches(uri)
    any_ = {
        "authority": "*",
        "type": 0xFFFF,
        "instance": 0xFFFF,
        "version": 0xFF,
        "resource": 0xFFFF,
    }
    mine, its = parts(pattern), parts(other)
    expected = all(mine[name] in (any_[name], its[name]) for name in mine)
    assert pattern.matches(other) is expected


def test_the_digits_of_an_ipv6_address_may_be_of_either_case_and_are_written_small() -> None:
    text = "//[2001:DB8::1]/1/1/1"
    small = UUri("[2001:db8::1]", 1, 1, 1)
    assert UUri.parse(text) == UUri("[2001:DB8::1]", 1, 1, 1) == small
    assert hash(UUri.parse(text)) == hash(small)
    assert str(UUri.parse(text)) == "up://[2001:db8::1]/1/1/1"
    came = small.to_bytes().replace(b"db8", b"DB8")
    assert UUri.from_bytes(came) == small
    assert small.matches(UUri.from_bytes(came))
