"""Apps in processes, loaded, restarted and unloaded; the REST interface and the command line."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.core.errors import AlreadyExists, Closed, ConnectionLost, InvalidOption
from penstock.core.stream_id import StreamId
from penstock.core.supervision import ProgramState
from penstock.queue import OutputStream
from penstock.workers.controller import AppRequest, Controller
from penstock.workers.rest import serve_controller
from penstock.workers.router import Router
from support.until import until
from support.waiting import background

APP = """
import helper
from penstock.workers.apps import App, Input, Output, Receive

class Echo(App):
    numbers = Receive(path="tests://numbers")
    orders = Input(path="tests://echo", name="orders for echo")
    replies = Output(path="tests://echo", name="replies of echo")
    streams = (numbers, orders, replies)

    def on_start(self):
        self.send(self.replies, helper.text(self.context.params.get("greeting", "hello")))

    def on_message(self, stream, message):
        if bytes(message.payload) == b"fail":
            raise ValueError("told to fail")
        self.send(self.replies, bytes(message.payload) + message.sender.encode())
"""
HELPER = "def text(words):\n    return words.encode()\n"
STUBBORN = """
import signal, time
from penstock.workers.apps import App

class Stubborn(App):
    def on_start(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)
"""
REPLIES = StreamId.generate(1, 0, "tests://echo", "replies of echo")
ORDERS = StreamId.generate(1, 0, "tests://echo", "orders for echo")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "apps"
    folder.mkdir()
    (folder / "echo.py").write_text(APP)
    (folder / "helper.py").write_text(HELPER)
    (folder / "stubborn.py").write_text(STUBBORN)
    (folder / "library.so").write_bytes(b"\x7fELF")
    (tmp_path / "outside.py").write_text(APP)
    return folder


@pytest.fixture
def controller(directory: str) -> Iterator[Controller]:
    with Controller(directory, grace=1.0) as running:
        yield running


def request(path: Path, **more: Any) -> AppRequest:
    given: dict[str, Any] = {
        "name": path.stem,
        "type": "python",
        "queue_size": 100,
        "params": {},
        "devices": {},
        **more,
    }
    return AppRequest(path=path, **given)


def replies() -> Any:
    return OutputStream.open(REPLIES, wait=60)


def test_an_app_is_loaded_restarted_unloaded_and_loaded_again(
    controller: Controller, root: Path
) -> None:
    echo = request(root / "echo.py", modules=(root / "helper.py",), params={"greeting": "hi"})
    loaded = controller.load(echo)
    with pytest.raises(AlreadyExists):
        controller.load(echo)
    with replies() as reader, Router().register("tester") as tester:
        assert reader.read(40).payload == b"hi"
        tester.send(ORDERS, b"1")
        assert reader.read(40).payload == b"1tester"

        process = controller.app(loaded.id).process
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert reader.read(40).payload == b"hi"  # it is started again
        assert controller.app(loaded.id).process.starts == 2
        tester.send(ORDERS, b"fail")
        answer = reader.read(40).payload
        if answer == b"1tester":  # what it was at when it was killed comes again
            answer = reader.read(40).payload
        assert answer == b"hi"

        assert controller.unload(loaded.id)
        assert not controller.unload(loaded.id)
        assert controller.apps() == []
        assert [app.name for app in Router().apps()] == ["tester"]

        assert controller.load(echo).id != loaded.id
        assert reader.read(40).payload == b"hi"
        tester.send(ORDERS, b"2")
        assert reader.read(40).payload == b"2tester"


def test_an_app_that_does_not_end_is_ended_in_time(controller: Controller, root: Path) -> None:
    loaded = controller.load(request(root / "stubborn.py"))
    until(lambda: Router().apps())
    time.sleep(0.2)  # for its handler
    began = time.monotonic()
    assert controller.unload(loaded.id)
    assert 0.5 < time.monotonic() - began < 5
    assert Router().apps() == []


def test_a_program_in_c_is_told_what_it_needs(
    controller: Controller, root: Path, directory: str
) -> None:
    program = root / "program"
    output = root / "told"
    program.write_text(
        f"#!/bin/sh\nenv | grep PENSTOCK > {output}.new && mv {output}.new {output}\n"
    )
    program.chmod(0o755)
    controller.load(
        request(
            program, type="c", params={"queue:1/set/c/out/output": "/x/q.fmq", "rate": "5"},
            devices={1: "127.0.0.1:8080"},
        )
    )  # fmt: skip
    until(output.exists)
    told = dict(line.split("=", 1) for line in output.read_text().splitlines())
    assert told["PENSTOCK_QUEUE_1_SET_C_OUT_OUTPUT"] == "/x/q.fmq"
    assert told["PENSTOCK_PARAM_RATE"] == "5"
    assert told["PENSTOCK_APP"] == "program"
    assert told["PENSTOCK_STREAMS"] == directory
    assert json.loads(told["PENSTOCK_DEVICES"]) == {"1": "127.0.0.1:8080"}
    until(lambda: controller.apps()[0].process.state is ProgramState.ENDED)


def test_a_program_is_the_file_here_and_not_one_that_the_search_path_has(
    controller: Controller, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    Path("true").write_text("#!/bin/sh\ntouch ran\n")
    Path("true").chmod(0o755)
    controller.load(request(Path("true"), type="c"))
    until((root / "ran").exists)


def test_a_controller_that_is_closed_starts_nothing(directory: str, root: Path) -> None:
    with Controller(directory, grace=1.0) as controller:
        loaded = controller.load(request(root / "stubborn.py"))
    with pytest.raises(Closed):
        controller.load(request(root / "echo.py"))
    with pytest.raises(Closed):
        controller.restart(loaded.id)
    assert controller.unload(loaded.id)
    controller.close()


def test_what_is_no_app_is_refused(controller: Controller, root: Path) -> None:
    program = root / "program"
    program.touch(0o755)
    for wrong in (
        request(root / "library.so", type="c"),
        request(root / "echo.py", type="wasm"),
        request(root / "missing.py"),
        request(root / "echo.py", name="a/b"),
        request(program, type="c", params={"x": "a\0b"}),
        request(program, type="c", params={"rate": "1", "Rate": "2"}),
    ):
        with pytest.raises(InvalidOption):
            controller.load(wrong)
    assert controller.apps() == []


# --- REST ---------------------------------------------------------------------------------------


class Client:
    def __init__(self, port: int, token: str | None = None) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        data = (
            body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        )
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json", **self._headers},
            method=method,
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                content = answer.read()
                return answer.status, json.loads(content) if content else None
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


@pytest.fixture
def client(controller: Controller, root: Path) -> Iterator[Client]:
    pytest.importorskip("fastapi")
    with serve_controller(controller, root, port=0) as server:
        yield Client(server.port)


def load_request(**more: object) -> dict[str, object]:
    """As the original's control program asks for an app in Python."""
    return {
        "app": "",
        "app_name": "echo",
        "runtime_us": 0,
        "deadline_us": 0,
        "period_us": 0,
        "ioq_size": 1000,
        "app_path": "/somewhere/out/lib/libjrtc_pythonapp_loader.so",
        "app_type": "python",
        "app_params": {"python": "echo.py", "level": 3},
        "device_mapping": {"1": "127.0.0.1:8080"},
        "app_modules": ["helper.py"],
        **more,
    }


def test_the_originals_requests_are_answered_as_the_original_does(client: Client) -> None:
    assert client.ask("GET", "/app") == (200, [])
    status, state = client.ask("POST", "/app", load_request())
    assert status == 200
    assert state["request"]["app_name"] == "echo"
    assert state["request"]["app_params"] == {"python": "echo.py", "level": "3"}
    with replies() as reader:
        assert reader.read(40).payload == b"hello"
    assert client.ask("GET", "/app") == (200, [state])
    assert client.ask("GET", f"/app/{state['id']}") == (200, state)
    assert client.ask("GET", "/app/99")[0] == 404
    status, error = client.ask("POST", "/app", load_request())
    assert (status, "echo is loaded" in error["Details"]) == (400, True)
    assert client.ask("DELETE", f"/app/{state['id']}") == (204, None)
    assert client.ask("DELETE", f"/app/{state['id']}") == (204, None)
    assert client.ask("GET", "/app") == (200, [])
    status, document = client.ask("GET", "/api-docs/openapi.json")
    assert set(document["paths"]) == {"/app", "/app/{id}"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"app": base64.b64encode(b"\x7fELF").decode()}, "a binary is not taken"),
        ({"app_params": {"python": "../outside.py"}}, "no file"),
        ({"app_params": {"python": "/etc/passwd"}}, "no file"),
        ({"app_params": {"python": "link.py"}}, "no file"),
        ({"app_params": {"python": ""}}, "no file"),
        ({"app_params": {"python": "a\0b"}}, "no file"),
        ({"app_modules": ["../outside.py"]}, "app_modules"),
        ({"app_type": "c", "app_path": "library.so"}, "not a program"),
        ({"app_name": "a/b"}, "not a name of an app"),
        ({"app_name": 5}, "app_name"),
        ({"ioq_size": -1}, "ioq_size"),
        ({"device_mapping": {"x": "y"}}, "device_mapping"),
    ],
)
def test_a_request_that_is_not_right_is_refused_with_the_reason(
    client: Client, root: Path, change: dict[str, object], reason: str
) -> None:
    (root / "link.py").symlink_to(root.parent / "outside.py")
    status, error = client.ask("POST", "/app", load_request(**change))
    assert status == 400
    assert reason in error["Details"]
    assert client.ask("GET", "/app") == (200, [])


def test_what_is_no_request_is_refused(client: Client) -> None:
    assert client.ask("POST", "/app", b"{")[0] == 400
    assert client.ask("POST", "/app", b"[" * 100_000)[0] == 400
    assert client.ask("GET", "/app/x")[0] == 400


def test_other_machines_need_a_token(controller: Controller, root: Path) -> None:
    pytest.importorskip("fastapi")
    with pytest.raises(InvalidOption, match="token"):
        serve_controller(controller, root, host="0.0.0.0", port=0)
    with serve_controller(controller, root, port=0, token="secret") as server:
        assert Client(server.port).ask("GET", "/app")[0] == 401
        assert Client(server.port, "wrong").ask("GET", "/app")[0] == 401
        assert Client(server.port, "secret").ask("GET", "/app") == (200, [])


# --- the command line ---------------------------------------------------------------------------


class Proxy(ThreadingHTTPServer):
    """Stands for the reverse proxy of a device, which is jbpf's."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        #: How it answers requests to load.
        self.status = 201
        super().__init__(("127.0.0.1", 0), _Answers)


class _Answers(BaseHTTPRequestHandler):
    server: Proxy

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(("POST", self.path, body))
        self.answer(self.server.status)

    def do_DELETE(self) -> None:
        self.server.asked.append(("DELETE", self.path, None))
        self.answer(204)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def proxied() -> Iterator[Proxy]:
    with Proxy() as proxy, background(proxy.serve_forever):
        try:
            yield proxy
        finally:
            proxy.shutdown()


def done(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("names")
def test_a_deployment_is_loaded_shown_and_unloaded_by_commands(
    controller: Controller, root: Path, directory: str
) -> None:
    pytest.importorskip("fastapi")
    with serve_controller(controller, root, port=0) as server, proxied() as proxy:
        (root / "set.yaml").write_text(
            "codeletset_id: a_set\ncodelet_descriptor:\n"
            "- {codelet_name: codelet, codelet_path: x.o, hook_name: h,\n"
            "   in_io_channel: [{name: commands}], out_io_channel: [{name: telemetry}]}\n"
        )
        file = root / "deployment.yaml"
        file.write_text(
            f"name: Example\n"
            f"app: [{{name: echo, path: echo.py, type: python, modules: [helper.py], "
            f"port: {server.port}}}]\n"
            f"jbpf:\n  device: [{{id: 4, port: {proxy.server_port}}}]\n"
            f"  codelet_set: [{{device: 4, config: set.yaml}}]\n"
        )
        done("jrtc", "load", str(file))
        with replies() as reader:
            assert reader.read(40).payload == b"hello"
        ((method, path, body),) = proxy.asked
        assert (method, path, body["codeletset_id"]) == ("POST", "/", "a_set")
        stream = body["codelet_descriptor"][0]["out_io_channel"][0]["stream_id"]
        assert Path(directory, f"{stream}.output.fmq").exists()
        shown = done("jrtc", "show", str(file))
        assert StreamId.parse(stream).dashed() in shown
        assert "echo" in shown
        assert done(
            "jrtc", "streamid", "-d", "DestinationNone", "-D", "4",
            "-p", "Example://jbpf_agent/a_set/codelet", "-n", "telemetry",
        ).strip() == StreamId.parse(stream).dashed()  # fmt: skip
        done("jrtc", "unload", str(file))
        assert controller.apps() == []
        assert proxy.asked[1:] == [("DELETE", "/a_set", None)]
        assert not Path(directory, f"{stream}.output.fmq").exists()


SET = """
codeletset_id: a set
codelet_descriptor:
- {codelet_name: codelet, codelet_path: x.o, hook_name: h, in_io_channel: [{name: commands}]}
"""


@pytest.mark.usefixtures("names")
def test_one_that_is_away_does_not_keep_the_others_from_being_unloaded(
    controller: Controller, root: Path
) -> None:
    pytest.importorskip("fastapi")
    with serve_controller(controller, root, port=0) as server, proxied() as proxy:
        (root / "set.yaml").write_text(SET)
        file = root / "deployment.yaml"
        away = 1
        file.write_text(
            f"name: Example\n"
            f"app: [{{name: other, path: echo.py, type: python, port: {away}}},\n"
            f"      {{name: stubborn, path: stubborn.py, type: python, port: {server.port}}}]\n"
            f"jbpf:\n  device: [{{id: 4, port: {proxy.server_port}}}, {{id: 5, port: {away}}}]\n"
            f"  codelet_set: [{{device: 4, config: set.yaml}}, {{device: 5, config: set.yaml}}]\n"
        )
        controller.load(request(root / "stubborn.py"))
        result = CliRunner().invoke(app, ["jrtc", "unload", str(file)])
        assert result.exit_code == 1
        assert isinstance(result.exception, ConnectionLost)
        assert controller.apps() == []
        assert proxy.asked == [("DELETE", "/a%20set", None)]


@pytest.mark.usefixtures("names", "directory")
def test_a_run_that_cannot_begin_takes_back_the_codelets_that_it_loaded(root: Path) -> None:
    pytest.importorskip("fastapi")
    with proxied() as good, proxied() as bad:
        bad.status = 500
        (root / "set.yaml").write_text(SET)
        file = root / "deployment.yaml"
        file.write_text(
            f"name: Example\n"
            f"jbpf:\n  device: [{{id: 4, port: {good.server_port}}}, "
            f"{{id: 5, port: {bad.server_port}}}]\n"
            f"  codelet_set: [{{device: 4, config: set.yaml}}, {{device: 5, config: set.yaml}}]\n"
        )
        result = CliRunner().invoke(app, ["jrtc", "run", "--port", "0", str(file)])
        assert result.exit_code == 1
        assert "500" in str(result.exception)
        assert [(method, path) for method, path, _ in good.asked] == [
            ("POST", "/"),
            ("DELETE", "/a%20set"),
        ]
        assert [method for method, _, _ in bad.asked] == ["POST"]
