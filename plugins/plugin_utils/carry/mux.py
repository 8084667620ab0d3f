# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A command over a connection that ssh keeps open, without another ssh: its start costs more than the command.

An ssh with ControlMaster listens on a socket. What a second ssh would say there is said here, as OpenSSH's PROTOCOL.mux
describes it: a greeting, a request with the command, and three descriptors for input, output and errors. The answers
are that the session is open, and the exit code. When the socket is closed before, ssh ends the session.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
from pathlib import Path
from typing import BinaryIO

VERSION = 4
# The ssh that keeps the connection answers at once. How long the host may take is up to the caller.
GREETING_SECONDS = 5.0
MOST_BYTES = 16 * 1024 * 1024

_HELLO, _NEW_SESSION, _EXIT, _OPENED = 0x00000001, 0x10000002, 0x80000004, 0x80000006
_NO_ESCAPE = 0xFFFFFFFF
_SHORTEST_PACKET, _LONGEST_PACKET = 8, 64 * 1024


class NoSession(Exception):
    """There is no connection, or it does not take the command."""


class LostSession(Exception):
    """The session ended without an exit code, or printed more than is read."""


def run(path: Path, command: str, stdin: BinaryIO) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr of a command on the host that the socket leads to."""
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(socket.socket(socket.AF_UNIX))
        ours, theirs = [], []
        for _stream in ("stdout", "stderr"):
            reading, writing = os.pipe()
            ours.append(stack.enter_context(os.fdopen(reading, "rb", buffering=0)))
            theirs.append(stack.enter_context(os.fdopen(writing, "wb", buffering=0)))
        try:
            _open_session(link, path, command, [stdin.fileno(), *(each.fileno() for each in theirs)])
        except (OSError, LostSession, struct.error) as error:
            raise NoSession(f"{path}: {error}") from error
        for each in theirs:
            each.close()
        return _finish(link, ours[0], ours[1])


def _open_session(link: socket.socket, path: Path, command: str, descriptors: list[int]) -> None:
    link.settimeout(GREETING_SECONDS)
    link.connect(str(path))
    # Another user's ssh would learn the delta, and could say that the host took it.
    _pid, user, _group = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():
        raise NoSession(f"{path}: is of user {user}")
    # All of it at once: to wait for each answer would take longer.
    link.sendall(_packet(struct.pack(">II", _HELLO, VERSION)) + _packet(_request(command)))
    for descriptor in descriptors:
        socket.send_fds(link, [b"\0"], [descriptor])
    if struct.unpack_from(">II", _received(link)) != (_HELLO, VERSION):
        raise NoSession(f"{path}: another version of the protocol")
    link.settimeout(None)  # the host is asked now
    if struct.unpack_from(">I", _received(link)) != (_OPENED,):
        raise NoSession(f"{path}: no session")


def _request(command: str) -> bytes:
    """A session without a terminal, forwarding, an escape character or variables of the environment."""
    return (
        struct.pack(">II", _NEW_SESSION, 0)
        + _text(b"")
        + struct.pack(">IIIII", 0, 0, 0, 0, _NO_ESCAPE)
        + _text(b"")
        + _text(command.encode("utf-8", "surrogateescape"))
    )


def _text(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


_packet = _text


def _received(link: socket.socket) -> bytes:
    """The next packet; what is left unread stays in the socket."""
    (length,) = struct.unpack(">I", _exactly(link, 4))
    if not _SHORTEST_PACKET <= length <= _LONGEST_PACKET:
        raise LostSession(f"a packet of {length} bytes")
    return _exactly(link, length)


def _exactly(link: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = link.recv(length - len(data))
        if not more:
            raise LostSession("closed")
        data += more
    return data


def _finish(link: socket.socket, stdout: BinaryIO, stderr: BinaryIO) -> tuple[int, bytes, bytes]:
    """All that the command prints, and its exit code; ssh closes the outputs once the host has sent everything."""
    said: dict[object, bytearray] = {stdout: bytearray(), stderr: bytearray()}
    code: int | None = None
    with selectors.DefaultSelector() as selector:
        for each in (link, stdout, stderr):
            selector.register(each, selectors.EVENT_READ)
        while selector.get_map():
            for key, _mask in selector.select():
                if key.fileobj is link:
                    packet = _received(link)
                    if len(packet) >= 12 and struct.unpack_from(">I", packet) == (_EXIT,):
                        (code,) = struct.unpack_from(">I", packet, 8)
                        selector.unregister(link)
                    continue
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                said[key.fileobj] += data
                if len(said[key.fileobj]) > MOST_BYTES:
                    raise LostSession(f"more than {MOST_BYTES} bytes of output")
    if code is None:
        raise LostSession("no exit code")
    return code, bytes(said[stdout]), bytes(said[stderr])
