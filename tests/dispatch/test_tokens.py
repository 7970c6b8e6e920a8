"""Does a request have to prove whose it is, where asked to? (docs/specs/uprotocol.md 10.2)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, InvalidOption
from penstock.dispatch import Limits, TokenRule, Tokens
from penstock.dispatch.access import load_check
from penstock.dispatch.bus import build
from penstock.dispatch.config import load_bus
from penstock.dispatch.settings import Rate
from penstock.protocols.uprotocol import UCode, UUri
from support.dispatching import ALICE, METHOD, World

SECRET = "a-secret-of-alice"
THERE = UUri("there", 0, 0, 0)


def accepted(token: str = SECRET, source: UUri = ALICE) -> Tokens:
    return Tokens(
        [TokenRule(source=source, sha256=frozenset({sha256(token.encode()).hexdigest()}))]
    )


def test_a_request_with_the_right_token_passes_unchanged(make_world: Callable[..., World]) -> None:
    world = make_world(tokens=accepted())
    asked = world.request(ttl=1000, token=SECRET)
    world.ingest(asked)
    world.run()
    assert [m.to_bytes() for m in world.far.arrived[THERE]] == [asked.to_bytes()]


@pytest.mark.parametrize("token", ["another", "", None, "\ufffd" * 100])
def test_another_token_or_none_is_unauthenticated_and_answered(
    make_world: Callable[..., World], token: str | None
) -> None:
    world = make_world(tokens=accepted())
    world.ingest(world.request(ttl=1000, token=token))
    world.run()
    assert not world.far.arrived[THERE]
    assert world.codes == [UCode.UNAUTHENTICATED]
    assert [m.attributes.commstatus for m in world.responses()] == [UCode.UNAUTHENTICATED]
    assert world.dispatcher.books().counts.unauthenticated == 1


def test_sources_that_no_rule_names_need_none_and_nothing_but_requests_does(
    make_world: Callable[..., World],
) -> None:
    world = make_world(tokens=accepted())
    world.ingest(world.request(source=UUri("here", 0x11, 1, 0), ttl=1000), world.notify())
    world.run()
    assert len(world.far.arrived[THERE]) == 1
    assert world.letters == []


def test_a_function_may_decide_and_one_that_fails_accepts_nothing(
    make_world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, UUri]] = []

    def check(token: str, source: UUri) -> bool:
        seen.append((token, source))
        if token == "bad":
            raise RuntimeError(f"no {token}{SECRET}")
        return token == SECRET

    world = make_world(tokens=Tokens([TokenRule(check=check)]))
    with caplog.at_level(logging.DEBUG):
        for token in (SECRET, "bad", "other"):
            world.ingest(world.request(ttl=1000, token=token))
        world.run()
    assert seen == [(SECRET, ALICE), ("bad", ALICE), ("other", ALICE)]
    assert len(world.far.arrived[THERE]) == 1
    assert world.codes == [UCode.UNAUTHENTICATED] * 2
    assert "RuntimeError" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("rate", [None, 1e6])
def test_a_token_is_looked_at_once_however_many_requests_come_at_once(
    make_world: Callable[..., World], rate: float | None
) -> None:
    seen: list[str] = []

    def check(token: str, _: UUri) -> bool:
        seen.append(token)
        return True

    rates = {} if rate is None else {"local": Rate(leg=rate)}
    limits = Limits(leg_rates=rates)
    world = make_world(tokens=Tokens([TokenRule(check=check)]), limits=limits)
    tokens = [f"{number:04}" for number in range(48)]
    world.ingest(*(world.request(ttl=1000, token=token) for token in tokens))
    world.run()
    assert seen == tokens
    assert len(world.far.arrived[THERE]) == len(tokens)


def test_a_token_is_in_no_dead_letter_and_in_no_log(
    make_world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(tokens=accepted("x"), limits=Limits(message=100_000))
    with caplog.at_level(logging.DEBUG):
        world.ingest(world.request(ttl=1000, token=SECRET))  # refused
        world.ingest(world.request(ttl=1000, token="x" * 3, payload=bytes(200_000)))  # too large
        invalid = world.request(method=METHOD, token=SECRET, ttl=1000).with_attributes(ttl=0)
        world.ingest(invalid)
        world.run()
    assert len(world.letters) == 3
    every = b"".join(path.read_bytes() for path in (world.state / "dead").rglob("*.fmq"))
    for secret in (SECRET.encode(), b"xxx"):
        assert secret not in every
    assert SECRET not in caplog.text
    assert all(letter.header.token is None for letter in world.letters)


def test_a_dead_letter_of_a_request_is_tried_again_without_its_token(
    make_world: Callable[..., World],
) -> None:
    world = make_world(tokens=accepted())
    world.ingest(world.request(ttl=1000))
    world.run()
    (letter,) = world.letters
    world.dispatcher.retry_dead_letter(letter.number)
    world.run()
    assert len(world.far.arrived[THERE]) == 1  # a person vouches for it


def test_a_function_that_is_not_there_is_said_before_anything_runs() -> None:
    for name in ("no.such.module:f", "os:no_such", "os:path", "os:"):
        with pytest.raises(InvalidOption, match="check"):
            load_check(name)
    assert load_check("os:getpid") is not None


def test_a_bus_yaml_says_which_tokens_are_accepted(tmp_path: Path) -> None:
    text = """
dispatcher: bus
authority: here
state: ./state
legs:
  local: {in-process: {}, authorities: [here], rate: 1000, source_rate: 10.5}
limits: {quarantine: 1M, linger: 5ms}
tokens:
  - {source: "//here/10/1/0", sha256: DIGEST}
  - {source: "//here/11/1/0", check: "os:getpid"}
"""
    path = tmp_path / "bus.yaml"
    path.write_text(text.replace("DIGEST", sha256(b"t").hexdigest().upper()))
    config = load_bus(path)
    limits = config.limits.limits(config.legs)
    assert limits.leg_rates["local"].source == 10.5
    assert limits.linger == 0.005
    with build(config, threads=False):
        pass
    path.write_text(text.replace("DIGEST", "a-token"))
    with pytest.raises(ConfigError, match="sha256"):
        load_bus(path)
