# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a user chooses that rules depend on, read in one place.

Options of the modules, variables of the roles, arguments of `akp` and settings of the event source have the same names:

    choices = Choices.of({"config": "kube-proxy.yaml", "compat": "1.36", "vip_policy": "omit"})
    choices.proxy           # the KubeProxyConfiguration, parsed
    choices.policy          # which addresses Services may claim

The configuration and its version belong to the cluster: `configuration.py` finds them where the settings have none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cluster.files import UnreadableFile, documents
from .list_variables import as_list
from .proxy.compat import DEFAULT_COMPAT

if TYPE_CHECKING:
    from .proxy.config import ProxyConfig
    from .proxy.policy import VipPolicy

_HEAD = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}


@dataclasses.dataclass(frozen=True)
class Choices:
    """As they were given. What they mean is parsed when it is asked for: a run without news never asks."""

    config: Mapping[str, Any]  # a KubeProxyConfiguration
    compat: str = DEFAULT_COMPAT  # the kube-proxy minor whose rules are written
    schedulers: Mapping[str, str] = dataclasses.field(default_factory=dict)  # ipvs: by namespace/name of a Service
    scheduler_annotations: bool = False  # ipvs: a Service may choose its scheduler
    vip_policy: str = "warn"  # what becomes of a claim that is not allowed
    external_ip_cidrs: tuple[str, ...] | None = None  # where externalIPs may lie; None: anywhere
    load_balancer_cidrs: tuple[str, ...] | None = None  # where IPs of load balancers may lie; None: anywhere
    control_ports: tuple[str, ...] | None = None  # by which the control host comes in; None: the default
    health_check_ports: str = ""  # FIRST-LAST; empty: the default

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Choices:
        """From settings by name; others are passed over, and one that is not set is as by default."""
        return cls(
            config=load_config(settings.get("config")),
            compat=str(settings.get("compat") or DEFAULT_COMPAT),
            schedulers=dict(settings.get("schedulers") or {}),
            scheduler_annotations=bool(settings.get("scheduler_annotations")),
            vip_policy=str(settings.get("vip_policy") or "warn"),
            external_ip_cidrs=_several(settings, "external_ip_cidrs"),
            load_balancer_cidrs=_several(settings, "load_balancer_cidrs"),
            control_ports=_several(settings, "control_ports"),
            health_check_ports=str(settings.get("health_check_ports") or ""),
        )

    def checked(self) -> Choices:
        """Itself; InvalidConfig or InvalidPolicy if it cannot be used."""
        _parsed = (self.proxy, self.policy)
        return self

    @property
    def document(self) -> dict[str, Any]:
        """All of them, for JSON; `Choices.of` makes the same of it."""
        return dataclasses.asdict(self)

    @property
    def frontends_text(self) -> str:
        """Those that the frontends of a state depend on beside the cluster, for comparisons."""
        schedulers = {"annotations": self.scheduler_annotations, "services": self.schedulers}
        return json.dumps([self.config, schedulers], sort_keys=True)

    @cached_property
    def proxy(self) -> ProxyConfig:
        """The configuration, with the schedulers of single Services; InvalidConfig names what is wrong."""
        from .proxy.config import with_schedulers
        from .proxy.config_document import parse_config

        return with_schedulers(parse_config(self.config), self.schedulers, annotations=self.scheduler_annotations)

    @cached_property
    def policy(self) -> VipPolicy:
        """What Services may claim; InvalidPolicy names what is wrong."""
        from .proxy.policy import vip_policy

        cidrs = (self.external_ip_cidrs, self.load_balancer_cidrs)
        return vip_policy(self.vip_policy, *cidrs, self.control_ports, self.health_check_ports)


def names() -> tuple[str, ...]:
    """What the settings are called."""
    return tuple(each.name for each in dataclasses.fields(Choices))


def load_config(config: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """A KubeProxyConfiguration from a file, or given in place with its header left out."""
    if isinstance(config, str) and config:
        found = list(documents(Path(config).expanduser()))
        if len(found) != 1 or not isinstance(found[0], Mapping):
            raise UnreadableFile(f"{config}: must hold one KubeProxyConfiguration")
        return dict(found[0])
    return {**_HEAD, **(config or {})}


def config_fields(config: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a configuration that say something, by their paths, as JSON."""
    found: dict[str, str] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                walk(f"{path}.{key}" if path else str(key), value[key])
        elif value not in (None, "", []):
            found[path] = json.dumps(value)

    walk("", {key: value for key, value in config.items() if key not in _HEAD})
    return found


def _several(settings: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """A list, or words with commas between; an empty text is none, an empty list is one that allows nothing."""
    value = settings.get(name)
    if value is None or value == "":
        return None
    return tuple(map(str, [value] if isinstance(value, int) else as_list(value, name)))
