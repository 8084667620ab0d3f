"""An HTTP server that speaks like an API server, and misbehaves where a test wants it to."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]

PATHS = {
    "/api/v1/services": ("ServiceList", "v1"),
    "/apis/discovery.k8s.io/v1/endpointslices": ("EndpointSliceList", "discovery.k8s.io/v1"),
    "/api/v1/nodes": ("NodeList", "v1"),
    "/apis/networking.k8s.io/v1/servicecidrs": ("ServiceCIDRList", "networking.k8s.io/v1"),
    "/api/v1/endpoints": ("EndpointsList", "v1"),
}


@dataclass
class Answer:
    """What a server says to one request. `cut` promises more bytes than it sends."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False


@dataclass
class Server:
    """An HTTP server that answers as it is told, and remembers what it was asked."""

    url: str
    objects: dict[str, list[Object]]  # path -> the objects that are there
    trouble: list[Callable[[str, dict[str, str]], Answer | None]] = field(default_factory=list)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    version: int = 100
    silent: bool = False  # watches are neither told anything nor ended
    events: dict[str, queue.Queue[Object | None]] = field(default_factory=dict)  # path -> what a watch is told

    def tell(self, path: str, kind: str, obj: Object) -> None:
        """An event for the watch of a path."""
        self.version += 1
        obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        self.events.setdefault(path, queue.Queue()).put({"type": kind, "object": obj})

    def answer(self, path: str, query: dict[str, str]) -> Answer:
        self.asked.append((path, query))
        for maker in list(self.trouble):
            answer = maker(path, query)
            if answer is not None:
                return answer
        if query.get("watch") and path in self.objects:
            return Answer()
        if path not in self.objects:
            return status(404, "the server could not find the requested resource")
        kind, api_version = PATHS[path]
        start, limit = int(query.get("continue") or 0), int(query["limit"])
        items = self.objects[path][start : start + limit]
        metadata = {"resourceVersion": query.get("resourceVersion") or str(self.version)}
        if start + limit < len(self.objects[path]):
            metadata["continue"] = str(start + limit)
        return Answer(body={"kind": kind, "apiVersion": api_version, "metadata": metadata, "items": items})

    def once(self, answer: Answer, path: str = "", times: int = 1) -> None:
        """Give this answer to the next requests, for a path if one is named."""
        left = [times]

        def maker(asked: str, _query: dict[str, str]) -> Answer | None:
            if left[0] == 0 or (path and asked != path):
                return None
            left[0] -= 1
            return answer

        self.trouble.append(maker)


def status(code: int, message: str, **headers: str) -> Answer:
    return Answer(code, {"kind": "Status", "code": code, "message": message}, headers)


class Handler(BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        served: Server = self.server.served
        served.headers.append({name.title(): value for name, value in self.headers.items()})
        answer = served.answer(parts.path, query)
        if query.get("watch") and answer.status == 200:
            events = queue.Queue() if served.silent else served.events.setdefault(parts.path, queue.Queue())
            self.stream(events, 3600.0 if served.silent else float(query["timeoutSeconds"]))
            return
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(body) + (1000 if answer.cut else 0)))
        for name, value in answer.headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        if answer.cut:
            self.close_connection = True

    def stream(self, events: queue.Queue[Object | None], seconds: float) -> None:
        """A watch: an event a line, until the time is over or None ends it."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            with contextlib.suppress(queue.Empty):
                while (event := events.get(timeout=seconds)) is not None:
                    self.chunk(event + b"\n" if isinstance(event, bytes) else json.dumps(event).encode() + b"\n")
                    if isinstance(event, dict) and event.get("type") == "ERROR":
                        break
            self.chunk(b"")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Tests say what matters."""


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A small cluster behind HTTP: 5 Services, 3 slices, 2 Nodes, no ServiceCIDR."""
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    served = Server(
        f"http://127.0.0.1:{httpd.server_address[1]}",
        {
            "/api/v1/services": [
                named("web", i, spec={"clusterIP": f"10.96.0.{i + 1}", "ports": [{"port": 80}]}) for i in range(5)
            ],
            "/apis/discovery.k8s.io/v1/endpointslices": [
                named("web", i, labels={"kubernetes.io/service-name": "web-0"}, addressType="IPv4", endpoints=[])
                for i in range(3)
            ],
            "/api/v1/nodes": [named("n", i, status={"addresses": []}) for i in range(2)],
            "/apis/networking.k8s.io/v1/servicecidrs": [],
            "/api/v1/endpoints": [],
        },
    )
    httpd.served = served  # type: ignore[attr-defined]
    threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield served
    finally:
        httpd.shutdown()
        httpd.server_close()


def named(prefix: str, number: int, *, labels: Object | None = None, **fields: Any) -> Object:
    name = f"{prefix}-{number}" if prefix != "n" else f"n{number}"
    metadata: Object = {"name": name, "uid": f"uid-{number}", "annotations": {"note": "{{ x }}"}}
    if prefix != "n":
        metadata["namespace"] = "shop"
    if labels:
        metadata["labels"] = labels
    return {"metadata": metadata, **fields}
