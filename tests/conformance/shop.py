"""A control plane that holds the shop of examples/shop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.collection.play import SHOP
from tests.controlplane import ControlPlane, netns
from tests.lab.manifests import objects


@contextmanager
def shop_plane(prefix: str, address: str) -> Iterator[ControlPlane]:
    """In a namespace of its own, at this address."""
    name = f"{prefix}{os.getpid()}"
    netns.add(name)
    netns.ip("-n", name, "addr", "add", f"{address}/32", "dev", "lo")
    try:
        with ControlPlane(name, (address,)) as plane:
            plane.load(obj for obj in objects(SHOP) if obj["kind"] in ("Node", "Service", "EndpointSlice"))
            yield plane
    finally:
        netns.delete(name)
