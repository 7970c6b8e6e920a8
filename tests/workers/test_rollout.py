"""Schemas of a deployment reach a collector, every stream's."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import InvalidOption, PenstockError
from penstock.core.stream_id import StreamId
from penstock.protocols.jrtc.collector import Collector, CollectorOptions
from penstock.workers.deployment import Deployment, load_deployment
from penstock.workers.rollout import Refused, Rollout, schemas_of

pytestmark = pytest.mark.usefixtures("directory")

CODELETS = """\
codeletset_id: a_set
codelet_descriptor:
  - codelet_name: codelet
    codelet_path: x.o
    hook_name: h
    out_io_channel:
      - name: telemetry one
        forward_destination: DestinationUDP
        serde: {protobuf: {package_path: load.pb, msg_name: MESSAGE}}
      - name: telemetry two
        forward_destination: DestinationUDP
        serde: {protobuf: {package_path: load.pb, msg_name: MESSAGE}}
"""


def deployment(folder: Path, decoder: str, message: str = "telemetry") -> Deployment:
    descriptors = pytest.importorskip("google.protobuf.descriptor_pb2")
    files = descriptors.FileDescriptorSet()
    file = files.file.add(name="load.proto", syntax="proto3")
    file.message_type.add(name="telemetry").field.add(name="count", number=1, type=13, label=1)
    (folder / "load.pb").write_bytes(files.SerializeToString())
    (folder / "codelets.yaml").write_text(CODELETS.replace("MESSAGE", message))
    path = folder / "deployment.yaml"
    path.write_text(
        f"name: Example\ndecoder: [{decoder}]\njbpf:\n  device: [{{id: 1}}, {{id: 2}}]\n"
        "  codelet_set: [{device: 1, config: codelets.yaml}, {device: 2, config: codelets.yaml}]\n"
    )
    return load_deployment(path)


@pytest.mark.parametrize("kind", ["decodergrpc", "decoderhttp"])
def test_two_streams_with_one_message_both_get_their_schema(tmp_path: Path, kind: str) -> None:
    for library in ("fastapi", "grpc_health", "uvicorn"):
        pytest.importorskip(library)
    with Collector(CollectorOptions(port=0, grpc_port=0, http_port=0)) as collector:
        port = collector.grpc_port if kind == "decodergrpc" else collector.http_port
        deployed = deployment(tmp_path, f"{{type: {kind}, port: {port}}}")
        streams: list[StreamId] = [channel.stream for channel in deployed.channels]
        assert len(set(streams)) == 4
        rollout = Rollout(deployed)
        rollout.load_schemas()
        rollout.load_schemas()  # again is fine
        for stream in streams:
            schema = collector.schemas.find(stream)
            assert schema is not None
            assert (schema.package, schema.message) == ("load", "telemetry")
        rollout.unload_schemas()
        assert collector.schemas.associations() == {}
        forwarded = schemas_of(deployed)
        assert all(forwarded.find(stream) is not None for stream in streams)


@pytest.mark.parametrize("kind", ["decodergrpc", "decoderhttp"])
def test_a_collector_that_refuses_is_told_of(tmp_path: Path, kind: str) -> None:
    for library in ("fastapi", "grpc_health", "uvicorn"):
        pytest.importorskip(library)
    with Collector(CollectorOptions(port=0, grpc_port=0, http_port=0)) as collector:
        port = collector.grpc_port if kind == "decodergrpc" else collector.http_port
        deployed = deployment(tmp_path, f"{{type: {kind}, port: {port}}}", "missing")
        with pytest.raises(Refused, match="missing"):
            Rollout(deployed).load_schemas()
    with pytest.raises(PenstockError):  # nobody is there
        Rollout(deployed, timeout=2.0).load_schemas()


def test_two_descriptor_sets_of_one_name_are_refused_before_a_collector_is_told(
    tmp_path: Path,
) -> None:
    for library in ("fastapi", "grpc_health", "uvicorn"):
        pytest.importorskip(library)
    deployment(tmp_path, "")
    other = tmp_path / "other"
    other.mkdir()
    deployment(other, "")
    changed = (other / "load.pb").read_bytes().replace(b"count", b"other")
    (other / "load.pb").write_bytes(changed)
    (other / "codelets.yaml").write_text(
        CODELETS.replace("a_set", "b_set").replace("MESSAGE", "telemetry")
    )
    with Collector(CollectorOptions(port=0, grpc_port=0)) as collector:
        (tmp_path / "deployment.yaml").write_text(
            f"name: Example\ndecoder: [{{type: decodergrpc, port: {collector.grpc_port}}}]\njbpf:\n"
            "  device: [{id: 1}]\n  codelet_set:\n"
            "    - {device: 1, config: codelets.yaml}\n"
            "    - {device: 1, config: other/codelets.yaml}\n"
        )
        deployed = load_deployment(tmp_path / "deployment.yaml")
        for load in (lambda: schemas_of(deployed), Rollout(deployed).load_schemas):
            with pytest.raises(InvalidOption, match=r"other/load\.pb.*package load"):
                load()
        assert collector.schemas.associations() == {}
