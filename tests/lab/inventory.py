"""How ssh and Ansible reach the nodes from the machine's own namespace, with host key checking on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .node import Node


def ssh_wrapper(agent: int) -> str:
    """An ssh that starts inside the lab. It also joins the lab's PID namespace, so that masters end with the lab."""
    return f'#!/bin/sh\nexec nsenter --net=/proc/{agent}/ns/net --pid=/proc/{agent}/ns/pid ssh "$@"\n'


def ssh_options(state: Path) -> dict[str, str]:
    return {
        "UserKnownHostsFile": str(state / "known_hosts"),
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "BatchMode": "yes",
        "LogLevel": "ERROR",
        # The one that OpenSSH 9 prefers, sntrup761, takes a tenth of a second of the controller's CPU per connection.
        "KexAlgorithms": "curve25519-sha256",
    }


def ssh_config(state: Path) -> str:
    options = ssh_options(state) | {"IdentityFile": str(state / "id_ed25519"), "IdentitiesOnly": "yes"}
    return "".join(f"{name} {value}\n" for name, value in options.items())


def inventory_text(nodes: Sequence[Node], state: Path) -> str:
    """Each lab has its own directory of control sockets: all labs use the same addresses, and must not meet there."""
    inventory = {
        "nodes": {
            "hosts": {node.name: {"ansible_host": node.addresses[0]} for node in nodes},
            "vars": {
                "ansible_user": "root",
                "ansible_python_interpreter": "/usr/bin/python3",
                "ansible_ssh_executable": str(state / "ssh"),
                "ansible_ssh_transfer_method": "piped",
                "ansible_pipelining": True,
                "ansible_ssh_private_key_file": str(state / "id_ed25519"),
                "ansible_ssh_common_args": " ".join(f"-o {name}={value}" for name, value in ssh_options(state).items()),
                "ansible_control_path_dir": str(state / "cp"),
            },
        }
    }
    return yaml.safe_dump(inventory, explicit_start=True, sort_keys=False, width=1000)
