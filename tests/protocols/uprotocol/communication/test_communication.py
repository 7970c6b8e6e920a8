from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.core.retry import Backoff
from penstock.protocols.uprotocol import (
    InvalidMessage,
    InvalidUUri,
    SubscriptionStatus,
    UCode,
    UMessage,
    UMessageType,
    UPayloadFormat,
    UPriority,
    UStatus,
    UStatusError,
    UUri,
    error_response,
    notification,
    proto,
    request,
    response,
)
from penstock.protocols.uprotocol.communication import (
    CallOptions,
    LocalUriProvider,
    Notifier,
    Publisher,
    RpcClient,
    RpcServer,
    Subscriber,
    UPayload,
)
from penstock.protocols.uprotocol.transports import (
    InProcessBus,
    InProcessTransport,
)
from penstock.protocols.uprotocol.uuid7 import UUID7
from support.until import until
from support.waiting import SOON

ME = LocalUriProvider("vehicle1", 0x10AB)
SERVER = LocalUriProvider("vehicle1", 0x20AB, 2)
METHOD = SERVER.resource(7)


@pytest.fixture
def transport() -> Iterator[InProcessTransport]:
    with InProcessTransport(InProcessBus(), "vehicle1") as made:
        yield made


@pytest.fixture
def client(transport: InProcessTransport) -> Iterator[RpcClient]:
    with RpcClient(transport, ME) as made:
        yield made


@pytest.fixture
def server(transport: InProcessTransport) -> Iterator[RpcServer]:
    with RpcServer(transport, SERVER) as made:
        yield made


def code_of(future: Future[Any]) -> UCode:
    error = future.exception(SOON)
    assert isinstance(error, UStatusError)
    return error.code


def test_an_entity_knows_its_addresses() -> None:
    assert str(ME.source) == "up://vehicle1/10AB/1/0"
    assert ME.own(0x8001) == ME.own(ME.resource(0x8001).with_authority("")) == ME.resource(0x8001)
    with pytest.raises(InvalidUUri):
        LocalUriProvider("Vehicle", 1)


def test_a_publisher_publishes(transport: InProcessTransport) -> None:
    heard: list[UMessage] = []
    transport.register_listener(ME.resource(0x8001), heard.append)
    publisher = Publisher(transport, ME)
    sent = [
        publisher.publish(0x8001),
        publisher.publish(0x8001, b"raw"),
        publisher.publish(0x8001, "text", CallOptions(ttl=500, priority=UPriority.CS3)),
        publisher.publish(0x8001, UPayload(b"{}", UPayloadFormat.JSON)),
    ]
    assert heard == sent
    assert [it.attributes.payload_format.name for it in heard] == [
        "UNSPECIFIED",
        "RAW",
        "TEXT",
        "JSON",
    ]
    assert heard[2].attributes.ttl == 500
    assert heard[2].attributes.priority == UPriority.CS3
    with pytest.raises(InvalidMessage, match="publish-source"):
        publisher.publish(5)


def test_a_notifier_notifies_one_entity(transport: InProcessTransport) -> None:
    heard: list[UMessage] = []
    sender, receiver = Notifier(transport, SERVER), Notifier(transport, ME)
    topic = SERVER.resource(0x8001)
    receiver.start_listening(topic, heard.append)
    sent = sender.notify(0x8001, ME.source, b"x")
    sender.notify(0x8001, SERVER.source, b"for another")
    assert heard == [sent]
    receiver.stop_listening(topic, heard.append)
    sender.notify(0x8001, ME.source, b"x")
    assert heard == [sent]
    with pytest.raises(UStatusError, match="NOT_FOUND"):
        receiver.stop_listening(topic, heard.append)


def test_a_call_is_answered_with_the_priority_and_ttl_of_the_request(
    transport: InProcessTransport, client: RpcClient, server: RpcServer
) -> None:
    seen: list[UMessage] = []
    transport.register_listener(UUri.ANY, seen.append, UUri.ANY)

    def double(request: UMessage) -> bytes:
        return (request.payload or b"") * 2

    server.register_request_handler(7, double)
    options = CallOptions(ttl=3000, priority=UPriority.CS5, token="t")
    answer = client.invoke_method(METHOD, b"ab", options).result(SOON)
    assert answer == UPayload(b"abab", UPayloadFormat.RAW)
    asked, answered = seen
    assert asked.attributes.type == UMessageType.REQUEST
    assert asked.attributes.token == "t"
    assert answered.attributes.reqid == asked.attributes.id
    assert answered.attributes.ttl == 3000
    assert answered.attributes.priority == UPriority.CS5
    until(lambda: server.statistics()["answered"] == 1)


def test_an_answer_may_be_empty(client: RpcClient, server: RpcServer) -> None:
    server.register_request_handler(METHOD, lambda _: None)
    assert client.invoke_method(METHOD).result(SOON) == UPayload(b"", UPayloadFormat.UNSPECIFIED)


def test_a_handler_that_fails_gives_its_code_or_internal(
    client: RpcClient, server: RpcServer
) -> None:
    def refuse(_: UMessage) -> None:
        raise UStatusError(UCode.PERMISSION_DENIED, "not you")

    def break_down(_: UMessage) -> None:
        raise ValueError("oh")

    server.register_request_handler(1, refuse)
    server.register_request_handler(2, break_down)
    future = client.invoke_method(SERVER.resource(1))
    with pytest.raises(UStatusError, match="not you") as error:
        future.result(SOON)
    assert error.value.code == UCode.PERMISSION_DENIED
    future = client.invoke_method(SERVER.resource(2))
    with pytest.raises(UStatusError, match="ValueError: oh") as error:
        future.result(SOON)
    assert error.value.code == UCode.INTERNAL
    until(lambda: server.statistics()["failed"] == 2)


def test_a_call_that_nobody_answers_ends_in_time(client: RpcClient) -> None:
    began = time.monotonic()
    futures = [client.invoke_method(METHOD, options=CallOptions(ttl=ttl)) for ttl in (200, 100)]
    assert [code_of(future) for future in futures] == [UCode.DEADLINE_EXCEEDED] * 2
    assert 0.19 < time.monotonic() - began < SOON


def test_a_late_answer_and_a_second_one_are_nobodys(
    transport: InProcessTransport, client: RpcClient
) -> None:
    asked: list[UMessage] = []
    transport.register_listener(UUri.ANY.with_resource(0), asked.append, METHOD)
    future = client.invoke_method(METHOD, options=CallOptions(ttl=50))
    assert code_of(future) == UCode.DEADLINE_EXCEEDED
    transport.send(response(asked[0]))
    other = client.invoke_method(METHOD)
    transport.send(response(asked[1], b"1"))
    transport.send(response(asked[1], b"2"))
    assert other.result(SOON).data == b"1"
    assert transport.statistics()["listener_failures"] == 0


def test_a_cancelled_call_stays_cancelled(transport: InProcessTransport, client: RpcClient) -> None:
    asked: list[UMessage] = []
    transport.register_listener(UUri.ANY.with_resource(0), asked.append, METHOD)
    future = client.invoke_method(METHOD)
    assert future.cancel()
    transport.send(response(asked[0], b"1"))
    assert future.cancelled()
    assert transport.statistics()["listener_failures"] == 0


@pytest.mark.parametrize("code", [code for code in UCode if code])
def test_every_code_of_an_answer_is_the_callers_error(
    transport: InProcessTransport, client: RpcClient, code: UCode
) -> None:
    transport.register_listener(
        UUri.ANY.with_resource(0),
        lambda asked: transport.send(error_response(asked, code, "why")),
        METHOD,
    )
    error = client.invoke_method(METHOD).exception(SOON)
    assert isinstance(error, UStatusError)
    assert (error.code, error.message) == (code, "why")


def test_the_details_of_an_error_reach_the_caller(server: RpcServer, client: RpcClient) -> None:
    details = (proto.Any_(type_url="type.example/Reason", value=b"x").SerializeToString(),)

    def fail(_: UMessage) -> bytes:
        raise UStatusError(UCode.NOT_FOUND, "why", details=details)

    server.register_request_handler(METHOD, fail)
    error = client.invoke_method(METHOD).exception(SOON)
    assert isinstance(error, UStatusError)
    assert error.status == UStatus(UCode.NOT_FOUND, "why", details)


def test_details_that_no_answer_can_have_are_an_internal_error(
    server: RpcServer, client: RpcClient
) -> None:
    def fail(_: UMessage) -> bytes:
        raise UStatusError(UCode.NOT_FOUND, "why", details=(b"no Any",))

    server.register_request_handler(METHOD, fail)
    assert code_of(client.invoke_method(METHOD)) == UCode.INTERNAL


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (UPayloadFormat.UNSPECIFIED, "why"),
        (UPayloadFormat.PROTOBUF, "why"),
        (UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY, "why"),
        (UPayloadFormat.TEXT, ""),
    ],
)
def test_a_status_is_read_by_the_format_of_the_payload(
    transport: InProcessTransport, client: RpcClient, format: UPayloadFormat, message: str
) -> None:
    payload = UStatus(UCode.NOT_FOUND, "why").to_bytes()
    if format == UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY:
        url = "type.googleapis.com/uprotocol.v1.UStatus"
        payload = proto.Any_(type_url=url, value=payload).SerializeToString()
    transport.register_listener(
        UUri.ANY.with_resource(0),
        lambda asked: transport.send(
            response(asked, payload, payload_format=format, commstatus=UCode.NOT_FOUND)
        ),
        METHOD,
    )
    error = client.invoke_method(METHOD).exception(SOON)
    assert isinstance(error, UStatusError)
    assert (error.code, error.message) == (UCode.NOT_FOUND, message)


def test_an_error_without_a_status_in_it_is_one_all_the_same(
    transport: InProcessTransport, client: RpcClient
) -> None:
    transport.register_listener(
        UUri.ANY.with_resource(0),
        lambda asked: transport.send(response(asked, b"\xff\xff", commstatus=UCode.ABORTED)),
        METHOD,
    )
    assert code_of(client.invoke_method(METHOD)) == UCode.ABORTED


def test_a_method_has_one_handler(server: RpcServer, client: RpcClient) -> None:
    server.register_request_handler(7, lambda _: b"1")
    with pytest.raises(UStatusError, match="ALREADY_EXISTS"):
        server.register_request_handler(METHOD, lambda _: b"2")
    assert client.invoke_method(METHOD).result(SOON).data == b"1"
    with pytest.raises(UStatusError, match="NOT_FOUND"):
        server.unregister_request_handler(7, lambda _: b"2")
    for bad in (0, 0x8000, UUri.ANY):
        with pytest.raises(UStatusError, match="INVALID_ARGUMENT"):
            server.register_request_handler(bad, lambda _: b"")


def test_a_handler_that_is_gone_is_not_called(server: RpcServer, client: RpcClient) -> None:
    def handler(_: UMessage) -> bytes:
        return b"1"

    server.register_request_handler(7, handler)
    server.unregister_request_handler(7, handler)
    future = client.invoke_method(METHOD, options=CallOptions(ttl=100))
    assert code_of(future) == UCode.DEADLINE_EXCEEDED


def test_calls_beyond_the_limit_are_refused_and_all_are_counted(
    transport: InProcessTransport, client: RpcClient
) -> None:
    go_on = threading.Event()

    def slow(_: UMessage) -> bytes:
        assert go_on.wait(SOON)
        return b"done"

    server = RpcServer(transport, SERVER, workers=1, waiting=1)
    server.register_request_handler(7, slow)
    futures = [client.invoke_method(METHOD) for _ in range(3)]
    assert code_of(futures[2]) == UCode.RESOURCE_EXHAUSTED
    go_on.set()
    assert [future.result(SOON).data for future in futures[:2]] == [b"done"] * 2
    server.close()
    books = server.statistics()
    assert books["requests"] == 3 == books["answered"] + books["failed"]


def test_a_request_that_nobody_could_get_the_answer_of_is_counted_and_not_worked_on(
    server: RpcServer, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request(ME.source, METHOD, b"").attributes
    good = UUID7.new()
    old = UUID7.unchecked(good.msb ^ 0x3000, good.lsb)  # of version 4
    worked_on: list[bytes | None] = []
    server.register_request_handler(METHOD, lambda it: worked_on.append(it.payload))
    for id in (None, old):  # of a transport that does not look at what comes
        server._on_request(UMessage(asked.replace(id=id), b"bad"))
    server.close()
    books = dict(server.statistics())
    assert (worked_on, books.pop("requests"), books.pop("not_sent")) == ([], 2, 2)
    assert not any(books.values())
    assert "id" in caplog.text


def test_an_unavailable_method_is_called_again_when_that_is_asked_for(
    transport: InProcessTransport,
) -> None:
    codes = iter([UCode.UNAVAILABLE, UCode.UNAVAILABLE, None])
    asked: list[UMessage] = []

    def answer(message: UMessage) -> None:
        asked.append(message)
        code = next(codes)
        made = response(message, b"ok") if code is None else error_response(message, code)
        transport.send(made)

    transport.register_listener(UUri.ANY.with_resource(0), answer, METHOD)
    client = RpcClient(transport, ME, backoff=Backoff(initial=0.01))
    assert client.invoke_method(METHOD, options=CallOptions(ttl=5000)).result(SOON).data == b"ok"
    assert len({it.attributes.id for it in asked}) == 3
    ttls = [it.attributes.ttl or 0 for it in asked]
    assert ttls == sorted(ttls, reverse=True)
    client.close()


def test_other_failures_are_not_called_again_and_time_ends_it(
    transport: InProcessTransport,
) -> None:
    asked: list[UMessage] = []
    code = UCode.NOT_FOUND

    def answer(message: UMessage) -> None:
        asked.append(message)
        transport.send(error_response(message, code))

    transport.register_listener(UUri.ANY.with_resource(0), answer, METHOD)
    client = RpcClient(transport, ME, backoff=Backoff(initial=0.02, maximum=0.02))
    assert code_of(client.invoke_method(METHOD)) == UCode.NOT_FOUND
    assert len(asked) == 1
    code = UCode.UNAVAILABLE
    last = code_of(client.invoke_method(METHOD, options=CallOptions(ttl=200)))
    assert last in (UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED)
    assert 2 < len(asked) < 40
    client.close()


def test_a_client_that_is_closed_ends_its_calls(transport: InProcessTransport) -> None:
    client = RpcClient(transport, ME)
    future = client.invoke_method(METHOD)
    client.close()
    client.close()
    assert code_of(future) == UCode.CANCELLED
    with pytest.raises(UStatusError, match="FAILED_PRECONDITION"):
        client.invoke_method(METHOD)


def test_a_request_that_the_transport_does_not_take_fails_at_once(
    transport: InProcessTransport, client: RpcClient
) -> None:
    transport.close()
    assert code_of(client.invoke_method(METHOD)) == UCode.FAILED_PRECONDITION
    with pytest.raises(InvalidMessage):
        client.invoke_method(METHOD.with_resource(0))


class Service:
    """A uSubscription that says yes, or no."""

    def __init__(self, transport: InProcessTransport, authority: str = "vehicle1") -> None:
        self.asked: list[Any] = []
        self.refuses = False
        self.server = RpcServer(transport, LocalUriProvider(authority, 0, 4))
        self.server.register_request_handler(1, self.subscribe)
        self.server.register_request_handler(2, self.unsubscribe)

    def subscribe(self, request: UMessage) -> UPayload:
        if self.refuses:
            raise UStatusError(UCode.PERMISSION_DENIED, "no")
        self.asked.append(proto.SubscribeRequest.FromString(request.payload or b""))
        status = SubscriptionStatus.SUBSCRIBED
        return UPayload.of_proto(
            proto.SubscribeResponse(topic=self.asked[-1].topic, status=int(status))
        )

    def unsubscribe(self, request: UMessage) -> UPayload:
        self.asked.append(proto.UnsubscribeRequest.FromString(request.payload or b""))
        return UPayload.of_proto(proto.UnsubscribeResponse())


def test_a_subscriber_asks_the_service_and_hears_the_topic(
    transport: InProcessTransport, client: RpcClient
) -> None:
    service = Service(transport)
    topic = SERVER.resource(0x8001)
    heard: list[UMessage] = []
    subscriber = Subscriber(transport, client)
    status = subscriber.subscribe(
        topic, heard.append, expiration_ms=1_700_000_000_500, sample_period=250
    )
    assert status.result(SOON) == SubscriptionStatus.SUBSCRIBED
    asked = service.asked[0]
    assert UUri.from_proto(asked.topic) == topic
    assert asked.expiration.ToMilliseconds() == 1_700_000_000_500
    assert asked.sample_period == 250
    publisher = Publisher(transport, SERVER)
    sent = publisher.publish(0x8001, b"x")
    assert heard == [sent]
    subscriber.unsubscribe(topic, heard.append).result(SOON)
    assert UUri.from_proto(service.asked[1].topic) == topic
    publisher.publish(0x8001, b"x")
    assert heard == [sent]
    service.server.close()


def test_a_service_may_wrap_its_answer_in_an_any(
    transport: InProcessTransport, client: RpcClient
) -> None:
    answer = proto.Any_()
    answer.Pack(proto.SubscribeResponse(status=int(SubscriptionStatus.SUBSCRIBE_PENDING)))
    payload = UPayload(answer.SerializeToString(), UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY)
    with RpcServer(transport, LocalUriProvider("vehicle1", 0, 4)) as service:
        service.register_request_handler(1, lambda _: payload)
        status = Subscriber(transport, client).subscribe(SERVER.resource(0x8001), print)
        assert status.result(SOON) == SubscriptionStatus.SUBSCRIBE_PENDING


@pytest.mark.parametrize(
    "answer",
    [
        UPayload(b"\x08\x02", UPayloadFormat.TEXT),
        UPayload(b"\xff", UPayloadFormat.PROTOBUF),
        UPayload(b"\xff", UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY),
    ],
)
def test_an_answer_of_the_service_that_is_no_protobuf_is_an_error(
    transport: InProcessTransport, client: RpcClient, answer: UPayload
) -> None:
    with RpcServer(transport, LocalUriProvider("vehicle1", 0, 4)) as service:
        service.register_request_handler(1, lambda _: answer)
        subscribed = Subscriber(transport, client).subscribe(SERVER.resource(0x8001), print)
        assert code_of(subscribed) == UCode.DATA_LOSS


def test_changes_that_a_subscriber_is_told_of_wait_for_nobody(
    transport: InProcessTransport, client: RpcClient
) -> None:
    subscriber = Subscriber(transport, client)
    Subscriber(transport, client)  # a second one changes nothing
    changes = UUri("vehicle1", 0, 4, 0x8000)
    transport.send(notification(changes, ME.source, b"change"))
    assert transport.statistics()["waiting"] == 0
    # Who wants to hear of them listens as to any other notification.
    heard: list[UMessage] = []
    Notifier(transport, ME).start_listening(changes, heard.append)
    transport.send(notification(changes, ME.source, b"change"))
    assert len(heard) == 1
    del subscriber


def test_a_subscription_that_is_refused_leaves_no_listener(
    transport: InProcessTransport, client: RpcClient
) -> None:
    service = Service(transport)
    service.refuses = True
    topic = SERVER.resource(0x8001)
    heard: list[UMessage] = []
    subscriber = Subscriber(transport, client)
    before = transport.statistics()["listeners"]
    assert code_of(subscriber.subscribe(topic, heard.append)) == UCode.PERMISSION_DENIED
    assert transport.statistics()["listeners"] == before
    service.server.close()


def test_a_topic_is_heard_without_the_service_too(
    transport: InProcessTransport, client: RpcClient
) -> None:
    heard: list[UMessage] = []
    subscriber = Subscriber(transport, client)
    subscriber.listen(SERVER.resource(0x8001), heard.append)
    Publisher(transport, SERVER).publish(0x8001, b"x")
    assert len(heard) == 1
    subscriber.unlisten(SERVER.resource(0x8001), heard.append)
    with pytest.raises(UStatusError, match="NOT_FOUND"):
        subscriber.unlisten(SERVER.resource(0x8001), heard.append)


def test_a_subscriber_asks_the_service_of_another_authority(
    transport: InProcessTransport, client: RpcClient
) -> None:
    service = Service(transport, "router")
    subscriber = Subscriber(transport, client, UUri("router", 0, 4, 0))
    heard: list[UMessage] = []
    topic = SERVER.resource(0x8001)
    status = subscriber.subscribe(topic, heard.append).result(SOON)
    assert status == SubscriptionStatus.SUBSCRIBED
    subscriber.unsubscribe(topic, heard.append).result(SOON)
    assert len(service.asked) == 2
    service.server.close()


def test_a_handler_may_close_its_server_and_is_still_answered(
    client: RpcClient, server: RpcServer
) -> None:
    def last(message: UMessage) -> bytes:
        server.close()
        return message.payload or b""

    server.register_request_handler(7, last)
    assert client.invoke_method(METHOD, b"bye").result(SOON).data == b"bye"


def test_whoever_gets_an_answer_may_close_the_client(
    transport: InProcessTransport, server: RpcServer
) -> None:
    server.register_request_handler(7, lambda message: message.payload)
    client = RpcClient(transport, ME, backoff=Backoff(initial=0.01, maximum=0.01))
    closed: list[bool] = []

    def close(_: object) -> None:
        client.close()
        closed.append(True)

    client.invoke_method(METHOD, b"x").add_done_callback(close)
    until(lambda: closed)
    with pytest.raises(UStatusError, match="FAILED_PRECONDITION"):
        client.invoke_method(METHOD, b"x")


def test_calls_that_were_answered_leave_nothing_behind(
    client: RpcClient, server: RpcServer
) -> None:
    server.register_request_handler(7, lambda message: message.payload)
    for _ in range(1000):
        assert client.invoke_method(METHOD, b"x", CallOptions(ttl=3_600_000)).result(SOON)
    assert not client._calls
    assert len(client._deadlines._due) < 100
