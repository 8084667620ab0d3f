# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What Ansible must never take for a template: every text that an API server or a node wrote.

Before 2.19, Ansible evaluated any text of a variable that looked like a template; a Node's label could run a command on
the control host. From 2.19 on only texts of playbooks and inventories are trusted. Here that trust is taken away from
all that comes from elsewhere, and older versions are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.release import __version__ as _running

from ..errors import UserError

OLDEST = (2, 19)


class OldAnsible(UserError):
    """A version of ansible-core that would evaluate what others wrote."""


def require_ansible(version: str = _running) -> None:
    """Refuse to go on with a version of ansible-core that is too old; its own check only warns."""
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2])
    if numbers < OLDEST:
        raise OldAnsible(
            f"agentless.kube_proxy needs ansible-core {OLDEST[0]}.{OLDEST[1]} or newer, and this is {version}: older "
            "versions evaluate texts of the API server and of nodes as templates"
        )


def untrusted(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values as plain data: no text in them is evaluated, whatever stands in it."""
    return {str(key): _sound(plain(value)) for key, value in values.items()}


def _sound(value: Any) -> Any:
    """Plain data that can be printed: halves of characters, which JSON can name, cannot."""
    if isinstance(value, dict):
        return {_sound(key): _sound(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_sound(each) for each in value]
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "replace").decode()
    return value


def plain(value: Any) -> Any:
    """Plain strings, lists and mappings, without the tags that Ansible attaches: the engine knows nothing of them."""
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return str.__str__(value)  # str() of a subclass may give a subclass again
    return next((kind(value) for kind in (int, float) if isinstance(value, kind)), value)
