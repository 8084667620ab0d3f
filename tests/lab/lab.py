"""A small cluster network out of kernel namespaces: nodes with sshd, pods, a controller and a client outside.

    with Lab("example", nodes=3) as lab:
        web = lab.add_pod("web-1", "n2", serve=[("tcp", 8080)])
        assert lab.node("n1").call("tcp", web.addresses[0], 8080).who == "web-1"

All of it hangs on one process, the lab's process 1. When that ends, because the lab is closed or because its owner
died, the kernel ends every other process in the lab and frees every namespace. The machine's network is never touched.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import record
from .addresses import (
    CONTROLLER,
    MOST_NODES,
    OUTSIDE,
    OUTSIDE_GATEWAY,
    STRANGER,
    host_prefix,
    node_addresses,
    pod_addresses,
    pod_cidrs,
)
from .inventory import inventory_text, ssh_config, ssh_wrapper
from .node import Node, run
from .place import Place, ask
from .pod import Pod, batch, link_up
from .record import LabError, Process, Record
from .uml import BOOT_WITHIN, UmlNode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

HERE = Path(__file__).parent
START_WITHIN = 30.0


class Lab:
    """Nodes are named n1, n2, …; prefix names the lab among all labs of the machine.

    After the usual nodes come as many with kernels of their own as uml says. iptables chooses the variant, "nft" or
    "legacy", on all nodes. A lab that is to stay outlives the process that makes it.
    """

    def __init__(self, prefix: str, nodes: int = 3, *, uml: int = 0, iptables: str = "", stay: bool = False) -> None:
        if os.geteuid() != 0:
            raise LabError("the lab makes network namespaces and needs root")
        if not 0 <= nodes + uml <= MOST_NODES:
            raise LabError(f"{nodes + uml} nodes asked for, the address plan has room for {MOST_NODES}")
        self.prefix = prefix
        self._process: subprocess.Popen[bytes] | None = None
        self._record = Record(prefix, nodes, Process.of(os.getpid()), uml=uml)
        self.state = record.claim(self._record)
        self._places()
        atexit.register(self.close)
        try:
            self._start_agent(stay)
            self._start_nodes(self.nodes)
            for node in self.nodes if iptables else ():
                node.use_iptables(iptables)
            if stay:
                self._leave()
        except BaseException:
            self.close()
            raise

    @classmethod
    def attach(cls, prefix: str) -> Lab:
        """A lab that `python -m tests.lab up` made. Closing it is up to `python -m tests.lab down`."""
        found = record.read(prefix)
        if found is None or found.agent is None or not found.agent.alive:
            raise LabError(f"there is no lab {prefix}")
        lab = cls.__new__(cls)
        lab.prefix, lab._process, lab._record, lab.state = prefix, None, found, record.HOME / prefix
        lab._places()
        return lab

    def _places(self) -> None:
        agent = self.state / "agent.sock"
        numbers = range(1, self._record.nodes + 1)
        self.nodes: tuple[Node, ...] = tuple(
            Node(f"n{i}", f"n{i}", node_addresses(i), agent, i, self.state) for i in numbers
        )
        for i in range(self._record.nodes + 1, self._record.nodes + self._record.uml + 1):
            own = self.state / f"n{i}.sock"
            self.nodes += (UmlNode(f"n{i}", "", node_addresses(i), own, i, self.state),)
        self.pods: dict[str, Pod] = {}
        self.controller = Place("controller", "", CONTROLLER, agent)
        self.outside = Place("outside", "outside", OUTSIDE, agent)

    def node(self, name: str) -> Node:
        try:
            return next(node for node in self.nodes if node.name == name)
        except StopIteration:
            raise LabError(f"lab {self.prefix} has no node {name}") from None

    def pod(self, name: str) -> Pod:
        try:
            return self.pods[name]
        except KeyError:
            raise LabError(f"lab {self.prefix} has no pod {name}") from None

    def add_pod(
        self, name: str, node: str, *, addresses: Sequence[str] = (), serve: Iterable[tuple[str, int]] = ()
    ) -> Pod:
        """A pod on this node. Without addresses it gets the next free pair, from .11 on."""
        if name in self.pods:
            raise LabError(f"lab {self.prefix} already has a pod {name}")
        at = self.node(node)
        taken = {address for pod in self.pods.values() for address in pod.addresses}
        if not addresses:
            addresses = next(pair for i in range(11, 250) if not taken & {*(pair := pod_addresses(at.number, i))})
        interface = f"pod{sum(pod.node == at for pod in self.pods.values()) + 1}"
        pod = Pod(name, f"pod-{name}", tuple(addresses), self.controller.agent, at, interface)
        self.sh(f"ip netns add {pod.netns}\n{pod.link_script()}")
        self.pods[name] = pod
        for proto, port in serve:
            pod.serve(proto, port)
        return pod

    def announce(self, address: str, node: str) -> None:
        """Routes an address, say of a load balancer, to this node, for the controller and everything outside."""
        index = 1 if ":" in address else 0
        self.sh(f"ip route replace {host_prefix(address)} via {self.node(node).addresses[index]}\n")

    def reboot(self, name: str) -> None:
        """What the node had in memory is gone, its disk stays, its pods come back."""
        node = self.node(name)
        pods = [pod for pod in self.pods.values() if pod.node == node]
        if isinstance(node, UmlNode):
            node.power_off()
            self._boot(node)
            return
        gone = Process.of(node.pid)
        os.kill(gone.pid, 9)
        while gone.alive:
            time.sleep(0.002)
        links = "".join(f"ip -n {pod.netns} link del eth0\n" for pod in pods)
        self.sh(f"{links}ip link del {node.name}\nip netns del {node.netns}\n")
        self._start_nodes([node])
        self.sh("".join(pod.link_script() for pod in pods))

    def sh(self, script: str) -> None:
        """Runs a shell script inside the lab, in the controller's network namespace."""
        agent = int((self.state / "agent.pid").read_text())
        argv = ["nsenter", f"--target={agent}", "--mount", "--net", "--pid", "--", "sh", "-eu", "-s"]
        run(f"lab {self.prefix}", argv, input=script)

    def inventory(self, path: Path) -> Path:
        """Writes an Ansible inventory of the nodes that works from the machine's own namespace."""
        path.write_text(inventory_text(self.nodes, self.state))
        return path

    def _leave(self) -> None:
        self._record = replace(self._record, owner=None)
        self._record.write(self.state)
        atexit.unregister(self.close)

    def close(self) -> None:
        """Removes everything. Closing twice does no harm."""
        atexit.unregister(self.close)
        record.remove(self.prefix)
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_agent(self, stay: bool) -> None:
        argv = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child"]
        argv += [str(HERE / "lab-init"), str(self.state), sys.executable, str(HERE / "agent.py")]
        stdin = subprocess.DEVNULL if stay else subprocess.PIPE
        with (self.state / "agent.log").open("wb") as log:
            self._process = subprocess.Popen(argv, stdin=stdin, stdout=log, stderr=log, start_new_session=True, cwd="/")
        deadline = time.monotonic() + START_WITHIN
        while not (self.state / "agent.sock").exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"lab {self.prefix} does not start:\n{(self.state / 'agent.log').read_text()}")
            time.sleep(0.002)
        self._record = replace(self._record, agent=Process.of(int((self.state / "agent.pid").read_text())))
        self._record.write(self.state)
        self.sh(controller_script())

    def _start_nodes(self, nodes: Sequence[Node]) -> None:
        self._make_keys(nodes)
        kernels = [node for node in nodes if isinstance(node, UmlNode)]
        spaces = [node for node in nodes if node not in kernels]
        self.sh("".join(node.links_script() for node in kernels))
        self._boot(*kernels)
        self.sh("".join(node_script(node, self.nodes, self.state) for node in spaces))
        for node in spaces:
            ask(self.controller.agent, do="wait", address=node.addresses[0], port=22, timeout=START_WITHIN)

    def _boot(self, *nodes: UmlNode) -> None:
        self.sh("".join(node.boot_script(node_links(node, self.nodes)) for node in nodes))
        for node in nodes:
            ask(self.controller.agent, do="wait", address=node.addresses[0], port=22, timeout=BOOT_WITHIN)
            node.connect()

    def _make_keys(self, nodes: Sequence[Node]) -> None:
        """Key pairs for the controller's user and each node's sshd, and the known_hosts that follows from them."""
        wanted = [self.state / "id_ed25519", *(self.state / f"{node.name}.key" for node in nodes)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(make_key, [path for path in wanted if not path.exists()]))
        lines = []
        for node in self.nodes:
            public = (self.state / f"{node.name}.key.pub").read_text().split()[:2]
            lines.append(f"{','.join(node.addresses)} {' '.join(public)}\n")
        (self.state / "known_hosts").write_text("".join(lines))
        (self.state / "ssh_config").write_text(ssh_config(self.state))
        wrapper = self.state / "ssh"
        wrapper.write_text(ssh_wrapper(int((self.state / "agent.pid").read_text())))
        wrapper.chmod(0o700)


def make_key(path: Path) -> None:
    run("ssh-keygen", ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.stem, "-f", str(path)])


def controller_script() -> str:
    lines = [
        "link set lo up",
        "link add br0 type bridge forward_delay 0 mcast_snooping 0",
        f"addr add {CONTROLLER[0]}/16 dev br0",
        f"addr add {CONTROLLER[1]}/64 dev br0 nodad",
        *link_up("br0", "fe80::1"),
        "netns add outside",
        "link add outside type veth peer name eth0 netns outside",
        f"addr add {OUTSIDE_GATEWAY[0]}/24 dev outside",
        f"addr add {OUTSIDE_GATEWAY[1]}/64 dev outside nodad",
        *link_up("outside", "fe80::1"),
    ]
    client = [
        "link set lo up",
        *(f"addr add {address}/24 dev eth0" for address in (OUTSIDE[0], STRANGER[0])),
        # The kernel prefers the youngest address of a family in IPv6, the oldest in IPv4.
        *(f"addr add {address}/64 dev eth0 nodad" for address in (STRANGER[1], OUTSIDE[1])),
        *link_up("eth0", "fe80::2"),
        f"route add default via {OUTSIDE_GATEWAY[0]}",
        f"route add default via {OUTSIDE_GATEWAY[1]}",
    ]
    settings = {
        "net/ipv4/ip_forward": 1,
        "net/ipv4/conf/all/send_redirects": 0,
        "net/ipv6/conf/all/forwarding": 1,
        # Frames on the bridge are not ours to filter.
        "net/bridge/bridge-nf-call-iptables": 0,
        "net/bridge/bridge-nf-call-ip6tables": 0,
    }
    writes = "".join(
        f"[ ! -e /proc/sys/{name} ] || echo {value} >/proc/sys/{name}\n" for name, value in settings.items()
    )
    return writes + batch("", lines) + batch("outside", client)


def node_script(node: Node, nodes: Sequence[Node], state: Path) -> str:
    """Commands that make a node, to be run inside the lab."""
    controller = [
        f"netns add {node.netns}",
        # A network card keeps its address when its machine reboots, and neighbours rely on that.
        f"link add {node.name} type veth peer name eth0 address 02:00:00:00:00:{node.number:02x} netns {node.netns}",
        f"link set {node.name} master br0 up",
    ]
    controller += [f"route replace {cidr} via {via}" for cidr, via in zip(node.pod_cidrs, node.addresses, strict=True)]
    init = f"{HERE}/node-init {node.name} {state} /run/nodes/{node.name} >{state}/{node.name}.log 2>&1"
    namespaces = f"nsenter --net=/run/netns/{node.netns} unshare --mount --uts --pid --fork --kill-child"
    links = "\n".join(node_links(node, nodes))
    return batch("", controller) + f"setsid {namespaces} {init} <<'END' &\n{links}\nEND\n"


def node_links(node: Node, nodes: Sequence[Node]) -> list[str]:
    """ip commands for the node itself."""
    inside = [
        "link set lo up",
        f"addr add {node.addresses[0]}/16 dev eth0",
        f"addr add {node.addresses[1]}/64 dev eth0 nodad",
        *link_up("eth0", f"fe80::{node.number + 16:x}"),
        *(f"route add default via {gateway}" for gateway in CONTROLLER),
    ]
    for other in nodes:
        if other != node:
            inside += [
                f"route add {cidr} via {via}"
                for cidr, via in zip(pod_cidrs(other.number), other.addresses, strict=True)
            ]
    return inside
