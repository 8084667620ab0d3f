# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The configuration of a cluster: where it is read, and what it means that it is not the one of the last run.

    found = Configuration.of(settings, kept=read_kept(file), cluster=record.configuration)
    found.settings              # the settings, complete: for Choices.of
    found.origin                # for people
    changes = found.refuse_changes(kept, allowed=False)    # or OtherSettings

It belongs to the cluster, not to a command line. A run without `kube_proxy_config` uses what the plan says that it
follows, or what the last run left in the working directory, or what the cluster has in the ConfigMap
kube-system/kube-proxy; if there is none of these, kube-proxy's defaults. Another mode or version, or other settings,
than those of the last run are refused unless they are asked for by name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from .choices import Choices, config_fields, load_config
from .cluster.files import UnreadableFile
from .errors import UserError
from .files import write_atomic
from .proxy.compat import DEFAULT_COMPAT
from .proxy.warned import Warned

CLUSTER = "cluster"  # as a configuration: that of the cluster's own kube-proxy
CONFIG_MAP = "the ConfigMap kube-system/kube-proxy"
DEFAULTS = "kube-proxy's defaults"
HEADING = "the settings change"
_NONE = "(none)"
# Their effect ends with the process that reads them.
_WITHOUT_EFFECT = (
    *("clientConnection", "configSyncPeriod", "enableProfiling", "healthzBindAddress", "hostnameOverride"),
    *("logging", "metricsBindAddress", "oomScoreAdj", "showHiddenMetricsForVersion", "winkernel"),
)
_PERIODS = ("syncPeriod", "minSyncPeriod")


class NoConfiguration(UserError):
    """The configuration of the cluster was asked for, and is not known."""


class OtherSettings(UserError):
    """The configuration is not the one of the last run; the message names what differs, and the way to insist."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """What of the choices belongs to the cluster: a run leaves it for the next one, a plan for those who follow it."""

    config: Mapping[str, Any]
    compat: str = DEFAULT_COMPAT

    @classmethod
    def of(cls, choices: Choices) -> Kept:
        """The part of choices that is kept."""
        return cls(choices.config, choices.compat)

    @classmethod
    def read(cls, content: Any) -> Kept | None:
        """From what `document` made of it; None if it is none."""
        if not isinstance(content, Mapping) or not isinstance(content.get("config"), Mapping):
            return None
        return cls(dict(content["config"]), str(content.get("compat") or DEFAULT_COMPAT))

    @property
    def document(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def write(self, file: Path) -> None:
        """Leave it for the next run."""
        text = json.dumps(self.document, indent=1, sort_keys=True) + "\n"
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(file, text)


def read_kept(file: Path) -> Kept | None:
    """What the last run left; None if there was none. A file that cannot be read is an error."""
    try:
        found = Kept.read(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"{file}: {error}") from error
    if found is None:
        raise UnreadableFile(f"{file}: is not the configuration that a run left here")
    return found


def from_cluster(settings: Mapping[str, Any], kept: Kept | None) -> str:
    """Whether the ConfigMap has to be read: `must`, `may` (where nothing else says it) or empty."""
    if settings.get("config") == CLUSTER:
        return "must"
    return "may" if not settings.get("config") and kept is None else ""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Settings with the configuration that holds, and who says so."""

    settings: Mapping[str, Any]
    origin: str

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], *, kept: Kept | None = None, cluster: str = "", plan: Kept | None = None
    ) -> Configuration:
        """What holds. `cluster` is the text of the ConfigMap, if it was read; NoConfiguration if it has to be known."""
        given = settings.get("config")
        known = plan or kept
        if given == CLUSTER:
            if not cluster:
                raise NoConfiguration(
                    f"kube_proxy_config is {CLUSTER}, and the snapshot was read without {CONFIG_MAP}: read the cluster "
                    "with the same setting, or give a file"
                )
            config, origin = _parsed(cluster), CONFIG_MAP
        elif given:
            config, origin = load_config(given), str(given) if isinstance(given, str) else "kube_proxy_config"
        elif known:
            config, origin = dict(known.config), "the plan" if plan else "the last run"
        elif cluster:
            config, origin = _parsed(cluster), CONFIG_MAP
        else:
            config, origin = load_config(None), DEFAULTS
        compat = settings.get("compat") or (known.compat if known else DEFAULT_COMPAT)
        return cls({**settings, "config": config, "compat": compat}, origin)

    @property
    def choices(self) -> Choices:
        """All that rules depend on; InvalidConfig and the like if it cannot be used."""
        return Choices.of(self.settings)

    @property
    def warnings(self) -> tuple[Warned, ...]:
        """That no source said what the cluster has."""
        if self.origin != DEFAULTS:
            return ()
        text = (
            "no run has left one here, and the cluster told of none: kube-proxy's defaults are used. kube_proxy_config "
            f"names a file, or {CLUSTER} for {CONFIG_MAP}"
        )
        return (Warned("no configuration was given", text),)

    def refuse_changes(self, kept: Kept | None, *, allowed: bool) -> tuple[str, ...]:
        """What is not as it was in the last run, or OtherSettings if that is not allowed."""
        changes = tuple(settings_changes(kept, Kept.of(self.choices))) if kept else ()
        if changes and not allowed:
            raise OtherSettings(
                f"refused, and no node was touched: the settings of all nodes would change ({'; '.join(changes)}). "
                f"They come from {self.origin}. If that is meant, allow it for one run with "
                "kube_proxy_allow_mode_change=true. Otherwise leave kube_proxy_config and kube_proxy_compat out: those "
                "of the last run hold"
            )
        return changes


def announced(changes: Sequence[str], modes: Mapping[str, str], mode: str) -> tuple[Warned, ...]:
    """What is told of settings that change on purpose. Modes: host -> the one that it has."""
    told = [Warned(HEADING, each) for each in changes]
    leaving: dict[str, list[str]] = {}
    for host, had in sorted(modes.items()):
        leaving.setdefault(had, []).append(host)
    return (*told, *(Warned(HEADING, f"mode {had} -> {mode} on {', '.join(on)}") for had, on in leaving.items()))


def other_mode(had: str, mode: str) -> str:
    """Why a host that has another mode is left as it is."""
    return (
        f"has mode {had} and would get mode {mode}: if that is meant, allow it for one run with "
        "kube_proxy_allow_mode_change=true"
    )


def settings_changes(before: Kept, after: Kept) -> list[str]:
    """How the rules of all nodes are written otherwise, field by field. A default that is written out is no change."""
    old, new = (Choices(config=each.config, compat=each.compat) for each in (before, after))
    found = []
    if old.proxy.mode != new.proxy.mode:
        found.append(f"mode {old.proxy.mode} -> {new.proxy.mode}")
    if before.compat != after.compat:
        found.append(f"compat {before.compat} -> {after.compat}")
    if _rules_of(old) == _rules_of(new):
        return found
    fields = [{**config_fields(each.config), "mode": ""} for each in (before, after)]
    for path in dict.fromkeys((*fields[0], *fields[1])):
        was, is_ = (each.get(path, _NONE) for each in fields)
        if was != is_ and _has_effect(path):
            found.append(f"{path} {was} -> {is_}")
    return found


def _rules_of(choices: Choices) -> Any:
    """The parsed configuration, without what has no effect on rules."""
    return dataclasses.replace(choices.proxy, sync_period=0, min_sync_period=0, hostname_override="")


def _has_effect(path: str) -> bool:
    first, *_rest = path.split(".")
    return first not in _WITHOUT_EFFECT and path.rpartition(".")[2] not in _PERIODS


def _parsed(text: str) -> dict[str, Any]:
    """The configuration in a ConfigMap."""
    # Here and not above: most runs read JSON alone.
    from .cluster.yaml_files import yaml_documents

    found: Collection[Any] = list(yaml_documents(CONFIG_MAP, text))
    one = next(iter(found), None)
    if len(found) != 1 or not isinstance(one, Mapping):
        raise UnreadableFile(f"{CONFIG_MAP}: must hold one KubeProxyConfiguration")
    return dict(one)
