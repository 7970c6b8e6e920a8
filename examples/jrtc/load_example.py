"""A codelet in C, an app that answers it, a forwarder and a collector, from end to end.

    python examples/jrtc/load_example.py

The codelet writes structs into shared memory. The app reads them there, and sends a command back.
The forwarder reads the same, and sends it as protobuf to a collector, which writes JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from google.protobuf import descriptor_pb2

from penstock.protocols.jrtc.collector import Collector, CollectorOptions
from penstock.protocols.jrtc.collector_outputs import JsonOutput

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
PATIENCE = 30.0


def main() -> None:
    """Run all of it until the command has come back, and say what was collected."""
    with TemporaryDirectory(prefix="penstock-jrtc-") as folder:
        build = Path(folder)
        compile_codelet(build / "codelet")
        (build / "load.pb").write_bytes(descriptor_set())
        collected = build / "collected.jsonl"
        options = CollectorOptions(port=0, grpc_port=0)
        with Collector(options, outputs=[JsonOutput(f"json:{collected}")]) as collector:
            environment = {
                **os.environ,
                "BUILD": folder,
                "DATA_PORT": str(collector.port),
                "DECODER_PORT": str(collector.grpc_port),
                "PENSTOCK_STREAMS": str(build / "streams"),
                "PENSTOCK_HOME": str(build / "home"),
            }
            controller = subprocess.Popen(
                [penstock(), "jrtc", "run", str(HERE / "deployment.yaml"), "--port", "0"],
                env=environment,
            )
            try:
                wait_for(lambda: has_answered(collected))
            finally:
                controller.send_signal(signal.SIGTERM)
                code = controller.wait(PATIENCE)
        lines = [json.loads(line) for line in collected.read_text().splitlines()]
        counts = [line["count"] for line in lines]
        print(f"the collector has {len(lines)} messages, the last one is {lines[-1]}")
        print(f"none is missing: {counts == list(range(1, len(counts) + 1))}")
        sys.exit(code)


def has_answered(collected: Path) -> bool:
    """Tell whether the command has come back as telemetry."""
    return collected.exists() and '"intervalUs":2000,' in collected.read_text()


def compile_codelet(program: Path) -> None:
    """Compile the codelet; it needs nothing but one header."""
    include = HERE.parents[1] / "include"
    subprocess.run(
        ["cc", "-std=c11", "-O2", "-I", include, HERE / "codelet.c", "-o", program], check=True
    )


def descriptor_set() -> bytes:
    """Return what `protoc --descriptor_set_out=load.pb load.proto` writes."""
    kinds = descriptor_pb2.FieldDescriptorProto
    files = descriptor_pb2.FileDescriptorSet()
    file = files.file.add(name="load.proto", syntax="proto3")
    message = file.message_type.add(name="telemetry")
    for number, (name, kind) in enumerate(
        (
            ("count", kinds.TYPE_UINT32),
            ("interval_us", kinds.TYPE_UINT32),
            ("load", kinds.TYPE_DOUBLE),
        ),
        1,
    ):
        message.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    return bytes(files.SerializeToString())


def penstock() -> str:
    """Return the command beside this Python."""
    return str(Path(sys.executable).with_name("penstock"))


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it is so, or give up."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("it did not happen")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
