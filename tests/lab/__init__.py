"""The lab: a cluster's network on one machine, made of kernel namespaces. See lab.py."""

from __future__ import annotations

from .lab import Lab
from .node import Node
from .place import REFUSED, TIMEOUT, UNREACHABLE, Connection, Place, Reply, Server
from .pod import Pod
from .record import LabError

__all__ = [
    "REFUSED",
    "TIMEOUT",
    "UNREACHABLE",
    "Connection",
    "Lab",
    "LabError",
    "Node",
    "Place",
    "Pod",
    "Reply",
    "Server",
]
