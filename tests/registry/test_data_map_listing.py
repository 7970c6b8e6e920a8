"""What PrintDataMap prints, to the character."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from penstock.protocols.lrose.datamapper_wire import NO_LEAD, DataSetInfo
from penstock.registry.data_map_listing import Columns, listed, plain, size, table, xml

#: 2024-01-15 12:00:00
BASE = 1705320000
RADAR = DataSetInfo(
    start_time=BASE - 86400,
    end_time=BASE,
    latest_time=BASE,
    last_reg_time=BASE + 30,
    nfiles=1234.0,
    total_bytes=5_600_000.0,
    forecast_lead_time=NO_LEAD,
    check_time=BASE + 90,
    hostname="vm",
    ipaddr="127.0.0.1",
    datatype="mdv",
    dir="mdv/radar",
    status="good",
)
FORECAST = DataSetInfo(
    latest_time=BASE,
    forecast_lead_time=3600,
    last_reg_time=BASE + 90,
    check_time=BASE + 90,
    hostname="vm",
    ipaddr="127.0.0.1",
    datatype="spdb",
    dir="spdb/fcst",
)
BOTH = [RADAR, FORECAST]


def test_plain_is_the_count_and_a_line_each() -> None:
    assert plain(BOTH) == (
        "2\n"
        "mdv mdv/radar vm 127.0.0.1 1705320000 -1 1705320030 1705233600 1705320000 1234 5.6e+06\n"
        "spdb spdb/fcst vm 127.0.0.1 1705320000 3600 1705320090 0 0 0 0\n"
    )


def test_plain_counts_also_those_that_are_not_shown() -> None:
    assert plain(BOTH, []) == "2\n"


def test_xml_has_an_element_for_each_field() -> None:
    assert xml([RADAR], "localhost") == (
        '<monitored hostname="localhost">\n'
        '  <dataset hostname="localhost" datatype="mdv" dir="mdv/radar">\n'
        "    <monitor_time>1705320090</monitor_time>\n"
        "    <latest_time>1705320000</latest_time>\n"
        "    <forecast_lead_time>-1</forecast_lead_time>\n"
        "    <last_reg_time>1705320030</last_reg_time>\n"
        "    <start_time>1705233600</start_time>\n"
        "    <end_time>1705320000</end_time>\n"
        "    <nfiles>1234</nfiles>\n"
        "    <total_bytes>5.6e+06</total_bytes>\n"
        "  </dataset>\n"
        "</monitored>\n"
    )


def test_xml_of_a_strange_directory_is_still_xml() -> None:
    strange = DataSetInfo(dir='a "b" <c> & d', datatype="x")
    (found,) = ET.fromstring(xml([strange], "h&i"))
    assert found.get("dir") == 'a "b" <c> & d'
    assert found.get("hostname") == "h&i"


def test_nothing_that_was_registered_drives_a_terminal() -> None:
    evil = DataSetInfo(dir="a\x1b[2J\nb\udcff", datatype="ü", hostname="h", status="\x07")
    expected = r"a\x1b[2J\x0ab\xff"
    assert plain([evil]).splitlines()[1].startswith(f"ü {expected} h ")
    (found,) = ET.fromstring(xml([evil], "h"))
    assert found.get("dir") == expected
    assert table([evil], [evil], Columns(status=True), "h", 0).splitlines()[5].split() == [
        "ü", expected, "h", r"\x07",
    ]  # fmt: skip


def test_a_table_has_the_columns_asked_for() -> None:
    wanted = Columns(latest=True, dates=True, size=True)
    lines = table(BOTH, BOTH, wanted, "localhost", 0).split("\n")
    assert [line[:64] for line in lines] == [
        "",
        "=========== Data on host 'localhost' at time 2024/01/15 12:01:30",
        "",
        "DataType  Dir        HostName           Latest time  FcastLead  ",
        "========  ===        ========           ===========  =========  ",
        "mdv       mdv/radar  vm         2024/01/15-12:00:00             ",
        "spdb      spdb/fcst  vm         2024/01/15-12:00:00  +01:00:00  ",
        " " * 64,
        " " * 64,
        "",
        "",
    ]
    assert [line[64:] for line in lines[3:9]] == [
        "Start date    End date  nFiles  nBytes",
        "==========    ========  ======  ======",
        "2024/01/14  2024/01/15    1.2K    5.6M",
        " " * 38,
        "                        ======  ======",
        "                          1.2K    5.6M",
    ]


def test_times_can_be_relative_to_the_servers_clock() -> None:
    shown = table(BOTH, BOTH, Columns(latest=True, relt=True, lreg=True, ip=True), "h", 0)
    assert shown.splitlines()[3:7] == [
        "DataType  Dir        HostName  IpAddr        Latest  FcastLead   Last reg",
        "========  ===        ========  ======        ======  =========   ========",
        "mdv       mdv/radar  vm        127.0.0.1  -00:01:30             -00:01:00",
        "spdb      spdb/fcst  vm        127.0.0.1  -00:01:30  +01:00:00   00:00:00",
    ]


def test_the_status_comes_last() -> None:
    shown = table([RADAR], [RADAR], Columns(status=True), "h", 0).splitlines()
    assert shown[3:6] == [
        "DataType  Dir        HostName  Status",
        "========  ===        ========  ======",
        "mdv       mdv/radar  vm        good",
    ]


def test_relays_are_named_above_the_table() -> None:
    shown = table([RADAR], [RADAR], Columns(), "gate:inner", 0).splitlines()
    assert "host 'inner'" in shown[1]
    assert shown[2] == "            Relay host list: 'gate:inner'"


def test_an_empty_map_is_said() -> None:
    assert table([], [], Columns(), "h", BASE) == (
        "==== No data sets on host 'h' at time 2024/01/15 12:00:00 ====\n"
    )


def test_only_late_ones_are_listed() -> None:
    late = DataSetInfo(latest_time=BASE - 100)
    assert listed([RADAR, late], later_than=100, now=BASE) == [late]
    assert listed([RADAR, late], later_than=None, now=BASE) == [RADAR, late]
    assert listed([RADAR, late], later_than=-1, now=BASE) == [RADAR, late]


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, ""),
        (0.5, ""),
        (1, "1"),
        (999, "999"),
        (1000, "1.0K"),
        (12_345, "12K"),
        (9_990_000, "10.0M"),
        (123_456_789, "123M"),
        (2e9, "2.0G"),
        (2e11, "200G"),
        (2e12, "2.0T"),
        (2e13, "20T"),
    ],
)
def test_sizes_are_short(number: float, shown: str) -> None:
    assert size(number) == shown
