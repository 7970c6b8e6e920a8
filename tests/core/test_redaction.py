from __future__ import annotations

import io
import logging
from typing import Annotated

import pytest
from pydantic import AfterValidator

from penstock.core import redaction
from penstock.core.config import ConfigModel, parse_config
from penstock.core.endpoints import open_reader
from penstock.core.errors import ConfigError, InvalidOption, InvalidURL, UnknownScheme
from penstock.core.redaction import Redacted, as_written, is_secret, shown, shown_data
from penstock.core.url import URL


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_secrets", {})
    monkeypatch.setattr(redaction, "_texts", {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://ann:hunter2@host/x", "redis://…@host/x"),
        ("redis://:hunter2@host", "redis://…@host"),
        ("redis://ann:hun@ter2@host", "redis://…@host"),
        ("redis://ann:hun/ter2@host", "redis://…@host"),
        ("redis:ann:hunter2@host", "redis:…@host"),
        ("x://h/p?password=hunter2&a=1", "x://h/p?password=…&a=1"),
        ("x://h/p?a=1&api_key=hunter2", "x://h/p?a=1&api_key=…"),
        ("option token='hunter2': no", "option token=…: no"),
        ("'x://h?access-token=hunter2' is none", "'x://h?access-token=…' is none"),
        ("option password='hun ter2': no", "option password=…: no"),
        ("sasl: user=ann password=hunter2;", "sasl: user=ann password=…;"),
    ],
)
def test_no_password_is_shown_whatever_the_scheme(text: str, expected: str) -> None:
    assert shown(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "psi://rig:11411/a@b",
        "fmq:/data/a@b?slots=5",
        "flight://host:5000/x?token_file=/etc/token&tls=true",
        "up+mqtt://host/?topic=up://vehicle/1/2/8001&authority=me",
        "write to ann@example.org",
        "fmqp:://host:5443:path",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert shown(text) == text


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("password", True), ("MQTT_PASS", True), ("spark.ssl.keyPassword", True), ("token", True),
        ("fs.s3a.secret.key", True), ("account.key", True), ("password_file", False),
        ("key", False), ("authority", False), ("url", False), ("keepalive", False),
    ],
)  # fmt: skip
def test_a_name_tells_whether_a_value_is_secret(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def test_the_errors_of_urls_and_options_have_no_password() -> None:
    for text in ("nosuch://ann:hunter2@host/x", "nosuch://host/?password=hunter2"):
        with pytest.raises(UnknownScheme) as caught:
            open_reader(text)
        assert "hunter2" not in f"{caught.value} {caught.value.hint} {caught.value.url}"
        assert "hunter2" not in f"{URL.parse(text)} {URL.parse(text)!r}"
    with pytest.raises(InvalidURL) as refused:
        URL.parse("nosuch://ann:hunter2@host:99999/")
    assert "hunter2" not in str(refused.value)
    error = InvalidOption("mqtt.password", "hunter2", "too short")
    assert "hunter2" not in f"{error} {error.value}"


def _checked(text: str) -> str:
    raise ValueError(f"{text!r} cannot be opened")


class _Model(ConfigModel):
    url: Annotated[str, AfterValidator(_checked)]


@pytest.mark.parametrize("name", ["SECRET", "ANYTHING"])
@pytest.mark.parametrize("value", ["hunter2", "hun'te\\r2", "hunter%402"])
def test_what_comes_from_the_environment_is_shown_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        parse_config(f"url: x://h/${{{name}}}/y\n", _Model)
    error = caught.value
    assert f"x://h/${{{name}}}/y" in error.reason
    assert value not in f"{error} {error.reason}"
    assert as_written(f"x://h/{value}/y") == f"x://h/${{{name}}}/y"
    assert as_written(f"password={value}") == f"password=${{{name}}}"
    assert as_written(f"no port x{value}") == f"no port x${{{name}}}"


def test_a_secret_of_the_environment_is_hidden_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_PASSWORD", "hunter2")
    monkeypatch.setenv("DB_SECRET", "abc")
    with pytest.raises(ConfigError):
        parse_config("url: ${BROKER_PASSWORD}-${DB_SECRET}\n", _Model)
    assert shown("refused: hunter2, abc, abcd") == "refused: ${BROKER_PASSWORD}, ${DB_SECRET}, abcd"
    record = logging.LogRecord("x", logging.INFO, "", 0, "with %s", ("hunter2",), None)
    assert Redacted().filter(record)
    assert record.getMessage() == "with ${BROKER_PASSWORD}"


def test_a_logged_traceback_has_no_secrets() -> None:
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.addFilter(Redacted())
    log = logging.getLogger("tests.redaction")
    log.addHandler(handler)
    error = KeyError("token=hunter2")
    error.__cause__ = ValueError("no amqp://me:hunter2@host")
    log.error("it failed", exc_info=error, stack_info=True)
    log.removeHandler(handler)
    assert "direct cause" in output.getvalue()
    assert "KeyError" in output.getvalue()
    assert "hunter2" not in output.getvalue()


def test_a_default_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SECRET", raising=False)
    with pytest.raises(ConfigError) as caught:
        parse_config("url: ${SECRET:-nothing}\n", _Model)
    assert "'nothing'" in caught.value.reason


def test_values_are_hidden_by_their_keys() -> None:
    data = {"sinks": {"secret": {"url": "x://a:b@h", "options": {"token": "t", "n": [1]}}}}
    assert shown_data(data) == {
        "sinks": {"secret": {"url": "x://…@h", "options": {"token": "…", "n": [1]}}}
    }
