"""A host with health checks: its bundle, requests as load balancers send them, and a real systemd to listen."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta

from tests.controlplane import netns
from tests.lab.program import HEALTH
from tests.unit.build import Object, dual_stack, endpoint, node, port, render, slice_of

from .host import Host, Result, with_path

PORT = 31000


def service(name: str = "web", check: int = PORT, **fields: Any) -> Object:
    """A load balancer of policy Local, in both families."""
    number = check - PORT
    made: Object = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": check,
        "clusterIP": f"10.96.7.{7 + number}",
        "clusterIPs": [f"10.96.7.{7 + number}", f"fd00:10:96::{7 + number}"],
        "ports": [port(nodePort=30080 + number)],
    }
    return dual_stack(name, **{**made, **fields})


def state(*objects: Object, mode: str = "iptables", **fields: Any) -> State:
    """What node n1 is given for these objects."""
    # What only a whole machine has is left alone.
    fields = {"conntrack": {"maxPerCore": 0}, **fields}
    return render(node("n1", "172.18.0.11", "fd00:18::11"), *objects, mode=mode, **fields)


def shop(local: int = 2, local6: int = 1, **fields: Any) -> State:
    """web with that many endpoints on the node, and one elsewhere."""
    slices = [
        slice_of("web", *(f"10.244.1.{i + 1}" for i in range(local)), endpoint("10.244.2.1", node="n2")),
        slice_of("web", *(f"fd00:10:244:1::{i + 1}" for i in range(local6)), endpoint("fd00:10:244:2::1", node="n2")),
    ]
    return state(service(), *slices, **fields)


def bundle(directory: Path, made: State) -> Path:
    write_bundle(made, directory)
    return directory


def change(directory: Path, old: State, new: State) -> Path:
    write_delta(delta(old, new), new, directory)
    return directory


def request(path: str = "/", method: str = "GET", version: str = "1.1", headers: str = "Connection: close\r\n") -> str:
    host = "Host: node\r\n" if version == "1.1" else ""
    return f"{method} {path} HTTP/{version}\r\n{host}{headers}\r\n"


def asked(host: Host, what: str = str(PORT), text: str | None = None) -> str:
    """The answer of akp-health to a request on its stdin, byte for byte."""
    shell = ["busybox", "ash"] if host.shell == "busybox" else ["dash"]
    done = subprocess.run(
        ["ip", "netns", "exec", host.name, *shell, HEALTH, what],
        env=with_path(host.environment),
        input=(request() if text is None else text).encode(),
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done
    return done.stdout.decode()


def over_tcp(namespace: str, address: str, number: int, text: str | None = None) -> str:
    """The answer to a request over a connection."""
    with netns.connect(namespace, address, number, 60) as connection:
        connection.sendall((request() if text is None else text).encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer.decode()


def until_listening(namespace: str, address: str, number: int, *, wanted: bool = True) -> None:
    """Wait until a port is open, or no longer so."""
    deadline = time.monotonic() + 60
    while True:
        try:
            netns.connect(namespace, address, number, 5).close()
            if wanted:
                return
        except OSError:
            if not wanted:
                return
        assert time.monotonic() < deadline, f"{address}:{number}: {wanted=} after 60 s"
        time.sleep(0.05)


@dataclass
class Systemd:
    """A systemd that is process 1 of its own namespaces, in the network namespace of a host."""

    host: Host
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Of systemd, as seen from here."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def enter(self, *argv: str | Path) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--cgroup", *map(str, argv)]

    def akp(self, *arguments: str | Path) -> Result:
        return self.host.akp(
            *arguments, prefix=tuple(self.enter()), AKP_ETC=str(self.host.directory / "etc"), AKP_HEALTH=str(HEALTH)
        )

    def systemctl(self, *arguments: str) -> str:
        return subprocess.run(
            self.enter("systemctl", *arguments), capture_output=True, text=True, check=False, timeout=60
        ).stdout


# A private /run, cgroup tree and set of units. /proc/sys is read-only but for the network's part, the host's own.
_INIT = """
mount --make-rprivate /
mount --bind /proc/sys/net "$1/net" && mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys
mount --move "$1/net" /proc/sys/net
mount -t tmpfs tmpfs /run
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /usr/lib/systemd/system
mount -t tmpfs tmpfs /etc/systemd
for name in sysinit basic sockets shutdown timers paths default; do
    printf '[Unit]\\nDefaultDependencies=no\\n' >"/usr/lib/systemd/system/$name.target"
done
export container=akp
exec /usr/bin/systemd --system --log-target=null --show-status=no
"""


@contextmanager
def systemd(host: Host) -> Iterator[Systemd]:
    """Run it; with it goes everything that it started."""
    (host.directory / "net").mkdir()
    group = _cgroup_root() / host.name
    group.mkdir()
    inside = ["unshare", "--pid", "--mount", "--uts", "--ipc", "--cgroup", "--fork", "--mount-proc", "--kill-child"]
    join = ["sh", "-c", 'echo $$ >"$0/cgroup.procs"; exec nsenter "$@"', str(group), f"--net={netns.path(host.name)}"]
    process = subprocess.Popen(
        [*join, *inside, "sh", "-eu", "-c", _INIT, "init", str(host.directory)],
        stdin=subprocess.DEVNULL,
    )
    try:
        running = Systemd(host, process)
        deadline = time.monotonic() + 60
        while "running" not in (told := _is_running(running)) and "degraded" not in told:
            assert process.poll() is None, "systemd ended"
            assert time.monotonic() < deadline, f"systemd does not run after 60 s: {told}"
            time.sleep(0.1)
        yield running
    finally:
        process.kill()
        process.wait()
        _remove_group(group)


def _is_running(each: Systemd) -> str:
    try:
        return each.systemctl("is-system-running")
    except (IndexError, OSError):
        return ""


def _cgroup_root() -> Path:
    for line in Path("/proc/mounts").read_text().splitlines():
        _device, where, sort, *_rest = line.split()
        if sort == "cgroup2":
            return Path(where)
    raise RuntimeError("no cgroup2 is mounted here")


def _remove_group(group: Path) -> None:
    """Processes that were killed leave a moment later."""
    deadline = time.monotonic() + 30
    while group.exists():
        for directory, _names, _files in os.walk(group, topdown=False):
            try:
                Path(directory).rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.05)


def resets(namespace: str, address: str, number: int) -> None:
    """A client that connects, asks nothing and goes away."""
    netns.connect(namespace, address, number, 10).shutdown(socket.SHUT_RDWR)
