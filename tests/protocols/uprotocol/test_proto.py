"""The schema is our own, and gets on with others of the same names."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock.protocols.uprotocol import proto

ROOT = Path(proto.__file__).parent


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def fields(message: type) -> dict[str, int]:
    described = message.DESCRIPTOR  # type: ignore[attr-defined]
    return {field.name: field.number for field in described.fields}


def test_messages_have_the_names_that_others_know() -> None:
    names = {
        proto.UUri: "uprotocol.v1.UUri",
        proto.UMessage: "uprotocol.v1.UMessage",
        proto.Subscription: "uprotocol.core.usubscription.v4.Subscription",
        proto.FindServicesResponse: "uprotocol.core.udiscovery.v3.FindServicesResponse",
        proto.GetLastMessagesRequest: "uprotocol.core.utwin.v2.GetLastMessagesRequest",
        proto.GetLastMessagesResponse: "uprotocol.core.utwin.v2.GetLastMessagesResponse",
        proto.CloudEvent: "io.cloudevents.v1.CloudEvent",
        proto.DeadLetter: "penstock.dispatch.v1.DeadLetter",
    }
    for message, name in names.items():
        assert message.DESCRIPTOR.full_name == name
        packed = proto.Any_()
        packed.Pack(message())
        assert packed.type_url == f"type.googleapis.com/{name}"
    assert all(getattr(proto, name) is not None for name in proto.__all__)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (proto.UUri, "authority_name 1 ue_id 2 ue_version_major 3 resource_id 4"),
        (proto.UUriBatch, "uris 1"),
        (proto.UUID, "msb 1 lsb 2"),
        (
            proto.UAttributes,
            (
                "id 1 type 2 source 3 sink 4 priority 5 ttl 6 permission_level 7 commstatus 8 "
                "reqid 9 token 10 traceparent 11 payload_format 12"
            ),
        ),
        (proto.UMessage, "attributes 1 payload 2"),
        (proto.UStatus, "code 1 message 2 details 3"),
        (proto.Subscription, "topic 1 subscriber 2 status 3 expiration 4 sample_period 5"),
        (proto.SubscribeRequest, "topic 1 expiration 2 sample_period 3"),
        (proto.SubscribeResponse, "topic 1 status 2"),
        (proto.UnsubscribeRequest, "topic 1"),
        (proto.FetchSubscriptionsRequest, "topic_filter 1 subscriber_filter 2"),
        (proto.FetchSubscriptionsResponse, "subscriptions 1"),
        (proto.GetLastMessagesRequest, "topics 1"),
        (proto.GetLastMessagesResponse, "responses 2"),
    ],
)
def test_fields_have_the_numbers_of_the_specification(message: type, expected: str) -> None:
    words = expected.split()
    assert fields(message) == dict(zip(words[::2], map(int, words[1::2]), strict=True))


def test_presence_is_as_in_the_specification() -> None:
    described = proto.UAttributes.DESCRIPTOR.fields
    assert {field.name for field in described if not field.has_presence} == {
        "type",
        "priority",
        "payload_format",
    }


def test_another_sdk_in_the_same_process_is_no_conflict() -> None:
    run("""
        from google.protobuf import descriptor_pb2, descriptor_pool
        theirs = descriptor_pb2.FileDescriptorProto(
            name="uprotocol/v1/model.proto", package="uprotocol.v1", syntax="proto3"
        )
        theirs.message_type.add(name="UUri").field.add(
            name="other", number=1, type=5, label=1
        )
        descriptor_pool.Default().Add(theirs)
        descriptor_pool.Default().FindMessageTypeByName("uprotocol.v1.UUri")
        from penstock.protocols.uprotocol import UUri
        assert UUri.from_bytes(UUri("a", 1, 2, 3).to_bytes()) == UUri("a", 1, 2, 3)
    """)


def test_the_librarys_pure_form_refuses_the_same() -> None:
    said = run("""
        import os
        os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
        from google.protobuf.internal import api_implementation
        from penstock.protocols.uprotocol import InvalidMessage, InvalidUUri, UAttributes, UUri
        cases = [(UUri.from_bytes, "0a01ff"), (UAttributes.from_bytes, "5201ff")]
        for read, wrong in cases:
            try:
                read(bytes.fromhex(wrong))
            except (InvalidUUri, InvalidMessage):
                print(api_implementation.Type())
    """)
    assert said.split() == ["python", "python"]


def test_without_protobuf_the_error_names_the_extra() -> None:
    said = run("""
        import sys
        sys.modules["google.protobuf"] = None
        from penstock.core.errors import Unsupported
        try:
            import penstock.protocols.uprotocol
        except Unsupported as error:
            print(error, "|", error.hint)
    """)
    assert said.strip() == (
        "uProtocol needs the protobuf library | pip install 'penstock[uprotocol]'"
    )


def test_the_schema_is_made_from_the_files_beside_it() -> None:
    from google.protobuf import descriptor_pb2

    files = descriptor_pb2.FileDescriptorSet.FromString((ROOT / "schema.binpb").read_bytes()).file
    ours = {file.name: file for file in files if not file.name.startswith("google/")}
    assert set(ours) == {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto")}
    for name, file in ours.items():
        text = (ROOT / name).read_text()
        for message in file.message_type:
            assert f"message {message.name} {{" in text
            for field in message.field:
                assert f" {field.name} = {field.number};" in text
        for enumeration in file.enum_type:
            for value in enumeration.value:
                assert f" {value.name} = {value.number};" in text
