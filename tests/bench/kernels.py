"""When a kernel has the rules of a change: seen in the same way whoever wrote them, at no cost to the writer.

nf_tables (nftables mode, and iptables-nft) tells listeners about every rule once its transaction is in force. Those of
the Service that changed have its name or its hash in the name of their chain, ours and kube-proxy's alike.
iptables-legacy tells nothing: there the number of rules in table nat is asked for every two milliseconds, which reads
no rule.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Sequence

from tests.controlplane import netns

NETLINK_NETFILTER = 12
NFTABLES_GROUP = 1 << (7 - 1)
SO_RCVBUFFORCE = 33
IPT_SO_GET_INFO = 64
GETINFO = struct.Struct("=32s I 5I 5I I I")  # struct ipt_getinfo: name, hooks, their offsets, number of entries, bytes
POLL_SECONDS = 0.002

_libc = ctypes.CDLL(None, use_errno=True)


class NftKernel:
    """The kernel of a network namespace, as its events tell it. A path under /proc names a namespace as well."""

    def __init__(self, namespace: str, words: bytes) -> None:
        self._words = words
        with netns.entered(namespace):
            self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        self.socket.bind((0, NFTABLES_GROUP))
        self.socket.setblocking(False)

    def changed(self) -> bool:
        """Whether a rule of the Service was written since this was asked last."""
        found = False
        while True:
            try:
                found = self._words in self.socket.recv(1 << 20) or found
            except BlockingIOError:
                return found
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise

    def close(self) -> None:
        """Listen no more."""
        self.socket.close()


class LegacyKernel:
    """The kernel of a network namespace, as the size of its table nat tells it."""

    def __init__(self, namespace: str) -> None:
        with netns.entered(namespace):
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
        self._last = self._rules()

    def changed(self) -> bool:
        """Whether the table has more or fewer rules than when this was asked last."""
        before, self._last = self._last, self._rules()
        return before != self._last

    def _rules(self) -> int:
        buffer = ctypes.create_string_buffer(GETINFO.pack(b"nat", *[0] * 13), GETINFO.size)
        size = ctypes.c_uint32(GETINFO.size)
        if _libc.getsockopt(self.socket.fileno(), socket.IPPROTO_IP, IPT_SO_GET_INFO, buffer, ctypes.byref(size)):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return int(GETINFO.unpack(buffer.raw)[-2])

    def close(self) -> None:
        """Look no more."""
        self.socket.close()


Kernel = NftKernel | LegacyKernel


def kernel(namespace: str, flavour: str, words: bytes) -> Kernel:
    """The kernel of a namespace; words stand in the name of every chain of the Service."""
    return LegacyKernel(namespace) if flavour == "legacy" else NftKernel(namespace, words)


def when_changed(kernels: Sequence[Kernel], longest: float) -> list[float]:
    """When each of them had the change, by time.perf_counter."""
    seen: dict[int, float] = {}
    deadline = time.monotonic() + longest
    while len(seen) < len(kernels):
        waiting = [(i, each) for i, each in enumerate(kernels) if i not in seen]
        polled = any(isinstance(each, LegacyKernel) for _i, each in waiting)
        listened = [each.socket for _i, each in waiting if isinstance(each, NftKernel)]
        select.select(listened, [], [], POLL_SECONDS if polled else 1.0)
        seen |= {i: time.perf_counter() for i, each in waiting if each.changed()}
        if time.monotonic() > deadline:
            raise SystemExit(
                f"{len(kernels) - len(seen)} of {len(kernels)} kernels were not changed in {longest:.0f} s"
            )
    return [seen[i] for i in range(len(kernels))]


def quiet(kernels: Sequence[Kernel], seconds: float) -> None:
    """Until none of them has changed for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.1)
        if any(each.changed() for each in kernels):
            until = time.monotonic() + seconds
