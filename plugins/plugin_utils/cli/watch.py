# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp watch: follow a cluster, and carry what changes to the nodes that it concerns, through Ansible."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..tasks.directory import WorkDirectory
from ..texts import visible
from .console import UsageError

HELP = "follow a cluster and push what changes, through Ansible, for as long as it runs"
_DESCRIPTION = (
    "Watches the API server, computes what each change means for each node, and pushes it to the nodes that it "
    "concerns: with your inventory, connection settings, become and vault. One process on the control host; on nodes "
    "nothing stays. Variables are those of the role agentless.kube_proxy.sync; SIGHUP reads inventory and "
    "configuration anew, SIGTERM ends it after what is under way."
)
# option -> variable
_VARIABLES = {
    "kubeconfig": "kube_proxy_kubeconfig",
    "context": "kube_proxy_context",
    "config": "kube_proxy_config",
    "cluster_name": "kube_proxy_cluster_name",
    "dir": "kube_proxy_dir",
    "textfile": "kube_proxy_textfile",
    "lease": "kube_proxy_lease",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """A line in the list of commands; the options are Ansible's, which take a while to load."""
    parser = commands.add_parser("watch", help=HELP, add_help=False)
    parser.set_defaults(run=lambda args: run(args.rest))


def _own_options(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("Cluster Options", "each is short for the variable of the role sync in brackets")
    for option, variable, text in (
        ("--kubeconfig", "FILE", "kubeconfig of the cluster; default: K8S_AUTH_*, a pod's account, ~/.kube/config"),
        ("--context", "NAME", "context of the kubeconfig"),
        ("--config", "FILE", "a KubeProxyConfiguration, or `cluster`; default: that of the last run"),
        ("--cluster-name", "NAME", "keeps the working directories of several clusters apart"),
        ("--dir", "DIR", "working directory"),
        ("--textfile", "DIR", "directory for Prometheus metrics, as node_exporter's textfile collector reads them"),
        ("--lease", "NAMESPACE/NAME", "a Lease in the cluster: of all that name it, one leads, and the others wait"),
    ):
        name = _VARIABLES[option.removeprefix("--").replace("-", "_")]
        own.add_argument(option, metavar=variable, help=f"{text} [{name}]")
    own.add_argument("--log-json", action="store_true", help="a JSON object a line instead of text for people")


def run(arguments: list[str]) -> int:
    """The command; 0 if it was stopped, 2 if the call or its input was wrong, 1 if it could not go on."""
    try:
        from ..watch import ansible_runtime as ansible
    except ImportError as error:
        raise UsageError(f"akp watch needs Ansible, and {error.name} is missing: pip install ansible-core") from error
    try:
        options = ansible.AnsibleOptions(
            arguments,
            add_own=_own_options,
            own_variables=_VARIABLES,
            usage="%prog -i INVENTORY [options]",
            desc=_DESCRIPTION,
        )
        found = options.inventory()
        if options.own("listhosts"):
            print("\n".join(found.settings()))
            return 0
        found.warm_up()
    except ansible.AnsibleError as error:
        raise UsageError(str(error)) from error
    return _follow(found, ansible.detach, json_lines=bool(options.own("log_json")))


def _follow(inventory: Any, detach: Any, *, json_lines: bool) -> int:
    from ..carry.workers import Carrier, CarrierGone

    settings = next(iter(inventory.settings().values()))
    if settings.get("cluster_dir") and not settings.get("kubeconfig"):
        raise UsageError("files cannot be watched: kube_proxy_cluster_dir is set and no kubeconfig is")
    # Before anything starts a thread: it forks.
    carrier = Carrier(inventory, detach)
    try:
        from ..bundle.release import SigningFailed
        from ..cluster.access import Access
        from ..cluster.api import connect
        from ..cluster.lease import LeaseObject
        from ..cluster.refusals import ApiError
        from ..cluster.watch import Watch
        from ..plan.consent import Consent
        from ..watch.election import REQUEST_SECONDS, Election
        from ..watch.loop import Follower
        from ..watch.measured import Measured

        cluster = str(settings.get("cluster_name") or "default")
        directory = inventory.directory.make()
        access = Access.of(_access(settings))
        textfile = settings.get("textfile")
        say = _say_json if json_lines else _say_text
        watch = Watch(lambda: connect(access, timeout=float(settings.get("api_timeout") or 60)))
        lease = str(settings.get("lease") or "")
        election = Election(LeaseObject(access, lease, timeout=REQUEST_SECONDS)) if lease else None
        follower = Follower(
            watch,
            carrier,
            directory,
            choices=_Reading(directory, access, say).choices,
            consent=Consent(directory, settings),
            measured=Measured(directory, cluster, Path(textfile).expanduser() if textfile else None),
            election=election,
            say=say,
        )
    except BaseException:
        carrier.close(0)
        raise
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: follower.stop())
    signal.signal(signal.SIGHUP, lambda _number, _frame: follower.reload())
    try:
        with election or contextlib.nullcontext(), watch:
            follower.run()
    except (ApiError, CarrierGone, SigningFailed) as error:
        print(visible(f"akp: {error}"), file=sys.stderr)
        return 1
    return 0


def _access(settings: Mapping[str, Any]) -> dict[str, Any]:
    names = {"kubeconfig": "kubeconfig", "context": "context", "host": "api_host", "api_key": "api_key"}
    return {option: settings.get(name) for option, name in {**names, "ca_cert": "api_ca_cert"}.items()}


class _Reading:
    """Reads what rules depend on, at the start and at each reload."""

    def __init__(self, directory: WorkDirectory, access: Any, say: Callable[..., None]) -> None:
        self._directory, self._access, self._say = directory, access, say
        self._first = True

    def choices(self, settings: Mapping[str, Any]) -> Any:
        """As the variables say it. Another mode, or other settings, than the last run had are refused at the start."""
        from ..configuration import Configuration, Kept, OtherSettings, announced, from_cluster, read_kept

        kept = read_kept(self._directory.config)
        found = Configuration.of(settings, kept=kept, cluster=self._cluster(from_cluster(settings, kept)))
        try:
            changes = found.refuse_changes(kept, allowed=bool(settings.get("allow_mode_change")))
        except OtherSettings as error:
            if self._first:
                raise
            # What the last run left is what nodes have.
            self._say("configuration", problem=str(error))
            changes, found = (), Configuration.of({**settings, "config": None, "compat": None}, kept=kept)
        choices = found.choices.checked()
        for each in (*found.warnings, *announced(changes, {}, choices.proxy.mode)):
            self._say("warning", problem=f"{each.heading}: {each.text}")
        Kept.of(choices).write(self._directory.config)
        self._first = False
        return choices

    def _cluster(self, wanted: str) -> str:
        from ..cluster.api import connect

        if not wanted:
            return ""
        with connect(self._access) as api:
            return api.configuration_if(wanted)


def _say_json(event: str, **fields: Any) -> None:
    print(json.dumps({"time": _now(), "event": event, **fields}), flush=True)


def _say_text(event: str, **fields: Any) -> None:
    # Nodes and the API server said most of it.
    print(visible(f"{_now()} {_TEXTS[event](fields)}"), flush=True)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number != 1 else f"1 {what.removesuffix('s')}"


_TEXTS: dict[str, Any] = {
    "watching": lambda f: (
        f"watching {_count(f['services'], 'Services')}, {_count(f['slices'], 'EndpointSlices')} and "
        f"{_count(f['nodes'], 'Nodes')} for {_count(f['hosts'], 'hosts')}"
    ),
    "settled": lambda f: f"{_count(f['hosts'], 'hosts')} are up to date",
    "change": lambda f: (
        f"{f['what']}: {_count(f['hosts'], 'hosts')} after {f['seconds']} s"
        + (f", confirmed after {f['confirmed']} s" if f["confirmed"] > f["seconds"] + 0.1 else "")
        if f["hosts"]
        else f"{f['what']}: no host is concerned"
    ),
    "pushed": lambda f: f"{f['host']}: {f['how']} applied" + ("" if f["changed"] else ", nothing to change"),
    "whole": lambda f: f"{f['host']}: needs its whole bundle: {f['problem']}",
    "drift": lambda f: f"{f['host']}: not as it was left ({f['state']}, {_count(f['differences'], 'differences')})",
    "failed": lambda f: f"{f['host']}: failed, try {f['tries']}, again in {f['again_in']} s: {f['problem']}",
    "answers": lambda f: f"{f['host']}: answers again",
    "unusable": lambda f: f"{f['host']}: gets nothing: {f['problem']}",
    "host": lambda f: f"{f['host']}: {f['what']}",
    "refused": lambda f: f"refused, nothing is pushed: {f['problem']}",
    "allowed": lambda _f: "nothing is refused any more",
    "warning": lambda f: f"warning: {f['problem']}",
    "api": lambda f: f"the API server: {f.get('problem') or f['what']}",
    "inventory": lambda f: f["problem"],
    "configuration": lambda f: f"the configuration is not used: {f['problem']}",
    "leads": lambda _f: "this host leads",
    "follows": lambda f: f"this host does not lead: {f['problem']}",
    "waiting": lambda f: f"waiting: {f['problem']}",
    "metrics": lambda f: f"metrics are not written: {f['problem']}",
    "ending": lambda f: f"ending, after what is under way: {', '.join(f['waiting_for'])}",
}
