# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What an API server answers instead of data, as errors that say what to do about it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..errors import UserError
from ..texts import visible
from .resources import Resource


class ApiError(UserError):
    """The API server gave no usable answer; the message says what to do about it."""


class Unreachable(ApiError):
    """No connection, or none that lasted."""


class Unauthorized(ApiError):
    """The credentials are missing, wrong or expired."""


class Forbidden(ApiError):
    """The credentials are good, but RBAC does not grant a verb on a resource."""


class Expired(ApiError):
    """The server no longer has the state that a list or a watch would go on from."""


class NotServed(ApiError):
    """The server does not know this resource."""


class Malformed(ApiError):
    """What the server sent is no list, or no event, of this resource; the message says what is wrong with it."""


def refusal(url: str, resource: Resource, verb: str, status: int, data: bytes) -> ApiError:
    """The typed error of an answer that is not 200."""
    said = _message(data)
    if status == 401:
        return Unauthorized(f"{url}: the API server does not accept the credentials (401): {said}")
    if status == 403:
        group = f' of API group "{resource.group}"' if resource.group else ""
        group += f" for the object {resource.only}" if resource.only else ""
        return Forbidden(
            f'{url}: RBAC does not grant the verb "{verb}" on the resource "{resource.name}"{group} (403): {said}'
        )
    if status == 404:
        return NotServed(f"{url}: the API server does not serve {resource.path} (404): {said}")
    if status == 410:
        return Expired(f"{url}: {resource.name}: {said}")
    if status == 504 and "Too large resource version" in said:
        # The resource lives in another etcd, whose revisions are not comparable.
        return Expired(f"{url}: {resource.name}: {said}")
    return Unreachable(f"{url}: {verb} {resource.name}: the API server answers {status}: {said}")


def _message(data: bytes) -> str:
    try:
        parsed = json.loads(data)
        text = str(parsed["message"]) if isinstance(parsed, Mapping) and parsed.get("message") else str(parsed)
    except (RecursionError, ValueError):
        text = data.decode(errors="replace")
    text = visible(" ".join(text[:10_000].split()))
    return text[:500] or "no message"
