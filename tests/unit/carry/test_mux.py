"""Commands over a connection that ssh keeps open: what is said at its socket, and what becomes of answers that are none."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from agentless_kube_proxy.carry import mux

HELLO = struct.pack(">II", 1, 4)
OPENED, REFUSED, EXIT = 0x80000006, 0x80000003, 0x80000004


class Master:
    """An ssh that keeps a connection, as far as its socket shows: it runs the command here."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def tell(self, data: bytes) -> None:
        self._link.sendall(struct.pack(">I", len(data)) + data)

    def _packet(self) -> bytes:
        (length,) = struct.unpack(">I", self._link.recv(4, socket.MSG_WAITALL))
        return self._link.recv(length, socket.MSG_WAITALL)

    def asked(self) -> tuple[str, list[int]]:
        """The command, and its three descriptors."""
        self.tell(HELLO)
        assert self._packet() == HELLO
        request = self._packet()
        assert struct.unpack_from(">III", request) == (0x10000002, 0, 0)
        # No terminal, no X11, no agent, no subsystem, no escape character, no type of terminal.
        assert struct.unpack_from(">IIIIII", request, 12) == (0, 0, 0, 0, 0xFFFFFFFF, 0)
        (length,) = struct.unpack_from(">I", request, 36)
        assert len(request) == 40 + length
        descriptors = [socket.recv_fds(self._link, 1, 1)[1][0] for _each in range(3)]
        return request[40:].decode(), descriptors

    def run(self) -> None:
        """Be a host."""
        command, (stdin, stdout, stderr) = self.asked()
        self.tell(struct.pack(">III", OPENED, 0, 7))
        code = subprocess.run(["sh", "-c", command], stdin=stdin, stdout=stdout, stderr=stderr, check=False).returncode
        for each in (stdin, stdout, stderr):
            os.close(each)
        self.tell(struct.pack(">III", EXIT, 7, code))


@pytest.fixture
def listen(tmp_path: Path) -> Callable[[Callable[[Master], None]], Path]:
    def start(behave: Callable[[Master], None]) -> Path:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def serve() -> None:
            link, _address = listener.accept()
            with link:
                behave(Master(link))
            listener.close()

        threading.Thread(target=serve, daemon=True).start()
        return tmp_path / "s"

    return start


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "delta"
    file.write_bytes(b"x" * 300_000 + b"\n")
    return file


Listen = Callable[[Callable[[Master], None]], Path]


def test_a_command_gets_its_input_and_tells_all_that_it_prints(listen: Listen, data: Path) -> None:
    path = listen(Master.run)
    with data.open("rb") as stdin:
        found = mux.run(path, "wc -c; echo it is said >&2; exit 3", stdin)
    assert found == (3, b"300001\n", b"it is said\n")


def test_output_larger_than_a_pipe_holds(listen: Listen, data: Path) -> None:
    path = listen(Master.run)
    with data.open("rb") as stdin:
        code, stdout, stderr = mux.run(path, "cat", stdin)
    assert (code, stdout, stderr) == (0, data.read_bytes(), b"")


def refuse(master: Master) -> None:
    master.asked()
    master.tell(struct.pack(">II", REFUSED, 0))


def hang_up(master: Master) -> None:
    master.asked()


def another_version(master: Master) -> None:
    master.tell(struct.pack(">II", 1, 3))


def nonsense(master: Master) -> None:
    master.tell(b"")


@pytest.mark.parametrize("behave", [refuse, hang_up, another_version, nonsense])
def test_without_a_session_nothing_has_begun(listen: Listen, data: Path, behave: Callable[[Master], None]) -> None:
    path = listen(behave)
    with data.open("rb") as stdin, pytest.raises(mux.NoSession):
        mux.run(path, "true", stdin)


def test_without_a_connection_there_is_no_session(tmp_path: Path, data: Path) -> None:
    for path in (tmp_path / "none", data, tmp_path / ("x" * 200)):
        with data.open("rb") as stdin, pytest.raises(mux.NoSession):
            mux.run(path, "true", stdin)


def lose(master: Master) -> None:
    master.asked()
    master.tell(struct.pack(">III", OPENED, 0, 7))


def shout(master: Master) -> None:
    _command, (_stdin, stdout, _stderr) = master.asked()
    master.tell(struct.pack(">III", OPENED, 0, 7))
    with contextlib.suppress(BrokenPipeError):
        while True:
            os.write(stdout, b"x" * 65536)


@pytest.mark.parametrize("behave", [lose, shout])
def test_a_session_that_is_lost_or_never_silent_ends(
    listen: Listen, data: Path, behave: Callable[[Master], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mux, "MOST_BYTES", 1_000_000)
    path = listen(behave)
    with data.open("rb") as stdin, pytest.raises(mux.LostSession):
        mux.run(path, "true", stdin)
