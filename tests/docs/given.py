"""What the pages speak of and do not make: pulses, beams, stores, programs of others."""

from __future__ import annotations

import shutil
import struct
from typing import TYPE_CHECKING

from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from docs.blocks import ROOT, yaml_blocks
from penstock import open_writer
from penstock.protocols.psi.store.streams import Store
from penstock.radar.beams import batch_from_beams
from protocols.jrtc.forwarded import EXAMPLE, LIMITS
from support.pulses import scan
from support.radar_volumes import volume

if TYPE_CHECKING:
    from collections.abc import Callable

    from docs.machine import Machine


def example(source: str, name: str) -> Callable[[Machine], None]:
    """Have a copy of an example's file."""

    def copy(machine: Machine) -> None:
        text = (ROOT / "examples" / source).read_text()
        (machine.folder / name).write_text(machine.here(text))

    return copy


def page_yaml(page: str, name: str, number: int = 0) -> Callable[[Machine], None]:
    """Have a YAML file of a page."""

    def write(machine: Machine) -> None:
        (machine.folder / name).write_text(machine.here(yaml_blocks(page)[number]))

    return write


def program(name: str) -> Callable[[Machine], None]:
    """Have a program of somebody else's that does nothing, and is content."""

    def write(machine: Machine) -> None:
        path = machine.folder / "bin" / name
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)

    return write


def graph_of_words(machine: Machine) -> None:
    """Have the page's graph, and its workers."""
    page_yaml("graphs", "words.yaml")(machine)
    for name in ("words.py", "shout.sh"):
        shutil.copy(ROOT / "examples/graphs" / name, machine.folder)


def pulses(machine: Machine) -> None:
    """Have the packets of a radar in a queue and in files."""
    for place in ("iwrf+fmq:/tmp/fmq/ts", "iwrf:/data/time_series", "iwrf:/data/ts"):
        with open_writer(machine.here(place)) as writer:
            writer.write_many(scan(300))


def beams(machine: Machine) -> None:
    """Have two volumes of beams in a log."""
    with open_writer(machine.here("log:/data/beams")) as writer:
        for number in (1, 2):
            writer.write_batch(batch_from_beams(volume(number)))


def psi_stores(machine: Machine) -> None:
    """Have a store of psi's kind of folder, and one of a rig, with a stream of floats each."""
    for name, subdirectory in (("Session", True), ("rig", False)):
        with Store.create(machine.folder / "data", name, subdirectory=subdirectory) as store:
            floats = store.add_stream("Floats", "float")
            for number in range(5):
                store.append(floats.id, struct.pack("<f", number))
            store.end_streams()


def protobuf_beams(machine: Machine) -> None:
    """Have `beam.desc`, as protoc writes it, and a log of such messages."""
    file = FileDescriptorProto(name="beam.proto", package="radar", syntax="proto3")
    message = file.message_type.add(name="Beam")
    message.field.add(
        name="azimuth", number=1, type=FieldDescriptorProto.TYPE_FLOAT,
        label=FieldDescriptorProto.LABEL_OPTIONAL,
    )  # fmt: skip
    described = FileDescriptorSet(file=[file]).SerializeToString()
    (machine.folder / "beam.desc").write_bytes(described)
    with open_writer(machine.here("log:/data/beams")) as writer:
        writer.write_many([b"\x0d" + struct.pack("<f", number) for number in range(5)])


def routed_streams(machine: Machine) -> None:
    """Have the schemas of the page on routed streams."""
    (machine.folder / "example.pb").write_bytes(EXAMPLE)
    (machine.folder / "example.options").write_text(
        "".join(f"{field} max_size:{limit['max_size']}\n" for field, limit in LIMITS.items())
    )


#: The names that the page on routed streams speaks of, and the rig that its app listens to.
NAMES_OF_STREAMS = """
import struct, threading, time
from penstock import InputStream, Message, OutputStream, StreamId
from penstock.core.batch import batch_from_messages
from penstock.core.stream_id import id_for_app
from penstock.workers.apps import Output, Target

stream = StreamId.parse("001017f954859297d8911d6ebe00edfc")
other = StreamId.parse("001017f954859297d8911d6ebe00edff")
payload = bytes.fromhex("0807120275701a0308ac02")
batch = batch_from_messages([Message(0, 0, 0, 0, 0, stream, None, payload)])
commands = id_for_app("my_app", "commands")


def rig() -> None:
    heater = Target(path="rig://heater", name="commands", device=3).stream
    sensors = Output(path="rig://sensors", name="temperature").stream
    with (
        InputStream.create(heater, owner="heater") as taken,
        InputStream.create(commands, owner="my_app"),
        OutputStream.create(sensors, owner="sensors") as measured,
    ):
        while True:
            measured.write(struct.pack("<d", 90.0))
            print(taken.read(timeout=0.1))


threading.Thread(target=rig, daemon=True).start()
time.sleep(0.5)
"""
