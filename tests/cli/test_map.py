"""`penstock map`, `serve datamapper` and `--register`: real servers on loopback."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner, Result

from cli.command import PENSTOCK, OnTerminal, fill, run
from penstock import PenstockError
from penstock.cli.main import app
from penstock.protocols.lrose.datamapper_client import DataMapClient
from penstock.protocols.lrose.datamapper_wire import DataSetInfo
from penstock.protocols.lrose.ds_server import DsServer
from penstock.registry import DataMapServer, MapServerOptions
from penstock.registry.data_map_server import RelayHost
from registry.map_process import map_process

OLD = 1_700_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[DsServer]:
    with DataMapServer(MapServerOptions(port=0)) as server:
        client = DataMapClient("127.0.0.1", server.port)
        client.register_full(
            [
                DataSetInfo(
                    hostname="vm",
                    ipaddr="10.0.0.7",
                    datatype="mdv",
                    dir="mdv/radar",
                    latest_time=OLD,
                    last_reg_time=OLD,
                    forecast_lead_time=-1,
                    start_time=OLD - 86400,
                    end_time=OLD,
                    nfiles=12.0,
                    total_bytes=5e6,
                    status="good",
                ),
                DataSetInfo(
                    hostname="vm",
                    datatype="spdb",
                    dir="spdb/new",
                    latest_time=int(time.time()),
                    forecast_lead_time=-1,
                ),
            ]
        )
        yield server


def penstock(*arguments: str, **environment: str) -> Result:
    """Run the command in this process, which takes a tenth of the time."""
    return CliRunner().invoke(app, arguments, env=environment)


def shown(server: DsServer, *options: str, **environment: str) -> str:
    here = ("--host", "127.0.0.1", "--port", str(server.port))
    done = penstock("map", *here, *options, **environment)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_map_is_asked_at_the_port_that_lroses_environment_names(server: DsServer) -> None:
    done = penstock("map", "--host", "127.0.0.1", "--plain", DMAP_PORT=str(server.port))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("2\nmdv mdv/radar vm")
    assert shown(server, "--plain", DMAP_PORT="1") == done.stdout, "--port goes first"
    assert penstock("map", DMAP_PORT="many").exit_code == 2


def test_plain_is_as_printdatamap_prints_it(server: DsServer) -> None:
    lines = shown(server, "-plain").splitlines()
    assert lines[:2] == [
        "2",
        f"mdv mdv/radar vm 10.0.0.7 {OLD} -1 {OLD} {OLD - 86400} {OLD} 12 5e+06",
    ]
    assert shown(server, "--plain", "-later_than", "86400").splitlines() == lines[:2]


def test_xml_is_xml(server: DsServer) -> None:
    root = ET.fromstring(shown(server, "-xml"))
    assert root.get("hostname") == "127.0.0.1"
    assert [each.get("dir") for each in root] == ["mdv/radar", "spdb/new"]
    assert root.findtext("dataset/latest_time") == str(OLD)


def test_one_dash_is_as_good_as_two(server: DsServer) -> None:
    one = shown(server, "-all", "-ip", "-status", "-type", "mdv", "-later_than=10", "-debug")
    two = shown(server, "--all", "--ip", "--status", "--type", "mdv", "--later-than", "10")
    assert one.splitlines()[2:] == two.splitlines()[2:]
    assert one.splitlines()[3].split() == [
        "DataType", "Dir", "HostName", "IpAddr", "Latest", "time", "Start", "date", "End", "date",
        "nFiles", "nBytes", "Status",
    ]  # fmt: skip
    assert one.splitlines()[5].split() == [
        "mdv", "mdv/radar", "vm", "10.0.0.7", "2023/11/14-22:13:20", "2023/11/13", "2023/11/14",
        "12", "5.0M", "good",
    ]  # fmt: skip


def test_columns_are_those_asked_for(server: DsServer) -> None:
    assert shown(server).splitlines()[3].split() == ["DataType", "Dir", "HostName"]
    assert shown(server, "-latest").splitlines()[3].split() == [
        "DataType", "Dir", "HostName", "Latest", "time",
    ]  # fmt: skip
    assert shown(server, "-lreg", "-relt", "-dir", "mdv/radar").splitlines()[3].split() == [
        "DataType", "Dir", "HostName", "Latest", "Last", "reg",
    ]  # fmt: skip
    normal = shown(server, "-norm").splitlines()
    assert normal[3].split() == [
        "DataType", "Dir", "HostName", "Latest", "Last", "reg", "Start", "date", "End", "date",
        "nFiles", "nBytes",
    ]  # fmt: skip
    assert re.search(r" -\d+:\d\d:\d\d-\d+:\d\d:\d\d  2023/11/13 ", normal[5])


def test_a_directory_may_be_given_with_the_data_directory(server: DsServer) -> None:
    assert shown(server, "-plain", "-dir", "/data/mdv/radar", DATA_DIR="/data")[0] == "1"
    assert shown(server, "-plain", "-dir", "nothing") == "0\n"
    assert "No data sets on host" in shown(server, "-dir", "nothing")


def test_a_file_is_written_and_said_in_latest_data_info(server: DsServer, tmp_path: Path) -> None:
    off = {"DATA_MAPPER_ACTIVE": "false"}
    assert shown(server, "-xml", "-odir", str(tmp_path / "out"), **off) == ""
    (path,) = (tmp_path / "out").glob("datasets_127.0.0.1_*.xml")
    assert re.fullmatch(r"datasets_127\.0\.0\.1_\d{8}_\d{6}\.xml", path.name)
    assert ET.fromstring(path.read_text()).tag == "monitored"
    latest = (tmp_path / "out" / "_latest_data_info.xml").read_text()
    assert f"<rel_data_path>{path.name}</rel_data_path>" in latest
    shown(server, "-plain", "-odir", "below", DATA_DIR=str(tmp_path), **off)
    assert list((tmp_path / "below").glob("datasets_*.plain"))


def test_it_prints_again_and_again_until_it_is_stopped(server: DsServer) -> None:
    arguments = ["map", "-plain", "-port", str(server.port), "-cont", "0.2"]
    with subprocess.Popen([PENSTOCK, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(9)]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    assert lines[0] == lines[3] == lines[6] == "2\n"


def test_a_terminal_gets_a_live_table(server: DsServer) -> None:
    with OnTerminal("map", "--watch", "--port", str(server.port)) as command:
        command.read_until(b"2 data sets on", times=2)
        command.process.send_signal(signal.SIGINT)
        assert command.exit_code() == 0
    assert b"mdv/radar" in command.seen
    assert b"good" in command.seen
    assert b"=====" not in command.seen


def test_no_map_there_is_one_line() -> None:
    done = run("map", "--port", "1")
    assert done.returncode == 1
    assert b"cannot be reached" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [("-plain", "-xml"), ("-nonsense",), ("-later_than", "x")])
def test_mistakes_of_usage_are_told(arguments: tuple[str, ...]) -> None:
    assert penstock("map", *arguments).exit_code == 2


def test_a_relay_is_asked_through_another_map(server: DsServer) -> None:
    relay = (RelayHost("inner", "127.0.0.1", server.port),)
    with DataMapServer(MapServerOptions(port=0, relay=relay)) as gate:
        through = penstock("map", "-plain", "-host", "127.0.0.1:inner", "-port", str(gate.port))
        assert through.stdout.startswith("2\nmdv mdv/radar")
        refused = penstock("map", "-host", "127.0.0.1:other", "-port", str(gate.port))
        assert "passes no questions on to other" in str(refused.exception)


def test_put_registers_what_it_writes_if_told_to(server: DsServer, tmp_path: Path) -> None:
    there = {"DS_BASE_PORT": str(server.port - 4), "DATA_DIR": str(tmp_path)}
    client = DataMapClient("127.0.0.1", server.port)
    url = f"fmq:{tmp_path}/a"
    try:
        assert penstock("put", url, "--text", "x", **there).exit_code == 0
        assert client.selected("fmq") == ()
        assert penstock("put", url, "--text", "x", "--register", **there).exit_code == 0
        assert [(each.datatype, each.dir) for each in client.selected("fmq")] == [("fmq", "a")]
    finally:
        client.delete("fmq", "all", "all")


def test_cp_registers_what_it_writes_if_told_to(server: DsServer, tmp_path: Path) -> None:
    fill(f"fmq:{tmp_path}/a", 5)
    client = DataMapClient("127.0.0.1", server.port)
    there = {"DS_BASE_PORT": str(server.port - 4), "DATA_DIR": str(tmp_path)}
    copied = penstock("cp", f"fmq:{tmp_path}/a", f"log:{tmp_path}/b", "--register", **there)
    assert copied.exit_code == 0
    try:
        assert [(each.datatype, each.dir) for each in client.selected("log")] == [("log", "b")]
    finally:
        client.delete("log", "all", "all")


def test_registering_without_a_map_only_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put = penstock("put", f"fmq:{tmp_path}/a", "--text", "x", "--register", DS_BASE_PORT="1")
    assert put.exit_code == 0
    assert put.stdout.startswith("1 message written")
    assert "not registered with the data map" in caplog.text


def test_sigterm_stops_the_server_and_the_map_is_kept(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with map_process("--state", str(state)) as server:
        DataMapClient("127.0.0.1", server.port).register_latest("mdv/a", 1)
        assert server.stop(signal.SIGTERM) == 0
    assert "stopped: 1 data sets, 1 requests (1 registered" in server.output
    assert "Traceback" not in server.errors
    assert len(state.read_bytes()) == 864


def test_a_truncated_state_file_is_a_warning_and_ctrl_c_an_end(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_bytes(DataSetInfo(dir="kept").write() + bytes(136))
    with map_process("--state", str(state)) as server:
        assert "1 data sets, kept in" in server.greeting
        assert server.stop(signal.SIGINT) == 0
    assert "is damaged (it ends with 136 bytes of an entry of 864)" in server.errors
    assert (tmp_path / "state.damaged").stat().st_size == 1000
    assert state.read_bytes() == DataSetInfo(dir="kept").write()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--state", "/nowhere/at/all"), "no directory /nowhere/at"),
        (("--purge-age", "soon"), "purge_age"),
        (("--relay", "=x"), "NAME or NAME=HOST:PORT"),
        (("--port", "{port}"), "in use"),
    ],
)
def test_what_is_wrong_with_its_arguments_is_told(
    server: DsServer, arguments: tuple[str, ...], reason: str
) -> None:
    done = penstock(
        "serve", "datamapper", "--port", "0", *(each.format(port=server.port) for each in arguments)
    )
    assert isinstance(done.exception, PenstockError)
    assert reason in f"{done.exception} {done.exception.hint}"


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_a_port_that_there_cannot_be_is_wrong_usage(port: str) -> None:
    assert CliRunner().invoke(app, ["map", "--port", port]).exit_code == 2
