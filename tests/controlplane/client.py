"""A small API client: raw JSON over kept-alive connections, several at once. Speed matters here, convenience little."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from . import netns

Object = dict[str, Any]
T = TypeVar("T")

# kind -> (path prefix, plural, namespaced)
KINDS = {
    "Namespace": ("/api/v1", "namespaces", False),
    "Node": ("/api/v1", "nodes", False),
    "Service": ("/api/v1", "services", True),
    "Endpoints": ("/api/v1", "endpoints", True),
    "EndpointSlice": ("/apis/discovery.k8s.io/v1", "endpointslices", True),
    "ServiceCIDR": ("/apis/networking.k8s.io/v1", "servicecidrs", False),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases", True),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles", True),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings", True),
    "ClusterRole": ("/apis/rbac.authorization.k8s.io/v1", "clusterroles", False),
    "ClusterRoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "clusterrolebindings", False),
}


class ApiError(Exception):
    """The API server's refusal, in its own words."""

    def __init__(self, status: int, method: str, path: str, message: str) -> None:
        super().__init__(f"{method} {path}: {status} {message}")
        self.status = status
        self.message = message


def collection_path(kind: str, namespace: str | None = None) -> str:
    prefix, plural, namespaced = KINDS[kind]
    return f"{prefix}/namespaces/{namespace}/{plural}" if namespaced and namespace else f"{prefix}/{plural}"


def object_path(obj: Object) -> str:
    meta = obj["metadata"]
    return f"{collection_path(obj['kind'], meta.get('namespace'))}/{meta['name']}"


class _Connection(http.client.HTTPSConnection):
    def __init__(self, namespace: str, address: str, port: int, context: ssl.SSLContext) -> None:
        super().__init__(address, port, timeout=60)
        self._namespace, self._tls = namespace, context

    def connect(self) -> None:
        raw = netns.connect(self._namespace, self.host, self.port)
        raw.settimeout(60)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = self._tls.wrap_socket(raw, server_hostname=self.host)


class Client:
    """Speaks to the API server in a namespace, as one user."""

    def __init__(self, namespace: str, address: str, port: int, ca: Path, token: str, connections: int = 6) -> None:
        self.namespace, self.address, self.port, self.token = namespace, address, port, token
        self._tls = ssl.create_default_context(cafile=str(ca))
        self._pool = ThreadPoolExecutor(connections, "api")
        self._local = threading.local()

    def close(self) -> None:
        self._pool.shutdown()

    def request(self, method: str, path: str, body: Object | None = None, content: str = "application/json") -> Object:
        """One request; a connection that the server closed meanwhile is opened again, once."""
        payload = json.dumps(body) if body is not None else None
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": content, "Accept": "application/json"}
        for attempt in (1, 2):
            connection = self._connection()
            try:
                connection.request(method, path, payload, headers)
                response = connection.getresponse()
                raw = response.read()
                break
            except (http.client.HTTPException, OSError):
                connection.close()
                del self._local.connection
                if attempt == 2:
                    raise
        if response.status >= 400:
            raise ApiError(response.status, method, path, _message(raw))
        return json.loads(raw) if raw[:1] == b"{" else {"text": raw.decode()}

    def _connection(self) -> _Connection:
        if not hasattr(self._local, "connection"):
            self._local.connection = _Connection(self.namespace, self.address, self.port, self._tls)
        connection: _Connection = self._local.connection
        return connection

    def parallel(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        return [*self._pool.map(function, items)]

    def create(self, obj: Object) -> Object:
        """Create an object; a status in it is written through the status subresource, as controllers do."""
        made = self.request("POST", collection_path(obj["kind"], obj["metadata"].get("namespace")), obj)
        return self.patch_status(obj) if obj.get("status") else made

    def patch_status(self, obj: Object) -> Object:
        return self.request(
            "PATCH", object_path(obj) + "/status", {"status": obj["status"]}, "application/merge-patch+json"
        )

    def replace(self, obj: Object) -> Object:
        """Make the object be like this, whatever it was; fields that the API server owns are carried over."""
        path = object_path(obj)
        current = self.request("GET", path)
        meta = {**obj["metadata"], "resourceVersion": current["metadata"]["resourceVersion"]}
        made = self.request("PUT", path, {**obj, "metadata": meta})
        if obj.get("status") != current.get("status") and (obj.get("status") or current["kind"] == "Service"):
            status = obj.get("status") or {"loadBalancer": {}}
            made = self.request("PUT", path + "/status", {**made, "status": status})
        return made

    def patch(self, obj: Object, patch: Object) -> Object:
        return self.request("PATCH", object_path(obj), patch, "application/merge-patch+json")

    def delete(self, obj: Object) -> None:
        self.request("DELETE", object_path(obj))

    def list_all(self, kind: str) -> list[Object]:
        """All objects of a kind, each with its kind and apiVersion, which lists leave out."""
        answer = self.request("GET", collection_path(kind))
        return [{"apiVersion": answer["apiVersion"], "kind": kind, **item} for item in answer["items"]]

    def create_all(self, objects: Sequence[Object]) -> list[Object]:
        return self.parallel(self.create, objects)

    def delete_all(self, objects: Sequence[Object]) -> None:
        self.parallel(self.delete, objects)


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw).get("message"))
    except ValueError:
        return raw.decode(errors="replace")[:500]
