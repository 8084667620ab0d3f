# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A Lease in the cluster: read, and written by one of those who read the same version of it.

Controllers of Kubernetes elect their leaders with the same object, so `kubectl get lease` tells who leads. It has to be
there already: control hosts may update this one object, and create none.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from typing import Any

from ..errors import UserError
from ..texts import visible
from .access import Access, open_transport
from .api import AGENT
from .refusals import ApiError, NotServed, Unreachable, refusal
from .resources import Resource
from .transport import Transport, TransportError

LEASES = Resource("leases", "Lease", "coordination.k8s.io", "v1")
_NAME = re.compile("[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_TEXTS = ("holderIdentity", "acquireTime", "renewTime")
_NUMBERS = ("leaseDurationSeconds", "leaseTransitions")
_LOOK_SECONDS = 0.3
_LONGEST_LOOK = 60.0  # whatever the Lease says: a holder renews it several times a minute


class InvalidLease(UserError):
    """What a Lease is named by is no name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """What a Lease says, in one version of it."""

    version: str
    holder: str = ""  # empty if it was given back
    acquired: str = ""
    renewed: str = ""
    seconds: int = 0  # for which it holds since it was renewed
    transitions: int = 0

    @classmethod
    def of(cls, obj: Any) -> Lease:
        """Of an object of the API; TypeError, KeyError or AttributeError if it is no Lease."""
        spec, version = obj.get("spec") or {}, obj["metadata"]["resourceVersion"]
        holder, acquired, renewed = (spec.get(key) or "" for key in _TEXTS)
        seconds, transitions = (spec.get(key) or 0 for key in _NUMBERS)
        if not all(isinstance(each, str) for each in (version, holder, acquired, renewed)):
            raise TypeError("a member is no text")
        if not all(isinstance(each, int) for each in (seconds, transitions)):
            raise TypeError("a member is no number")
        return cls(version, visible(holder), acquired, renewed, seconds, transitions)

    def spec(self) -> dict[str, Any]:
        """As the API has it."""
        return {
            "holderIdentity": self.holder or None,
            "acquireTime": self.acquired or None,
            "renewTime": self.renewed or None,
            "leaseDurationSeconds": self.seconds or None,
            "leaseTransitions": self.transitions,
        }


class LeaseObject:
    """One Lease of a cluster, named NAMESPACE/NAME."""

    def __init__(self, access: Access, name: str, *, timeout: float) -> None:
        self.name = name
        self._access, self._timeout = access, timeout
        self._namespace, slash, self._name = name.partition("/")
        if not slash or not all(map(_NAME.fullmatch, (self._namespace, self._name))):
            raise InvalidLease(f"{name}: is no NAMESPACE/NAME of a Lease")
        self._path = f"/apis/{LEASES.api_version}/namespaces/{self._namespace}/leases/{self._name}"
        self._transport: Transport | None = None

    def read(self) -> Lease:
        """The Lease as it is; ApiError if that cannot be told."""
        transport = self._connected()
        try:
            status, _headers, data = transport.get(self._path, self._timeout)
        except TransportError as error:
            raise self._broken(str(error)) from error
        return self._lease("get", status, data)

    def write(self, lease: Lease) -> Lease | None:
        """Replace the version that this one was made of; None if there is another version by now."""
        body = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"namespace": self._namespace, "name": self._name, "resourceVersion": lease.version},
            "spec": lease.spec(),
        }
        transport = self._connected()
        try:
            status, data = transport.put(self._path, json.dumps(body).encode(), self._timeout)
        except TransportError as error:
            raise self._broken(str(error)) from error
        return None if status == 409 else self._lease("update", status, data)

    def leader(self) -> str:
        """Who holds the Lease and keeps renewing it; empty if none does. That takes until the next renewal to tell."""
        first = last = self.read()
        deadline = time.monotonic() + min(first.seconds, _LONGEST_LOOK)
        while last.holder and last.version == first.version and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            last = self.read()
        return last.holder if last.version != first.version else ""

    def _lease(self, verb: str, status: int, data: bytes) -> Lease:
        if status != 200:
            error = refusal(self._url, LEASES, verb, status, data)
            # The credentials may have been renewed: the next one reads them anew.
            self._transport = None
            if isinstance(error, NotServed):
                raise NotServed(f"{error}. The Lease {self.name} has to be there: examples/access/lease.yaml has one")
            raise error
        try:
            return Lease.of(json.loads(data))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise self._broken(f"what it sent is no Lease: {error}") from error

    def _connected(self) -> Transport:
        if self._transport is None:
            self._transport = open_transport(self._access, AGENT)
        return self._transport

    @property
    def _url(self) -> str:
        return self._transport.url if self._transport is not None else ""

    def _broken(self, problem: str) -> ApiError:
        error = Unreachable(f"{self._url}: the Lease {self.name}: {problem}")
        # It is not closed: that would take away the key files, which other connections of this process use.
        self._transport = None
        return error

    def close(self) -> None:
        """Give the connection back, with the key files of all connections of this process."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
