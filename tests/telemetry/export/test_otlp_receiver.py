from __future__ import annotations

import gzip
import http.client
import threading
import zlib
from collections.abc import Iterator

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from octavo.tests.telemetry.export.otlp_receiver import (
    SERVICE,
    Attribute,
    GrpcReceiver,
    HttpReceiver,
    Received,
    Receiver,
    dead_endpoint,
    decode,
)

TRACE = bytes(range(16))
VALUES: list[tuple[AnyValue, Attribute]] = [
    (AnyValue(string_value="s"), "s"),
    (AnyValue(bool_value=False), False),
    (AnyValue(int_value=-3), -3),
    (AnyValue(double_value=0.5), 0.5),
    (AnyValue(bytes_value=b"\x00"), b"\x00"),
    (AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=0), AnyValue(string_value="")])), [0, ""]),
    (AnyValue(kvlist_value=KeyValueList(values=[KeyValue(key="k", value=AnyValue(int_value=1))])), {"k": 1}),
    (AnyValue(), None),
]


def number(span: int) -> bytes:
    return span.to_bytes(8, "big")


def message(*spans: Span) -> bytes:
    resource = Resource(attributes=[KeyValue(key="service.name", value=AnyValue(string_value="octavo"))])
    request = ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=spans)])]
    )
    packed: bytes = request.SerializeToString()
    return packed


def span(span_id: int, parent: int = 0, start: int = 0) -> Span:
    return Span(
        trace_id=TRACE,
        span_id=number(span_id),
        parent_span_id=number(parent) if parent else b"",
        name=f"span {span_id}",
        start_time_unix_nano=start,
        end_time_unix_nano=start + 10,
    )


ONE = message(span(1))


@pytest.fixture(params=[HttpReceiver, GrpcReceiver])
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with request.param() as made:
        yield made


def send(receiver: Receiver, body: bytes, encoding: str = "", path: str = "/v1/traces", seconds: float = 30.0) -> str:
    """What the receiver answered: an HTTP status or a gRPC code, or what went wrong on the way."""
    if receiver.protocol == "grpc":
        return call(receiver, body, seconds)
    connection = http.client.HTTPConnection("127.0.0.1", receiver.port, timeout=seconds)
    headers = {"Content-Type": "application/x-protobuf", **({"Content-Encoding": encoding} if encoding else {})}
    try:
        connection.request("POST", path, body, headers)
        return str(connection.getresponse().status)
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


def call(receiver: Receiver, body: bytes, seconds: float) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{receiver.port}") as channel:
        try:
            channel.unary_unary(f"/{SERVICE}/Export")(body, timeout=seconds)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def test_what_comes_is_kept_as_bytes_and_decoded(receiver: Receiver) -> None:
    assert send(receiver, ONE) in {"200", "OK"}
    assert receiver.received.raw == [ONE]
    [got] = receiver.received.spans
    assert (got.trace_id, got.span_id, got.parent_id) == (TRACE.hex(), number(1).hex(), None)
    assert got.resource == {"service.name": "octavo"}


def test_a_failing_receiver_keeps_nothing_and_recovers(receiver: Receiver) -> None:
    code: int | str = 503 if receiver.protocol != "grpc" else "UNAVAILABLE"
    receiver.fail(code)
    assert send(receiver, ONE) == str(code)
    assert (receiver.received.attempts, receiver.received.spans) == (1, [])
    receiver.recover()
    send(receiver, ONE)
    assert (receiver.received.attempts, len(receiver.received.spans)) == (2, 1)


def test_a_hanging_receiver_answers_when_it_is_let_go(receiver: Receiver) -> None:
    receiver.hang()
    answers: list[str] = []
    client = threading.Thread(target=lambda: answers.append(send(receiver, ONE)))
    client.start()
    receiver.received.wait_for(lambda got: got.attempts == 1)
    assert (answers, receiver.received.spans, receiver.is_hanging) == ([], [], True)
    receiver.recover()
    client.join()
    assert answers in (["200"], ["OK"])
    assert not receiver.is_hanging


def test_a_receiver_that_hangs_can_be_closed(receiver: Receiver) -> None:
    receiver.hang()
    client = threading.Thread(target=send, args=(receiver, ONE))
    client.start()
    receiver.received.wait_for(lambda got: got.attempts == 1)
    receiver.close()
    client.join()


def test_a_refusing_receiver_comes_back_on_the_same_port(receiver: Receiver) -> None:
    port = receiver.port
    receiver.refuse()
    assert send(receiver, ONE, seconds=1.0) in {"ConnectionRefusedError", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
    assert receiver.received.attempts == 0
    receiver.recover()
    assert send(receiver, ONE) in {"200", "OK"}
    assert receiver.port == port


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_packed_messages_are_unpacked(encoding: str) -> None:
    packed = gzip.compress(ONE) if encoding == "gzip" else zlib.compress(ONE)
    with HttpReceiver() as receiver:
        assert send(receiver, packed, encoding) == "200"
        assert receiver.received.raw == [ONE]


def test_another_path_is_not_found() -> None:
    with HttpReceiver() as receiver:
        assert send(receiver, ONE, path="/v1/metrics") == "404"
        assert receiver.received.raw == []


def test_a_span_is_decoded_with_everything_in_it() -> None:
    pairs = [KeyValue(key=str(index), value=value) for index, (value, _) in enumerate(VALUES)]
    sent = span(2, parent=1, start=100)
    sent.kind = Span.SPAN_KIND_SERVER
    sent.attributes.extend(pairs)
    sent.events.append(Span.Event(name="first_token", time_unix_nano=105, attributes=pairs[:1]))
    sent.links.append(Span.Link(trace_id=TRACE, span_id=number(9), attributes=pairs[:1]))
    sent.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message="why"))
    sent.dropped_attributes_count, sent.dropped_events_count, sent.dropped_links_count = 1, 2, 3
    [got] = decode(message(sent))
    assert got.attributes == {str(index): wanted for index, (_, wanted) in enumerate(VALUES)}
    assert got[:7] == (TRACE.hex(), number(2).hex(), number(1).hex(), "span 2", "SERVER", 100, 110)
    assert got.events == (("first_token", 105, {"0": "s"}),)
    assert got.links == ((TRACE.hex(), number(9).hex(), {"0": "s"}),)
    assert (got.status, got.status_text) == ("ERROR", "why")
    assert (got.dropped_attributes, got.dropped_events, got.dropped_links) == (1, 2, 3)


def test_a_tree_has_its_roots_and_those_of_foreign_parents_under_none() -> None:
    received = Received()
    received.take(message(span(3, parent=1, start=5), span(2, parent=1, start=1)), {})
    received.take(message(span(1), span(4, parent=77, start=2)), {})
    tree = received.tree(TRACE.hex())
    names = {parent: [child.name for child in children] for parent, children in tree.items()}
    assert names == {None: ["span 1", "span 4"], number(1).hex(): ["span 2", "span 3"]}
    assert received.tree("of nothing") == {}


def test_enclosing_is_by_time() -> None:
    outer, inner, late = decode(message(span(1), span(2), span(3, start=1)))
    assert outer.encloses(inner)
    assert not outer.encloses(late)


def test_waiting_fails_when_nothing_comes() -> None:
    with pytest.raises(AssertionError, match="0 attempts, 0 spans"):
        Received().wait_for(lambda got: bool(got.spans), 0.01)


def test_nobody_listens_at_a_dead_endpoint() -> None:
    connection = http.client.HTTPConnection(dead_endpoint().removeprefix("http://"))
    with pytest.raises(ConnectionRefusedError):
        connection.connect()
