"""OTLP receivers for tests, over HTTP and over gRPC, that can be as faulty as collectors are.

``receiver.received`` holds what came; :mod:`.received` says what can be asked of it. Faults are switched while it runs:
``fail``, ``hang``, ``slow``, ``refuse``, and ``recover`` from all of them.
"""

from __future__ import annotations

import gzip
import socket
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from octavo.tests.telemetry.export.received import (
    Attribute,
    Received,
    ReceivedEvent,
    ReceivedLink,
    ReceivedSpan,
    decode,
)

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
ANSWER: bytes = ExportTraceServiceResponse().SerializeToString()
FOR_EVER = 3600.0


class Receiver:
    """What both have in common: a place on the loopback, what was received, and faults."""

    protocol: str

    def __init__(self) -> None:
        self.received = Received()
        self.port = 0
        self._code: int | str | None = None
        self._delay = 0.0
        self._released = threading.Event()
        self._listen()

    @property
    def endpoint(self) -> str:
        """As ``OTEL_EXPORTER_OTLP_ENDPOINT`` wants it."""
        return f"http://127.0.0.1:{self.port}"

    def fail(self, code: int | str) -> None:
        """Answer with this HTTP status, or gRPC code such as ``UNAVAILABLE``."""
        self._code = code

    def slow(self, seconds: float) -> None:
        """Answer that much later."""
        self._delay = seconds

    def hang(self) -> None:
        """Take requests and never answer."""
        self._delay = FOR_EVER

    def refuse(self) -> None:
        """Listen no longer; the port stays this one's."""
        self._let_go()
        self._close()

    def recover(self) -> None:
        """No fault from now on; what hung is answered."""
        self._let_go()
        self._code, self._delay = None, 0.0
        self._released = threading.Event()
        if not self._is_listening():
            self._listen()

    @property
    def is_hanging(self) -> bool:
        """Whether nobody has let go yet what hangs."""
        return self._delay == FOR_EVER and not self._released.is_set()

    def close(self) -> None:
        self._let_go()
        if self._is_listening():
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _let_go(self) -> None:
        self._released.set()

    def _faulty(self) -> int | str | None:
        """A request came: wait if it should, and say what to answer it with."""
        self.received.attempted()
        if self._delay:
            self._released.wait(self._delay)
        return self._code

    def _listen(self) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _is_listening(self) -> bool:
        raise NotImplementedError


class HttpReceiver(Receiver):
    """OTLP/HTTP with protobuf; unpacks gzip and deflate."""

    protocol = "http/protobuf"
    _server: _HttpServer | None = None

    def _listen(self) -> None:
        self._server = _HttpServer(("127.0.0.1", self.port), self)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.hang_up()
            self._server.server_close()
            self._server = None

    def _is_listening(self) -> bool:
        return self._server is not None

    def answer(self, handler: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        """Status and body for one request."""
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        status = self._faulty()
        if isinstance(status, int):
            return status, b""
        if handler.path != "/v1/traces" or handler.headers["Content-Type"] != "application/x-protobuf":
            return 404, b""
        message = _unpacked(body, handler.headers.get("Content-Encoding", ""))
        self.received.take(message, {name.lower(): value for name, value in handler.headers.items()})
        return 200, ANSWER


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = False  # they are waited for when it closes
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], receiver: HttpReceiver) -> None:
        self.receiver = receiver
        self._connections: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def finish_request(self, request: object, client_address: object) -> None:
        if not isinstance(request, socket.socket):
            raise TypeError("TCP only")
        self._connections.add(request)
        try:
            _Handler(request, client_address, self)
        finally:
            self._connections.discard(request)

    def hang_up(self) -> None:
        """Connections that are kept alive would be waited for in vain."""
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RD)  # an answer under way still goes out
            except OSError:
                continue

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that have gone away are nothing to report."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        if not isinstance(server, _HttpServer):
            raise TypeError("made by _HttpServer only")
        status, body = server.receiver.answer(self)
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is the base's
        """Nothing on standard error."""


def _unpacked(body: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(body)
    return zlib.decompress(body) if encoding == "deflate" else body


class GrpcReceiver(Receiver):
    """OTLP over gRPC; takes the messages as bytes."""

    protocol = "grpc"
    _server: grpc.Server | None = None

    def _listen(self) -> None:
        method = grpc.unary_unary_rpc_method_handler(self._export)  # without codecs: bytes in, bytes out
        server = grpc.server(ThreadPoolExecutor(4), options=(("grpc.so_reuseport", 0),))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": method}),))
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        server.start()
        self._server = server

    def _close(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def _is_listening(self) -> bool:
        return self._server is not None

    def _export(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        code = self._faulty()
        if isinstance(code, str):
            context.abort(grpc.StatusCode[code], "as the test wants it")
        if context.is_active():
            self.received.take(message, dict(context.invocation_metadata()))
        return ANSWER


def dead_endpoint() -> str:
    """Where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return f"http://127.0.0.1:{port}"


__all__ = [
    "Attribute",
    "GrpcReceiver",
    "HttpReceiver",
    "Received",
    "ReceivedEvent",
    "ReceivedLink",
    "ReceivedSpan",
    "Receiver",
    "dead_endpoint",
    "decode",
]
