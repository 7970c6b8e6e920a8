"""Which deployments are understood, and which are refused, with the line and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.core.errors import ConfigError, ConfigErrors
from penstock.core.stream_id import StreamId, id_for_codelet
from penstock.queue.stream_directory import StreamKind
from penstock.workers.deployment import Deployment, load_deployment
from penstock.workers.rollout import codelet_set_request

CODELETS = """\
codeletset_id: counter_set
codelet_descriptor:
  - codelet_name: counter
    codelet_path: ${NOWHERE}/counter.o
    hook_name: test1
    priority: 2
    out_io_channel:
      - name: telemetry_one
        forward_destination: DestinationUDP
        serde:
          file_path: ${NOWHERE}/counter:telemetry_serializer.so
          protobuf: {package_path: counter.pb, msg_name: telemetry}
      - name: telemetry_two
        forward_destination: DestinationUDP
        serde:
          protobuf: {package_path: counter.pb, msg_name: telemetry}
    in_io_channel:
      - name: commands
  - codelet_name: second
    codelet_path: second.o
    hook_name: test2
    linked_maps:
      - {map_name: a, linked_codelet_name: counter, linked_map_name: b}
"""
DEPLOYMENT = """\
name: ${NAME}
decoder:
  - port: 20789
app:
  - name: app1
    path: app1.py
    type: python
    port: 3001
    ioq_size: 50
    deadline: 10ms
    params: {rate: 5}
    modules: [more.py]
jbpf:
  device:
    - id: 1
      port: 8080
    - id: 2
      ip: 127.0.0.2
  codelet_set:
    - device: 1
      config: codelets.yaml
    - device: 2
      config: codelets.yaml
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NAME", "Example")
    monkeypatch.delenv("NOWHERE", raising=False)
    (tmp_path / "codelets.yaml").write_text(CODELETS)
    (tmp_path / "deployment.yaml").write_text(DEPLOYMENT)
    return tmp_path


def load(folder: Path) -> Deployment:
    return load_deployment(folder / "deployment.yaml")


def test_channels_get_the_ids_of_the_original(folder: Path) -> None:
    deployment = load(folder)
    assert deployment.name == "Example"
    ids = {channel.label: channel.stream for channel in deployment.channels}
    assert len(ids) == 6

    def stream(channel: str, device: int, fwd_dst: int) -> StreamId:
        return id_for_codelet("Example", "counter_set", "counter", channel, device, fwd_dst)

    assert ids["1/counter_set/counter/telemetry_one/output"] == stream("telemetry_one", 1, 2)
    assert ids["2/counter_set/counter/telemetry_two/output"] == stream("telemetry_two", 2, 2)
    assert ids["2/counter_set/counter/commands/input"] == stream("commands", 2, 1)
    app = deployment.apps[0]
    assert app.path == folder / "app1.py"
    assert app.modules == (folder / "more.py",)
    assert (app.ioq_size, app.deadline, app.params) == (50, 0.01, {"rate": 5})
    assert deployment.device_addresses == {1: "127.0.0.1:8080", 2: "127.0.0.2:0"}
    assert deployment.forward == {2: "jrtc+udp://127.0.0.1:20788"}


def test_a_reverse_proxy_gets_the_request_of_the_original(folder: Path) -> None:
    deployment = load(folder)
    device, codelets = deployment.codelet_sets[0]
    ids = {c.label: c.stream.hex() for c in deployment.channels}
    # The device puts its own environment into paths of its own.
    assert codelet_set_request(codelets, deployment, device.id) == {
        "codelet_descriptor": [
            {
                "codelet_path": "${NOWHERE}/counter.o",
                "hook_name": "test1",
                "in_io_channel": [
                    {"name": "commands", "stream_id": ids["1/counter_set/counter/commands/input"]}
                ],
                "codelet_name": "counter",
                "out_io_channel": [
                    {
                        "name": "telemetry_one",
                        "stream_id": ids["1/counter_set/counter/telemetry_one/output"],
                        "serde": {"file_path": "${NOWHERE}/counter:telemetry_serializer.so"},
                    },
                    {
                        "name": "telemetry_two",
                        "stream_id": ids["1/counter_set/counter/telemetry_two/output"],
                        "serde": {"file_path": ""},
                    },
                ],
                "priority": 2,
            },
            {
                "codelet_path": "second.o",
                "hook_name": "test2",
                "linked_maps": [
                    {"linked_codelet_name": "counter", "linked_map_name": "b", "map_name": "a"}
                ],
                "codelet_name": "second",
            },
        ],
        "codeletset_id": "counter_set",
    }


def test_files_of_one_name_are_one_deployment(folder: Path) -> None:
    (folder / "more.yaml").write_text(
        "name: Example\napp:\n  - {name: app2, path: app2, type: c}\nforward:\n  4: log:/tmp/x\n"
    )
    deployment = load_deployment(folder / "deployment.yaml", folder / "more.yaml")
    assert [app.name for app in deployment.apps] == ["app1", "app2"]
    assert deployment.forward[4] == "log:/tmp/x"
    (folder / "more.yaml").write_text("name: Other\n")
    with pytest.raises(ConfigError, match="should be") as caught:
        load_deployment(folder / "deployment.yaml", folder / "more.yaml")
    assert caught.value.line == 1


def test_destinations_have_the_originals_other_names_too(folder: Path) -> None:
    before = load(folder)
    text = CODELETS.replace("DestinationUDP", "JRTC_ROUTER_DEST_UDP")
    (folder / "codelets.yaml").write_text(text)
    assert [each.stream for each in load(folder).channels] == [
        each.stream for each in before.channels
    ]
    result = CliRunner().invoke(app, ["jrtc", "streamid", "-d", "JRTC_ROUTER_DEST_UDP"])
    assert result.output == CliRunner().invoke(app, ["jrtc", "streamid", "-d", "2"]).output
    assert result.exit_code == 0


def test_a_channel_that_goes_nowhere_is_told_with_its_codelet_set(folder: Path) -> None:
    text = CODELETS.replace("set_id: counter_set", "set_id: other_set").replace(
        "telemetry_two\n        forward_destination: DestinationUDP",
        "telemetry_two\n        forward_destination: 8",
    )
    (folder / "others.yaml").write_text(text)
    (folder / "deployment.yaml").write_text(DEPLOYMENT + "    - {device: 2, config: others.yaml}\n")
    (folder / "more.yaml").write_text("name: Example\n")
    with pytest.raises(ConfigError, match="telemetry_two goes to 8") as caught:
        load_deployment(folder / "deployment.yaml", folder / "more.yaml")
    fault = caught.value
    assert fault.file == str(folder / "deployment.yaml")
    assert (fault.line, fault.field) == (DEPLOYMENT.count("\n") + 1, "jbpf.codelet_set[2]")


def test_a_deployment_needs_no_devices(folder: Path) -> None:
    (folder / "deployment.yaml").write_text("name: Plain\n")
    assert load(folder).channels == ()


@pytest.mark.parametrize(
    ("before", "after", "line", "field", "reason"),
    [
        ("id: 2", "id: 0", 17, "jbpf.device[1].id", "0 is the controller"),
        ("id: 2", "id: 127", 17, "jbpf.device[1].id", "127 means any device"),
        ("id: 2", "id: 130", 17, "jbpf.device[1].id", "from 1 to 126"),
        ("id: 2", "id: 1", 15, "jbpf.device", "device 1 is there 2 times"),
        ("device: 2", "device: 3", 22, "jbpf.codelet_set[1].device", "there is no device 3"),
        ("    - id: 2\n", "    - id: 2\n    - id: 3\n", 18, None, "no codelet set is on device 3"),
        ("config: ", "config: no/", 23, "jbpf.codelet_set[1].config", "there is no file"),
        ("name: app1", "name: a/b", 5, "app[0].name", "not a name of an app"),
        ("type: python", "type: wasm", 7, "app[0].type", "'c' or 'python'"),
        ("deadline: 10ms", "deadline: soon", 10, "app[0].deadline", "soon"),
        ("port: 20789", "port: 70000", 3, "decoder[0].port", "65535"),
        ("decoder:", "decoders:", 2, "decoders", "unknown key"),
        ("${NAME}", "${UNSET_NAME}", 1, "name", "UNSET_NAME is not set"),
        ("device: 2", "device: 1", None, None, "is there 2 times|already"),
    ],
)
def test_a_deployment_that_is_wrong_is_refused_with_the_line(
    folder: Path, before: str, after: str, line: int | None, field: str | None, reason: str
) -> None:
    file = folder / "deployment.yaml"
    file.write_text(after.join(DEPLOYMENT.rsplit(before, 1)))
    error = refused(file, reason)
    if line is not None:
        assert error.line == line
    if field is not None:
        assert error.field == field


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("telemetry_two", "telemetry_one", "telemetry_one is there 2 times"),
        ("DestinationUDP", "DestinationAny", "is for requests"),
        ("DestinationUDP", "DestinationE2", "integer"),
        ("DestinationUDP", "4", "no URL for it"),
        (
            "      - name: commands",
            "      - {name: commands, forward_destination: 2}",
            "is an input",
        ),
        ("      - name: commands", "      - {name: one}\n      - {name: nne}", "have the same id"),
        ("codelet_name: second", "codelet_name: counter", "codelet counter is there 2 times"),
        ("linked_codelet_name: counter", "linked_codelet_name: third", "not loaded before it"),
        (
            "        serde:\n          protobuf: {package_path: counter.pb, msg_name: telemetry}\n",
            "",
            "telemetry_two is forwarded, which needs serde.protobuf",
        ),
    ],
)
def test_a_codelet_set_that_is_wrong_is_refused(
    folder: Path, before: str, after: str, reason: str
) -> None:
    assert before in CODELETS
    (folder / "codelets.yaml").write_text(after.join(CODELETS.rsplit(before, 1)))
    error = refused(folder / "deployment.yaml", reason)
    assert error.line is not None


def refused(file: Path, reason: str) -> ConfigError:
    with pytest.raises(ConfigError, match=reason) as caught:
        load_deployment(file)
    error: Any = caught.value
    return error.errors[0] if isinstance(error, ConfigErrors) else error


def test_input_and_output_channels_may_share_a_name(folder: Path) -> None:
    (folder / "codelets.yaml").write_text(CODELETS.replace("name: commands", "name: telemetry_one"))
    kinds = {c.kind for c in load(folder).channels if c.spec.name == "telemetry_one"}
    assert kinds == {StreamKind.INPUT, StreamKind.OUTPUT}


def test_channels_that_a_program_could_not_tell_apart_are_refused(folder: Path) -> None:
    (folder / "codelets.yaml").write_text(CODELETS.replace("telemetry_two", "Telemetry_One"))
    assert len(load(folder).channels) == 6  # for apps in Python they are two
    file = folder / "deployment.yaml"
    file.write_text(DEPLOYMENT.replace("type: python", "type: c"))
    error = refused(file, "PENSTOCK_QUEUE_1_COUNTER_SET_COUNTER_TELEMETRY_ONE_OUTPUT")
    assert error.field == "jbpf.codelet_set[0]"
