"""A real control plane for tests: etcd and kube-apiserver in a network namespace, nothing of it in the root namespace.

    with ControlPlane("akp-ctl", addresses=("192.168.77.1", "fd77::1")) as plane:
        plane.load(objects)
        plane.export(folder)

The namespace and its addresses are the caller's; so are the nodes that reach it. Kubernetes itself comes from
`tests/controlplane/build`, which compiles the pinned release once and keeps it outside the work tree.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from . import netns, pki
from .client import ApiError, Client, Object

__all__ = ["TOKENS", "ApiError", "Client", "ControlPlane", "Object", "binaries"]

DEFAULT_MINOR = "1.37"
SERVICE_CIDRS = ("10.96.0.0/12", "fd00:10:96::/112")
PORT = 6443

# user -> token. admin may do everything, kube-proxy what every cluster grants it, akp only what a snapshot needs.
TOKENS = {"admin": "token-admin", "kube-proxy": "token-kube-proxy", "akp": "token-akp"}
_TOKEN_FILE = """\
token-admin,admin,1,system:masters
token-kube-proxy,system:kube-proxy,2
token-akp,akp,3
"""
SNAPSHOT_ROLE: list[Object] = [
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "akp-snapshot"},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "nodes", "endpoints"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
            {"apiGroups": ["networking.k8s.io"], "resources": ["servicecidrs"], "verbs": ["list", "watch"]},
        ],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "akp-snapshot"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "akp-snapshot"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "akp"}],
    },
]

# What a cluster consists of, and the files that an export writes, in the order in which objects must be made.
EXPORTED = {"ServiceCIDR": "servicecidrs", "Node": "nodes", "Service": "services", "EndpointSlice": "endpointslices"}
# These belong to the API server itself.
OWN = {("ServiceCIDR", "kubernetes"), ("Service", "kubernetes"), ("EndpointSlice", "kubernetes")}


def binaries(minor: str = DEFAULT_MINOR) -> Path:
    """The folder with kube-apiserver and kube-proxy of a Kubernetes minor; built now if it was never built."""
    build = Path(__file__).with_name("build")
    done = subprocess.run([str(build), minor], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{build} {minor} exited {done.returncode}; its messages are above")
    return Path(done.stdout.splitlines()[-1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Politely first; an API server with watches open would take a minute for its farewells."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class ControlPlane:
    """etcd and kube-apiserver in a namespace, and the means to fill them."""

    def __init__(
        self,
        namespace: str,
        addresses: Sequence[str],
        minor: str = DEFAULT_MINOR,
        service_cidrs: Sequence[str] = SERVICE_CIDRS,
        feature_gates: dict[str, bool] | None = None,
    ) -> None:
        self.namespace, self.addresses, self.minor = namespace, tuple(addresses), minor
        self.service_cidrs, self.feature_gates = tuple(service_cidrs), dict(feature_gates or {})
        self.ready_after = 0.0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []

    def __enter__(self) -> ControlPlane:
        etcd = shutil.which("etcd")
        if etcd is None:
            raise RuntimeError("etcd is missing: apt-get install etcd-server")
        folder = binaries(self.minor)
        # On tmpfs where there is one: etcd waits for the disk at every write.
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="akp-controlplane-", dir=shm))
        started = time.monotonic()
        try:
            self.pki = pki.create(self.folder / "pki", self.addresses)
            (self.folder / "tokens.csv").write_text(_TOKEN_FILE)
            self._start("etcd", [etcd, *self._etcd_flags()])
            self._apiserver = [str(folder / "kube-apiserver"), *self._apiserver_flags()]
            self._start("kube-apiserver", self._apiserver)
            self.client = self.client_as("admin")
            self._wait_ready()
            for obj in SNAPSHOT_ROLE:
                self.client.create(obj)
        except BaseException:
            self._stop()
            raise
        self.ready_after = time.monotonic() - started
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._stop()

    def _etcd_flags(self) -> list[str]:
        return [
            f"--data-dir={self.folder}/etcd",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--log-level=warn",
            "--logger=zap",
        ]

    def _apiserver_flags(self) -> list[str]:
        gates = ",".join(f"{name}={str(on).lower()}" for name, on in self.feature_gates.items())
        return [
            "--etcd-servers=http://127.0.0.1:2379",
            f"--service-cluster-ip-range={','.join(self.service_cidrs)}",
            "--bind-address=::",
            f"--advertise-address={self.addresses[0]}",
            f"--secure-port={PORT}",
            f"--cert-dir={self.folder}/apiserver",
            f"--tls-cert-file={self.pki.certificate}",
            f"--tls-private-key-file={self.pki.key}",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=RBAC",
            "--anonymous-auth=false",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.pki.service_account_public_key}",
            f"--service-account-signing-key-file={self.pki.service_account_key}",
            "--disable-admission-plugins=ServiceAccount",
            "--enable-priority-and-fairness=false",
            *([f"--feature-gates={gates}"] if gates else []),
        ]

    def _start(self, name: str, argv: list[str]) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        self._logs.append(log)
        process = subprocess.Popen(
            netns.command(self.namespace, argv),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._processes.append(process)

    def _wait_ready(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while True:
            for process in self._processes:
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args!r} exited {process.returncode}:\n{self.logs()}")
            try:
                self.client.request("GET", "/readyz")
                return
            except (ApiError, OSError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"the API server is not ready after {seconds} s ({error}):\n{self.logs()}"
                    ) from error
                time.sleep(0.1)

    def restart(self) -> None:
        """End the API server and start it again; what it holds stays in etcd."""
        _end(self._processes.pop())
        self._start("kube-apiserver", self._apiserver)
        self._wait_ready()

    def logs(self, lines: int = 20) -> str:
        found = {log.name: log.read_text(errors="replace").splitlines() for log in sorted(self.folder.glob("*.log"))}
        return "\n".join("\n".join([f"== {name}", *text[-lines:]]) for name, text in found.items())

    def _stop(self) -> None:
        """The API server first, so that it does not mourn its etcd; each by its pid."""
        for process in reversed(self._processes):
            _end(process)
        for log in self._logs:
            log.close()
        self._processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def client_as(self, user: str) -> Client:
        return Client(self.namespace, self.addresses[0], PORT, self.pki.ca, TOKENS[user])

    def kubeconfig(self, path: Path, user: str = "admin", address: str | None = None) -> Path:
        """Write a kubeconfig for one of the users; it works wherever the address is reachable."""
        host = address or self.addresses[0]
        server = f"https://[{host}]:{PORT}" if ":" in host else f"https://{host}:{PORT}"
        ca = base64.b64encode(self.pki.ca.read_bytes()).decode()
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority-data": ca}}],
            "users": [{"name": user, "user": {"token": TOKENS[user]}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        path.write_text(json.dumps(content, indent=2) + "\n")
        return path

    def load(self, objects: Iterable[Object]) -> None:
        """Create a cluster's objects: what others refer to first, the rest over several connections at once."""
        by_kind: dict[str, list[Object]] = {}
        for obj in objects:
            by_kind.setdefault(obj["kind"], []).append(obj)
        self.make_namespaces(obj for found in by_kind.values() for obj in found)
        for kind in EXPORTED:
            self.client.create_all(by_kind.get(kind, []))

    def make_namespaces(self, objects: Iterable[Object]) -> None:
        """The namespaces that objects want to live in; no controller is there to delete them again, so they stay."""
        wanted = {obj["metadata"]["namespace"] for obj in objects if "namespace" in obj["metadata"]}
        existing = {obj["metadata"]["name"] for obj in self.client.list_all("Namespace")}
        for name in sorted(wanted - existing):
            self.client.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def clear(self) -> None:
        """Delete every object of a cluster except the API server's own; namespaces stay, nothing reads them."""
        for kind in reversed(EXPORTED):
            found = self.client.list_all(kind)
            self.client.delete_all([o for o in found if (kind, o["metadata"]["name"]) not in OWN])

    def objects(self) -> list[Object]:
        return [obj for kind in EXPORTED for obj in self.client.list_all(kind)]

    def export(self, folder: Path) -> Path:
        """Write the cluster as `kubectl get -o json` would print it: one List per kind."""
        folder.mkdir(parents=True, exist_ok=True)
        for kind, name in EXPORTED.items():
            items: list[Any] = self.client.list_all(kind)
            content = {"apiVersion": "v1", "kind": "List", "items": items}
            (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        return folder
