from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.core.errors import InvalidOption, InvalidStreamId, StreamIdCollision
from penstock.core.stream_id import StreamId
from penstock.core.stream_names import StreamNames, default_names_file

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

PATH = "cpudist_percore/percpu_hist_map_t"
DASHED = "00101e30-97b1-454b-fcaf-cac30c2235d9"
HEX = "00101e3097b1454bfcafcac30c2235d9"
CONCRETE = ("--path", PATH, "--name", "placeholder", "--device", "1", "--dest", "udp")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["id", *arguments])


def output(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def known() -> list[tuple[str, str]]:
    return list(StreamNames.load(default_names_file()))


# --- making ---------------------------------------------------------------------------------


def test_generate_prints_both_forms_and_remembers_the_names() -> None:
    assert output("generate", *CONCRETE).split() == [DASHED, HEX]
    assert known() == [(PATH, "placeholder")]


def test_generate_does_not_remember_when_told_not_to() -> None:
    output("generate", *CONCRETE, "--no-register")
    assert known() == []


def test_generate_prints_json_with_every_field() -> None:
    assert json.loads(output("generate", *CONCRETE, "--ver", "2", "--json")) == {
        "id": "08101e30-97b1-454b-fcaf-cac30c2235d9",
        "hex": "08101e3097b1454bfcafcac30c2235d9",
        "ver": 2,
        "fwd_dst": 2,
        "device_id": 1,
        "path": "38c25ec5152ff2",
        "name": "2fcac30c2235d9",
    }


def test_generate_leaves_open_what_is_omitted_and_does_not_remember_a_request() -> None:
    everything = StreamId.generate(None, None, None, None)
    assert output("generate").split() == [str(everything), everything.hex()]
    output("generate", "--path", PATH, "--name", "placeholder")
    assert known() == []


@pytest.mark.parametrize(
    ("text", "number"), [("none", 1), ("UDP", 2), ("any", 127), ("4", 4), ("0", 0)]
)
def test_a_destination_is_a_word_or_a_number(text: str, number: int) -> None:
    assert json.loads(output("generate", "--dest", text, "--json"))["fwd_dst"] == number


def test_a_destination_of_any_other_kind_is_an_error() -> None:
    assert isinstance(run("generate", "--dest", "tcp").exception, InvalidOption)
    assert isinstance(run("generate", "--dest", "128").exception, InvalidStreamId)
    assert isinstance(run("generate", "--device", "-1").exception, InvalidStreamId)


def test_a_name_that_collides_is_an_error_and_prints_no_id() -> None:
    output("app", "an_app_name", "one")
    result = run("app", "an_app_name", "nne")
    assert isinstance(result.exception, StreamIdCollision)
    assert result.stdout == ""
    assert known() == [("an_app_name", "one")]


def test_a_short_name_is_advised_against_apart_from_the_output() -> None:
    result = run("app", "an_app_name", "one")
    assert "short names" in result.stderr
    assert len(result.stdout.split()) == 2


def test_codelet_builds_the_path_and_forwards_nowhere_by_default() -> None:
    arguments = ("codelet", "AdvancedExample1", "data_generator_codeletset", "codelet", "ringbuf")
    assert "0008139ccb59f5f191349d5613ddc6cf" in output(*arguments, "--device", "1")
    forwarded = output(*arguments, "--device", "1", "--dest", "udp", "--json")
    assert json.loads(forwarded)["fwd_dst"] == 2
    assert known() == [
        ("AdvancedExample1://jbpf_agent/data_generator_codeletset/codelet", "ringbuf")
    ]


def test_app_makes_a_stream_of_the_controller() -> None:
    assert "00080bac340fe85b828535a45b791b67" in output(
        "app", "AdvancedExample1://intraapp", "buffer_input"
    )


# --- explaining -----------------------------------------------------------------------------


def test_explain_shows_the_texts_of_a_known_id() -> None:
    output("generate", *CONCRETE)
    shown = output("explain", HEX.upper())
    for expected in (DASHED, "udp", "device 1", "38c25ec5152ff2", PATH, "placeholder"):
        assert expected in shown
    assert "cannot be read back" not in shown


def test_explain_says_in_two_lines_why_a_text_is_not_known() -> None:
    shown = output("explain", DASHED)
    assert shown.count("not known") == 2
    assert "cannot be read back" in shown.splitlines()[-2]
    assert "penstock id generate" in shown.splitlines()[-1]


def test_explain_of_a_request_says_any_and_needs_no_hint() -> None:
    shown = output("explain", StreamId.generate(None, 0, None, None).hex())
    assert shown.count("any") == 3
    assert "the controller" in shown
    assert "not known" not in shown


def test_explain_shows_brackets_in_a_path_as_they_are() -> None:
    made = output("app", "[bold]an app[/bold]", "some stream")
    assert "[bold]an app[/bold]" in output("explain", made.split()[0])


def test_explain_prints_json_with_the_words() -> None:
    output("generate", *CONCRETE)
    explained = json.loads(output("explain", DASHED, "--json"))
    assert explained["hex"] == HEX
    assert explained["destination"] == "udp"
    assert explained["device"] == "device 1"
    assert explained["path_text"] == PATH
    assert explained["name_text"] == "placeholder"


def test_explain_of_what_is_not_an_id_is_an_error() -> None:
    assert isinstance(run("explain", "{" + DASHED + "}").exception, InvalidStreamId)


# --- matching and listing -------------------------------------------------------------------


def test_match_succeeds_when_the_router_delivers() -> None:
    result = run("match", HEX, StreamId.generate(2, None, None, None).hex())
    assert result.exit_code == 0
    assert result.stdout.count("does not match") == 0


def test_match_fails_when_only_the_mask_matches() -> None:
    result = run("match", HEX, StreamId.generate(3, 1, PATH, "placeholder").hex())
    router, mask = result.stdout.splitlines()
    assert result.exit_code == 1
    assert "does not match" in router
    assert "does not match" not in mask


def test_names_lists_what_is_known() -> None:
    assert "No names" in output("names")
    output("generate", *CONCRETE)
    listed = output("names")
    assert PATH in listed
    assert "placeholder" in listed
