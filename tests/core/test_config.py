from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BeforeValidator, Field

from penstock.core.config import ConfigModel, load_config, parse_config
from penstock.core.errors import ConfigError, ConfigErrors
from penstock.core.units import parse_size

if TYPE_CHECKING:
    from pathlib import Path


class Parquet(ConfigModel):
    kind: Literal["parquet"]
    path: str
    partition_by: tuple[str, ...] = ()


class Queue(ConfigModel):
    kind: Literal["queue"]
    url: str
    size: Annotated[int, BeforeValidator(parse_size)] = 1024


class Pipeline(ConfigModel):
    name: str
    workers: int = Field(default=1, ge=1)
    limit: int | bool | None = None
    sinks: dict[str, Annotated[Parquet | Queue, Field(discriminator="kind")]] = Field(
        default_factory=dict
    )
    tags: list[str] = Field(default_factory=list)
    backup: Queue | None = None


class Anything(ConfigModel):
    value: Any = None


GOOD = """\
name: radar
workers: 2
sinks:
  archive:
    kind: parquet
    path: /data/archive
    partition_by: [day, site]
  out:
    kind: queue
    url: fmq:/data/out
    size: 10M
"""


def fault(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, Pipeline, "p.yaml")
    assert type(caught.value) is ConfigError
    assert caught.value.file == "p.yaml"
    return caught.value


def value(text: str) -> Any:
    return parse_config(f"value: {text}", Anything).value


def test_a_good_text_becomes_its_model() -> None:
    pipeline = parse_config(GOOD, Pipeline)
    assert pipeline.workers == 2
    archive, out = pipeline.sinks["archive"], pipeline.sinks["out"]
    assert isinstance(archive, Parquet)
    assert archive.partition_by == ("day", "site")
    assert isinstance(out, Queue)
    assert out.size == 10 * 1024**2


def test_a_file_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.yaml", tmp_path / "marked.yaml"
    plain.write_text("name: müller", encoding="utf-8")
    marked.write_text("name: müller", encoding="utf-8-sig")
    assert load_config(plain, Pipeline) == load_config(str(marked), Pipeline)


def test_an_empty_text_is_a_model_of_defaults() -> None:
    assert parse_config("# nothing yet\n", Anything) == Anything()


@pytest.mark.parametrize(
    ("text", "line", "field", "reason"),
    [
        ("workers: 2\n", 1, "name", "is required"),
        ("name: a\nworkers: two\n", 2, "workers", "valid integer"),
        ("name: a\n\nworkers:\n  0\n", 4, "workers", "greater than or equal to 1"),
        ("name: [a]\n", 1, "name", "valid string"),
        ("- a\n", 1, None, "should be a mapping"),
        ("name: a\nsinks: 5\n", 2, "sinks", "should be a mapping"),
        ("name: a\ntags: 5\n", 2, "tags", "should be a list"),
        ("name: a\ntags:\n  - x\n  - [y]\n", 4, "tags[1]", "valid string"),
        (
            "name: a\nsinks:\n  # where it goes\n  archive:\n    kind: parquet\n",
            4,
            "sinks.archive.path",
            "is required",
        ),
        (
            "name: a\nsinks:\n  archive:\n    kind: parquet\n    path: x\n    partition_by: [1]\n",
            6,
            "sinks.archive.partition_by[0]",
            "valid string",
        ),
        (
            "name: a\nsinks:\n  b:\n    kind: paper\n",
            4,
            "sinks.b",
            "'kind' should be one of 'parquet', 'queue'",
        ),
        ("name: a\nsinks:\n  b: {path: x}\n", 3, "sinks.b", "needs the key 'kind'"),
        (
            "name: a\nbackup:\n  kind: queue\n  url: fmq:/a\n  size: 10X\n",
            5,
            "backup.size",
            "expected a size",
        ),
        ("name: a\nlimit: many\n", 2, "limit", "valid integer, unable to parse"),
    ],
)
def test_a_fault_names_its_line_its_field_and_what_was_expected(
    text: str, line: int, field: str | None, reason: str
) -> None:
    error = fault(text)
    assert (error.line, error.field) == (line, field)
    assert reason in error.reason
    assert str(error).startswith(f"p.yaml:{line}: ")


def test_the_members_of_a_union_give_one_fault() -> None:
    assert ", or should be a valid boolean" in fault("name: a\nlimit: many\n").reason


def test_several_faults_come_together_in_the_order_of_the_file() -> None:
    text = "workers: two\nsinks:\n  b:\n    kind: queue\n    ulr: fmq:/x\ntags: [1]\n"
    with pytest.raises(ConfigErrors) as caught:
        parse_config(text, Pipeline, "p.yaml")
    errors = caught.value.errors
    assert [(error.line, error.field) for error in errors] == [
        (1, "name"),
        (1, "workers"),
        (3, "sinks.b.url"),
        (5, "sinks.b.ulr"),
        (6, "tags[0]"),
    ]
    assert (caught.value.line, caught.value.field) == (1, "name")
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert lines[3] == "p.yaml:5: sinks.b.ulr: unknown key (did you mean url?)"


@pytest.mark.parametrize(
    ("text", "line", "field", "hint"),
    [
        ("name: a\nworkes: 2\n", 2, "workes", "did you mean workers?"),
        (
            "name: a\nsinks:\n  b:\n    kind: parquet\n    path: x\n    partition-by: [a]\n",
            6,
            "sinks.b.partition-by",
            "did you mean partition_by?",
        ),
        (
            "name: a\nbackup:\n  kind: queue\n  url: x\n  zzz: 1\n",
            5,
            "backup.zzz",
            "known keys: kind, size, url",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_known_one(
    text: str, line: int, field: str, hint: str
) -> None:
    error = fault(text)
    assert (error.line, error.field, error.reason, error.hint) == (line, field, "unknown key", hint)


def test_a_fault_does_not_repeat_the_value_which_may_be_a_secret() -> None:
    assert "hunter2" not in str(fault("name: a\nworkers: hunter2\n"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: a\nname: b: c\n", 2),
        ("name: [a,\n  b\n", 3),
        ("name: 'a\n", 2),
        ("\tname: a\n", 1),
        ("name: a\n---\nname: b\n", 2),
        ("name: *nobody\n", 1),
        ("name: a\nworkers: \x00\n", 2),
    ],
)
def test_what_is_not_yaml_is_refused_with_its_line(text: str, line: int) -> None:
    error = fault(text)
    assert error.line == line
    assert error.reason.startswith("cannot be read as YAML: ")


def test_an_open_bracket_is_traced_to_where_it_opened() -> None:
    assert fault("name: a\ntags: [x,\n  y\n").hint == "while parsing a flow sequence from line 2 on"


def test_a_key_that_stands_twice_is_refused_with_both_lines() -> None:
    error = fault("name: a\nsinks:\n  b: {}\n  c: {}\n  b: {}\n")
    assert (error.line, error.field) == (5, "sinks.b")
    assert "line 3" in error.reason


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("False", False),
        ("12", 12),
        ("-5", -5),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("12:30:00", "12:30:00"),
        ("1_000", "1_000"),
        ("2026-11-15", "2026-11-15"),
        ("2026-11-15T08:55:22.192439812Z", "2026-11-15T08:55:22.192439812Z"),
        ("'12'", "12"),
        ("!!str 12", "12"),
        ("[a, {b: 1}]", ["a", {"b": 1}]),
        ("{1: a, true: b}", {"1": "a", "true": "b"}),
    ],
)
def test_a_value_is_what_its_author_wrote(text: str, expected: object) -> None:
    found = value(text)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system [echo]",
        "!!python/name:os.system x",
        "!mine 5",
        "!!set {a, b}",
        "!!binary aGVsbG8=",
        "!!int five",
        "!!bool 5",
        "{[a]: b}",
        "{<<: 5}",
        "1" * 5_000,
    ],
)
def test_yaml_beyond_plain_values_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        value(text)
    assert caught.value.line == 1
    assert caught.value.field is not None
    assert caught.value.field.startswith("value")


def test_an_alias_repeats_what_its_anchor_names() -> None:
    text = "name: a\nsinks:\n  b: &sink {kind: queue, url: 'fmq:/b'}\n  c: *sink\n"
    sinks = parse_config(text, Pipeline).sinks
    assert sinks["b"] == sinks["c"]


def test_a_fault_inside_an_alias_names_the_line_where_it_is_written() -> None:
    text = "name: a\ntags:\n  &tags\n  - [x]\nbackup:\n  kind: queue\n  url: *tags\n"
    with pytest.raises(ConfigErrors) as caught:
        parse_config(text, Pipeline)
    found = [(error.line, error.field) for error in caught.value.errors]
    assert found == [(3, "backup.url"), (4, "tags[0]")]


def test_aliases_of_aliases_cannot_grow_without_bound() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert "more than 100,000 keys and values" in fault("\n".join(lines)).reason


def test_the_values_written_out_have_the_same_bound() -> None:
    text = "name: a\ntags: [" + "x," * 100_000 + "]"
    assert "more than 100,000 keys and values" in fault(text).reason


def test_an_alias_inside_what_it_names_is_refused() -> None:
    error = fault("name: a\ntags: &tags [x, *tags]\n")
    assert error.line == 2
    assert error.hint == "does an alias stand inside what it names?"


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000])
def test_nesting_has_a_limit(text: str) -> None:
    assert "nested deeper than 50 levels" in fault(text).reason


def test_nesting_up_to_the_limit_is_fine() -> None:
    nested = value("[" * 48 + "x" + "]" * 48)
    for _ in range(48):
        (nested,) = nested
    assert nested == "x"


def test_a_file_that_is_too_large_is_not_even_parsed(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("é" * (1 << 20), encoding="utf-8")
    with pytest.raises(ConfigError, match="larger than 1,048,576 bytes"):
        load_config(path, Pipeline)
    with pytest.raises(ConfigError, match="larger than"):
        parse_config("é" * (1 << 19) + "x", Pipeline)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing.yaml"
    with pytest.raises(ConfigError, match="No such file") as caught:
        load_config(path, Pipeline)
    assert (caught.value.file, caught.value.line) == (str(path), None)


def test_a_file_that_is_not_utf8_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: a\ntags: [caf\xe9]\n")
    with pytest.raises(ConfigError, match="not UTF-8") as caught:
        load_config(path, Pipeline)
    assert caught.value.line == 2


def test_the_environment_is_put_into_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST", "rig")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("WORKERS", "4")
    monkeypatch.delenv("ABSENT", raising=False)
    assert value("psi://${HOST}:${ABSENT:-11411}/${EMPTY}") == "psi://rig:11411/"
    assert value("'${EMPTY:-full} ${HOST:-other} ${ABSENT:-}'") == "full rig "
    assert value("[a, {b: '${HOST}'}]") == ["a", {"b": "rig"}]
    assert parse_config("name: a\nworkers: ${WORKERS}\n", Pipeline).workers == 4


def test_the_environment_stays_text_and_cannot_add_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICK", "a\nworkers: 9\nmore: ${HOST}")
    pipeline = parse_config("name: ${TRICK}", Pipeline)
    assert pipeline.name == "a\nworkers: 9\nmore: ${HOST}"
    assert pipeline.workers == 1


def test_a_doubled_dollar_keeps_the_braces() -> None:
    assert value("SELECT $${x}, $5, $$") == "SELECT ${x}, $5, $$"


def test_an_unset_variable_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABSENT", raising=False)
    error = fault("name: a\ntags:\n  - ${ABSENT}\n")
    assert (error.line, error.field) == (3, "tags[0]")
    assert error.reason == "the environment variable ABSENT is not set"
    assert error.hint == "set it, or give a default: ${ABSENT:-default}"


@pytest.mark.parametrize("text", ["a ${", "${}", "${1A}", "${A B}", "'${A'"])
def test_a_broken_variable_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="name of an environment variable"):
        value(text)


def test_a_configuration_never_changes() -> None:
    pipeline = parse_config("name: a", Pipeline)
    with pytest.raises(ValueError, match="frozen"):
        pipeline.name = "b"


YAML_TEXT = st.text(st.sampled_from("abnme:-[]{}&*!|>'\"#%@,?$ \n\t1.~") | st.characters())


@given(YAML_TEXT)
@example("? [a]\n: b")
@example("\ud800")
@example("%YAML 9.9\n---\na")
@example("!!map a")
@example("!!str [a]")
@example("!!float x")
@example("!!null x")
@example("name: !!int ''")
@example("name: &a !!map {? *a : b}")
def test_no_text_does_worse_than_being_refused_by_name(text: str) -> None:
    try:
        parse_config(text, Pipeline, "p.yaml")
    except ConfigError as error:
        assert error.file == "p.yaml"  # noqa: PT017 - most texts are refused, some are not
