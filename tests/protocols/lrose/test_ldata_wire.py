"""Requests to DsLdataServer and its replies: the bytes of a recorded session."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import Malformed
from penstock.protocols.lrose import sku
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.ldata_wire import MESSAGE_TYPE, Arguments, LdataMessage, Mode

WIRE = Path(__file__).parents[2] / "vectors" / "lrose" / "wire"


def frames(name: str) -> list[sku.Frame]:
    return sku.Decoder(1 << 20).feed((WIRE / name).read_bytes())


@pytest.mark.parametrize("name", ["ldata_01.c2s", "ldata_01.s2c"])
def test_a_recorded_session_is_made_again_from_what_was_read(name: str) -> None:
    again = b""
    for frame in frames(name):
        message = LdataMessage.from_message(DsMessage.from_bytes(frame.payload))
        id = Mode.REPLY if name.endswith("s2c") else MESSAGE_TYPE
        again += sku.encode(sku.Frame(id, frame.seq, message.to_message().to_bytes()))
    assert again == (WIRE / name).read_bytes()


def test_what_a_recorded_client_asked_for_is_understood() -> None:
    asked = [
        LdataMessage.from_message(DsMessage.from_bytes(frame.payload))
        for frame in frames("ldata_01.c2s")
    ]
    assert [message.mode for message in asked] == [Mode.OPEN, Mode.WRITE, Mode.CLOSE]
    opened, write, _ = asked
    assert opened.url == "ldatap:://127.0.0.2::mdv/remote"
    assert opened.arguments == Arguments()
    assert write.info is not None
    assert write.info.rel_data_path == "20240201/000000.mdv"
    assert write.info.writer == "RemoteW"


texts = st.text(
    st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="<>"), max_size=20
)
arguments = st.builds(
    Arguments,
    displacedDirPath=texts,
    ldataFileName=texts,
    useXml=st.booleans(),
    useAscii=st.booleans(),
    saveLatestReadInfo=st.booleans(),
    latestReadInfoLabel=texts,
    useFmq=st.booleans(),
    fmqNSlots=st.integers(-10, 10**6),
    readFmqFromStart=st.booleans(),
)


@given(arguments)
def test_the_arguments_of_opening_travel(said: Arguments) -> None:
    assert Arguments.from_xml(said.to_xml(Mode.OPEN)) == said


@given(st.integers(-1, 10**6), st.booleans())
def test_the_age_and_the_force_of_a_read_travel(age: int, forced: bool) -> None:
    said = Arguments(maxValidAge=age, readForced=forced)
    assert Arguments.from_xml(said.to_xml(Mode.READ)) == said


def test_arguments_that_say_nothing_have_the_defaults_of_lrose() -> None:
    assert Arguments.from_xml(b"<DsLdataMsg></DsLdataMsg>") == Arguments()
    assert Arguments.from_xml(b"<useXml>maybe</useXml><fmqNSlots>x</fmqNSlots>") == Arguments()


@pytest.mark.parametrize("no", ["false", "FALSE", " no ", "NO", "0"])
def test_a_truth_is_told_in_all_of_lroses_words(no: str) -> None:
    found = Arguments.from_xml(f"<useXml>{no}</useXml>".encode())
    assert found == Arguments(useXml=False)
    yes = {"false": "true", "FALSE": "TRUE", " no ": "\nyes ", "NO": "YES", "0": "1"}[no]
    found = Arguments.from_xml(f"<saveLatestReadInfo>{yes}</saveLatestReadInfo>".encode())
    assert found == Arguments(saveLatestReadInfo=True)


def test_an_error_is_told_by_its_text() -> None:
    reply = LdataMessage(mode=Mode.REPLY, error="no such directory")
    assert LdataMessage.from_message(reply.to_message()) == reply


@pytest.mark.parametrize("message", [DsMessage(43001), DsMessage(MESSAGE_TYPE, 0, 12)])
def test_other_messages_are_refused(message: DsMessage) -> None:
    with pytest.raises(Malformed):
        LdataMessage.from_message(message)
