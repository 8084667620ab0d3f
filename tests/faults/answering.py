"""Runs in the namespace of a node: endpoints that answer, and a client that asks whoever it is told to ask.

A line on stdin is a list of "address port" pairs separated by commas; the answer is a line with the address of the
endpoint that answered each, or "-".
"""

from __future__ import annotations

import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor


def serve() -> None:
    """Every address of the namespace on port 8080."""
    listener = socket.create_server(("::", 8080), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64)
    while True:
        connection, _peer = listener.accept()
        with connection:
            connection.sendall(connection.getsockname()[0].removeprefix("::ffff:").encode())


def ask(address: str, port: str) -> str:
    """Who answers; asked again once, as a packet may be lost on a busy machine."""
    source = "fd00:10:244::9:9" if ":" in address else "10.244.9.9"
    for _try in range(2):
        try:
            with socket.create_connection((address, port), timeout=3, source_address=(source, 0)) as connection:
                return connection.recv(64).decode() or "-"
        except OSError:
            continue
    return "-"


if __name__ == "__main__":
    threading.Thread(target=serve, daemon=True).start()
    print("ready", flush=True)
    with ThreadPoolExecutor(8) as pool:
        for line in sys.stdin:
            print(" ".join(pool.map(lambda pair: ask(*pair.split()), line.strip().split(","))), flush=True)
