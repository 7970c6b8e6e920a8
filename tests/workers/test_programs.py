"""Programs that read and write frames: in a shell, in C, and ones that do it wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import Malformed
from penstock.core.message import Message
from penstock.core.supervision import NotStarted
from penstock.core.worker_function import BadResult, Output, place_of
from penstock.protocols.lhhttt import encode_bytes
from penstock.workers.programs import FrameProgram, ProgramEnded, ResultDecoder
from workers.graphs import EXAMPLES

TEXTS = [b"hello", b"", b"two\nlines\n", b"0", b" a  b ", b"x" * 300, "häh".encode(), b"10\n"]


def messages(texts: list[bytes]) -> list[Message]:
    return [Message(seq, 0, 0, 0, 0, None, None, text) for seq, text in enumerate(texts)]


@contextmanager
def program(*command: str, edges: tuple[str, ...] = ("out",)) -> Iterator[FrameProgram]:
    started = FrameProgram(command, edges, {}, grace=1.0, is_stopping=lambda: False)
    with started:
        yield started


@contextmanager
def python(code: str, edges: tuple[str, ...] = ("out",)) -> Iterator[FrameProgram]:
    lines = "import sys\nread, write = sys.stdin.buffer.read, sys.stdout.buffer.write\n"
    with program(sys.executable, "-u", "-c", lines + code, edges=edges) as started:
        yield started


@pytest.fixture(scope="session")
def reverse(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The worker in C, compiled."""
    made = tmp_path_factory.mktemp("c") / "reverse"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *warnings, "-o", made, EXAMPLES / "reverse.c"], check=True)
    return str(made)


def test_a_worker_in_a_shell_gives_a_result_for_each_message() -> None:
    with program(str(EXAMPLES / "shout.sh")) as shell:
        answers = list(shell(messages(TEXTS)))
        assert [answer.outputs for answer in answers] == [
            [Output("out", text.upper())] for text in TEXTS
        ]
        assert [answer.message.seq for answer in answers] == list(range(len(TEXTS)))


def test_a_worker_in_c_gives_a_result_for_each_message(reverse: str) -> None:
    many = TEXTS * 200 + [b"y" * 500_000]  # more than the pipes hold
    with program(reverse) as c:
        assert [each.outputs[0].payload for each in c(messages(many))] == [t[::-1] for t in many]


def test_a_program_may_choose_the_output_or_say_that_it_cannot() -> None:
    code = """
while read(2):
    text = read(1)
    if text == b"a": write(b">two\\n" + b"11a" + b"11b\\n")
    elif text == b"k": write(b"#key\\n11k\\n")
    elif text == b"n": write(b"\\r\\n")
    else: write(b"11?!do not know\\n")
"""
    with python(code, edges=("one", "two")) as chooser:
        a, k, nothing, bad = chooser(messages([b"a", b"k", b"n", b"x"]))
    assert a.outputs == [Output("two", b"a"), Output("one", b"b"), Output("two", b"b")]
    assert k.outputs == [Output(("one", "two")[place_of("key", 2)], b"k")]
    assert (nothing.outputs, nothing.error) == ([], None)
    assert bad.outputs == []
    assert isinstance(bad.error, BadResult)
    assert str(bad.error) == "do not know"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("read(3); sys.exit(7)", "ended with status 7"),
        ("read(3); write(b'zzz\\n')", "line should be one of"),
        ("read(3); write(b'>nowhere\\n')", "line should be one of"),
        ("read(3); write(b'1-1')", "hexadecimal digit"),
        ("read(3); write(b'fffffffffffffffff')", "at most"),
        ("read(3); write(b'\\n\\n\\n')", "more than it was asked"),
        ("import os; read(3); write(b'11'); os.close(1); read()", "closed its output"),
    ],
)
def test_a_program_that_ends_or_errs_has_not_done_its_messages(code: str, said: str) -> None:
    with python(code) as bad, pytest.raises(ProgramEnded, match=said):
        list(bad(messages([b"a", b"b"])))


def test_a_program_that_is_not_there_is_told() -> None:
    with pytest.raises(NotStarted):
        FrameProgram(["./no-such-program"], [], {}, grace=1.0, is_stopping=lambda: False)


@given(
    st.lists(st.lists(st.binary(max_size=40), max_size=3), max_size=5),
    st.integers(1, 7),
)
def test_results_are_the_same_however_they_are_cut(results: list[list[bytes]], size: int) -> None:
    whole = b"".join(b"".join(map(encode_bytes, each)) + b"\n" for each in results)
    decoder = ResultDecoder(["out"])
    found = [
        outputs
        for at in range(0, len(whole), size)
        for outputs in decoder.feed(whole[at : at + size])
    ]
    assert found == [[Output("out", payload) for payload in each] for each in results]


@given(st.binary(max_size=200))
def test_whatever_a_program_writes_is_results_or_refused(data: bytes) -> None:
    with suppress(Malformed):
        list(ResultDecoder(["out"]).feed(data))


def test_a_result_without_an_output_is_refused() -> None:
    with pytest.raises(Malformed, match="no output"):
        list(ResultDecoder([]).feed(b"11a\n"))
