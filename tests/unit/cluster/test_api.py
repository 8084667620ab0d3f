"""Reading an API server: whole lists of one moment, or an error that says what to do."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from agentless_kube_proxy.cluster import api as api_module
from agentless_kube_proxy.cluster import transport as transport_module
from agentless_kube_proxy.cluster.access import Access, InvalidAccess, open_transport
from agentless_kube_proxy.cluster.api import Api, connect
from agentless_kube_proxy.cluster.record import Record, snapshot_of
from agentless_kube_proxy.cluster.refusals import Expired, Forbidden, Malformed, NotServed, Unauthorized, Unreachable
from agentless_kube_proxy.cluster.resources import ENDPOINT_SLICES, NODES, SERVICES
from agentless_kube_proxy.cluster.transport import TransportError, _chunks, _lines

from tests.unit.apiserver import Answer, Object, Server, serving, status


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as served:
        yield served


@contextlib.contextmanager
def connected(server: Server, slept: list[float] | None = None) -> Iterator[Api]:
    with connect(Access(host=server.url, api_key="secret"), timeout=5) as api:
        api._sleep = (slept if slept is not None else []).append
        yield api


def read(server: Server, slept: list[float] | None = None) -> Record:
    with connected(server, slept) as api:
        return api.record()


def test_all_objects_arrive_whatever_the_page_size(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(server)
    monkeypatch.setattr(api_module, "PAGE_SIZE", 2)
    paged = read(server)
    assert paged == whole
    assert paged.counts == {"Service": 5, "EndpointSlice": 3, "Node": 2, "ServiceCIDR": 0, "Endpoints": 0}
    assert len(snapshot_of(paged).services) == 5


def test_it_asks_for_what_kube_proxy_asks_for(server: Server) -> None:
    read(server)
    selectors = {path: (query.get("labelSelector"), query.get("fieldSelector")) for path, query in server.asked}
    assert selectors == {
        "/api/v1/services": ("!service.kubernetes.io/service-proxy-name", "spec.clusterIP!=None"),
        "/apis/discovery.k8s.io/v1/endpointslices": ("!service.kubernetes.io/headless", None),
        "/api/v1/nodes": (None, None),
        "/apis/networking.k8s.io/v1/servicecidrs": (None, None),
        "/api/v1/endpoints": (
            "!endpoints.kubernetes.io/managed-by,endpointslice.kubernetes.io/skip-mirror!=true,"
            "!service.kubernetes.io/headless",
            None,
        ),
    }


def test_all_lists_are_of_the_moment_of_the_first(server: Server) -> None:
    record = read(server)
    assert set(record.resource_versions.values()) == {"100"}
    later = [query for path, query in server.asked if path != "/api/v1/services"]
    assert all(query["resourceVersion"] == "100" and query["resourceVersionMatch"] == "Exact" for query in later)


def test_a_moment_that_several_runs_agreed_on_is_insisted_on(server: Server) -> None:
    server.version = 250
    with connected(server) as api:
        record = api.record_at("100")
    assert record.resource_version == "100"
    assert all(query["resourceVersion"] == "100" for _path, query in server.asked)
    assert all(query["resourceVersionMatch"] == "Exact" for _path, query in server.asked)
    server.once(status(410, "too old resource version"), "/api/v1/nodes")
    with connected(server) as api, pytest.raises(Expired, match="resourceVersion 100 cannot be read any more"):
        api.record_at("100")


def test_lists_of_different_moments_have_no_resource_version_in_common(server: Server) -> None:
    def later(path: str, _query: dict[str, str]) -> Answer | None:
        server.version += path == "/api/v1/nodes"
        return None

    server.once(status(410, "too old resource version"), "/api/v1/nodes")
    server.trouble.append(later)
    assert read(server).resource_version == ""


def test_a_moment_that_the_server_forgot_is_not_insisted_on(server: Server) -> None:
    server.once(status(410, "too old resource version"), "/api/v1/nodes")
    server.once(status(504, "Too large resource version: 100, current: 7"), "/apis/networking.k8s.io/v1/servicecidrs")
    record = read(server)
    assert record.counts["Node"] == 2
    assert [query.get("resourceVersion") for path, query in server.asked if path == "/api/v1/nodes"] == ["100", None]


def test_a_list_that_expires_halfway_starts_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "PAGE_SIZE", 2)

    def expire(path: str, query: dict[str, str]) -> Answer | None:
        if path == "/api/v1/services" and query.get("continue") == "4" and server.version == 100:
            server.version = 200
            server.objects[path] = server.objects[path][1:]
            return status(410, "The provided continue parameter is too old")
        return None

    server.trouble.append(expire)
    record = read(server)
    assert record.counts["Service"] == 4, "nothing of the expired list may remain"
    assert record.resource_versions["Service"] == "200"


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(server: Server, code: int) -> None:
    server.once(status(code, "not now"), times=2)
    slept: list[float] = []
    assert read(server, slept).counts["Service"] == 5
    assert len(slept) == 2
    assert slept[1] > slept[0]


def test_a_server_that_says_when_is_asked_then(server: Server) -> None:
    server.once(status(429, "slow down", Retry_After="7"))
    slept: list[float] = []
    read(server, slept)
    assert slept == [7.0]


def test_retry_after_is_never_waited_for_longer_than_half_a_minute(server: Server) -> None:
    server.once(status(503, "come back tomorrow", Retry_After="86400"))
    slept: list[float] = []
    read(server, slept)
    assert slept == [30.0]


def test_an_answer_that_is_cut_short_is_asked_for_again(server: Server) -> None:
    server.once(Answer(body=b'{"kind": "ServiceList", "metadata": {}, "items": [', cut=True))
    server.once(Answer(body=b'{"kind": "ServiceList", "metadata": {}, "items": [{"metadata": {"name": "x"}'))
    assert read(server).counts["Service"] == 5


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (status(401, "Unauthorized"), Unauthorized, ["does not accept the credentials", "401"]),
        (
            status(403, 'User "x" cannot list resource "services"'),
            Forbidden,
            ['verb "list"', 'resource "services"', 'User "x" cannot'],
        ),
        (status(404, "no such thing"), NotServed, ["/api/v1/services", "404"]),
        (status(500, "etcd is away"), Unreachable, ["500", "etcd is away"]),
        (status(410, "gone"), Expired, ["services", "gone"]),
        (Answer(body={"kind": "Status", "metadata": {}, "items": []}), Unreachable, ["list of services", "Status"]),
        (Answer(body=b"<html>a login page</html>"), Unreachable, ["is no list of objects"]),
        (Answer(body={"kind": "ServiceList", "metadata": {}, "items": [{"metadata": {}}]}), Unreachable, ["no list"]),
    ],
    ids=["401", "403", "404", "500", "410", "another kind", "no JSON", "an item without a name"],
)
def test_a_list_that_cannot_be_read_is_an_error_and_never_a_short_list(
    server: Server, answer: Answer, error: type[Exception], words: list[str]
) -> None:
    server.once(answer, "/api/v1/services", times=100)
    with pytest.raises(error) as raised:
        read(server)
    for word in [server.url, *words]:
        assert word in str(raised.value)


def test_a_forbidden_group_is_named(server: Server) -> None:
    server.once(status(403, "no"), "/apis/discovery.k8s.io/v1/endpointslices")
    with pytest.raises(Forbidden, match=r'"endpointslices" of API group "discovery\.k8s\.io"'):
        read(server)


def test_a_cluster_without_service_cidrs_is_read_all_the_same(server: Server) -> None:
    del server.objects["/apis/networking.k8s.io/v1/servicecidrs"]
    assert read(server).counts == {"Service": 5, "EndpointSlice": 3, "Node": 2, "ServiceCIDR": 0, "Endpoints": 0}
    assert "/apis/networking.k8s.io/v1beta1/servicecidrs" in [path for path, _query in server.asked]


def test_a_role_without_endpoints_reads_the_rest(server: Server) -> None:
    server.once(status(403, "no"), "/api/v1/endpoints")
    assert read(server).counts["Endpoints"] == 0


def test_a_server_that_is_not_there_is_named() -> None:
    with connect(Access(host="http://127.0.0.1:1", api_key="x"), timeout=1) as api:
        api._sleep = lambda _seconds: None
        with pytest.raises(Unreachable, match=r"http://127.0.0.1:1: cannot be reached: .*refused"):
            api.record()


def test_credentials_and_impersonation_travel(server: Server) -> None:
    access = Access(host=server.url, api_key="secret", impersonate_user="ops", impersonate_groups=("a", "b"))
    with connect(access) as api:
        api.list(NODES)
    sent = server.headers[-1]
    assert sent["Authorization"] == "Bearer secret"
    assert sent["Impersonate-User"] == "ops"
    assert sent["User-Agent"].startswith("agentless-kube-proxy/")


def test_a_user_and_a_password_travel(server: Server) -> None:
    with connect(Access(host=server.url, username="u", password="p")) as api:
        api.list(NODES)
    assert server.headers[-1]["Authorization"] == "Basic dTpw"


def test_a_kubeconfig_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidAccess, match="kubeconfig /nowhere/config: there is no such file"):
        connect(Access(kubeconfig="/nowhere/config"))


def test_a_context_that_is_not_there_is_named(server: Server) -> None:
    with pytest.raises(InvalidAccess, match="other"):
        connect(Access(kubeconfig=kubeconfig(server), context="other"))


def test_a_kubeconfig_can_be_a_mapping(server: Server) -> None:
    with connect(Access(kubeconfig=kubeconfig(server))) as api:
        assert len(api.list(SERVICES).items) == 5
    assert server.headers[-1]["Authorization"] == "Bearer from-file"


def test_an_exec_plugin_gives_the_token(server: Server) -> None:
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "from-plugin"},
    }
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "echo",
            "args": [json.dumps(credential)],
            "interactiveMode": "Never",
        }
    }
    with connect(Access(kubeconfig=kubeconfig(server, user))) as api:
        api.list(ENDPOINT_SLICES)
    assert server.headers[-1]["Authorization"] == "Bearer from-plugin"


def test_a_proxy_is_used_and_can_be_passed_by(server: Server) -> None:
    with connect(Access(host="http://cluster.invalid", api_key="secret", proxy=server.url)) as api:
        assert len(api.list(NODES).items) == 2
    passed_by = Access(host=server.url, api_key="secret", proxy="http://127.0.0.1:1", no_proxy="127.0.0.1")
    with connect(passed_by) as api:
        assert len(api.list(NODES).items) == 2


def test_in_a_pod_its_service_account_is_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes.config import incluster_config

    (tmp_path / "token").write_text("of-the-pod")
    (tmp_path / "ca.crt").write_text("of-the-cluster")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    api = connect(Access())
    assert api.url == "https://10.96.0.1:443"
    assert "of-the-pod" in str(api._transport._all_headers())


def test_without_any_credentials_it_says_what_it_looked_for(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(InvalidAccess, match="no API server is named"):
        connect(Access())


def test_no_key_of_the_kubeconfig_stays_in_a_file(
    server: Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    user = {"client-certificate-data": "Y2VydA==", "client-key-data": "a2V5", "token": "t"}
    config = kubeconfig(server, user)
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    api = connect(Access(kubeconfig=config))
    assert len(list(tmp_path.iterdir())) == 2
    with api:
        pass
    assert list(tmp_path.iterdir()) == []


def kubeconfig(server: Server, user: Object | None = None) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": user or {"token": "from-file"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def test_options_win_over_the_environment_and_its_names_are_those_of_kubernetes_core() -> None:
    environ = {
        "K8S_AUTH_HOST": "https://env",
        "K8S_AUTH_API_KEY": "env",
        "K8S_AUTH_VERIFY_SSL": "no",
        "K8S_AUTH_SSL_CA_CERT": "/ca",
        "K8S_AUTH_CERT_FILE": "/cert",
        "K8S_AUTH_KEY_FILE": "/key",
        "K8S_AUTH_IMPERSONATE_GROUPS": "a,b",
        "K8S_AUTH_PROXY_HEADERS_USER_AGENT": "us",
    }
    access = Access.of({"host": "https://option", "api_key": ""}, environ)
    assert access == Access(
        host="https://option",
        api_key="env",
        validate_certs=False,
        ca_cert="/ca",
        client_cert="/cert",
        client_key="/key",
        impersonate_groups=("a", "b"),
        proxy_headers={"user_agent": "us"},
    )


# ------------------------------------------------------------------ an API server that means harm


def test_a_list_without_end_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page promises another one: with the objects of the first again, or with none at all."""
    for items, limit, told in (
        ([{"metadata": {"name": "a", "namespace": "b"}}] * 10, "MOST_OBJECTS", "objects"),
        ([], "MOST_PAGES", "pages"),
        ([], "LIST_SECONDS", "seconds"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(api_module, limit, 0.3 if limit == "LIST_SECONDS" else 50)
            page = {"kind": "ServiceList", "metadata": {"resourceVersion": "1", "continue": "more"}, "items": items}
            server.trouble = [lambda _path, _query, page=page: Answer(body=page)]  # type: ignore[misc]
            with connected(server) as api, pytest.raises(Unreachable) as refused:
                api.list(SERVICES)
        assert re.search(f"has no end: it goes on after [0-9.]+ {told}", str(refused.value))


def test_an_answer_that_is_packed_is_refused_before_it_is_unpacked(server: Server) -> None:
    """A thousand bytes can stand for a gigabyte, and nothing asked for it."""
    server.once(Answer(body={"kind": "ServiceList"}, headers={"Content-Encoding": "gzip"}), times=100)
    with connected(server) as api, pytest.raises(Unreachable, match=r"the answer is packed \(gzip\)"):
        api.list(SERVICES)
    assert not any("gzip" in each.get("Accept-Encoding", "") for each in server.headers)


class Dripping:
    """An answer of which a piece comes every now and then, without end."""

    def __init__(self, piece: bytes, pause: float = 0.01) -> None:
        self.piece, self.pause, self.read = piece, pause, 0

    def read1(self, _most: int, *, decode_content: bool) -> bytes:
        assert not decode_content
        time.sleep(self.pause)
        self.read += 1
        return self.piece


def test_an_answer_that_drips_or_swells_ends() -> None:
    drip, flood = Dripping(b"x"), Dripping(b"x" * 1000, 0.0)
    with pytest.raises(TransportError, match=r"did not end within 0\.2 s"):
        list(_chunks(drip, 0.2, None))
    with pytest.raises(TransportError, match="has more than 100000 bytes"):
        list(_chunks(flood, 60, 100_000))
    assert flood.read == 101


def test_headers_that_come_byte_by_byte_end() -> None:
    """Each byte is in time, and the headers would never be."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        ended = threading.Event()

        def drip() -> None:
            taken, _address = listener.accept()
            with taken, contextlib.suppress(OSError):
                taken.sendall(b"HTTP/1.1 200 OK\r\n")
                while not ended.wait(0.05):
                    taken.sendall(b"X")

        threading.Thread(target=drip, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        transport = open_transport(Access(host=url, api_key="secret"), "test")
        began = time.monotonic()
        with pytest.raises(TransportError, match="did not come in time") as broken:
            transport.get("/api/v1/services", 0.4)
        ended.set()
        assert broken.value.may_heal
        assert 0.3 < time.monotonic() - began < 5


def test_an_answer_may_take_longer_than_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_CONNECT_SECONDS", 0.2)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def answer() -> None:
            taken, _address = listener.accept()
            with taken:
                taken.recv(65536)
                time.sleep(0.6)
                taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        transport = open_transport(Access(host=url, api_key="secret"), "test")
        assert transport.get("/api/v1/services", 5)[::2] == (200, b"{}")


def test_a_line_in_a_million_pieces_is_read_once() -> None:
    """Joined again with every piece, it would take hours."""
    pieces = [b"x" * 50] * 200_000
    began = time.monotonic()
    first, second, third = _lines([*pieces, b"\n\nb", b"\nc"])
    assert (len(first), second, third) == (10_000_000, b"b", b"c")
    assert time.monotonic() - began < 5
    with pytest.raises(TransportError, match="a line has more than"):
        list(_lines(b"x" * 1_000_000 for _ in range(100)))


CONFIG_MAP = "/api/v1/namespaces/kube-system/configmaps/kube-proxy"


def test_the_configuration_of_a_kube_proxy_is_one_object(server: Server) -> None:
    server.once(Answer(body={"kind": "ConfigMap", "data": {"config.conf": "mode: nftables\n"}}), CONFIG_MAP)
    with connected(server) as api:
        assert api.configuration_if("must") == "mode: nftables\n"
        assert api.configuration_if("") == ""
    assert server.asked == [(CONFIG_MAP, {})]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (status(404, 'configmaps "kube-proxy" not found'), NotServed),
        (status(403, "no"), Forbidden),
        (Answer(body={"kind": "ConfigMap", "data": {"other": "x"}}), NotServed),
    ],
    ids=["none", "forbidden", "another key"],
)
def test_a_configuration_that_cannot_be_had_is_an_error_where_it_was_asked_for(
    server: Server, answer: Answer, error: type[Exception]
) -> None:
    server.once(answer, CONFIG_MAP, times=2)
    with connected(server) as api:
        assert api.configuration_if("may") == ""
        with pytest.raises(error, match=r"kube-system/(configmaps/)?kube-proxy"):
            api.configuration_if("must")


def test_a_server_that_is_broken_has_no_configuration_that_could_be_left_out(server: Server) -> None:
    server.once(Answer(body={"kind": "ConfigMap"}), CONFIG_MAP)
    with connected(server) as api, pytest.raises(Malformed):
        api.configuration_if("may")
