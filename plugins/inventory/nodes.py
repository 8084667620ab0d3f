# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Inventory plugin agentless.kube_proxy.nodes: a cluster's Nodes as hosts."""

from __future__ import annotations

DOCUMENTATION = r"""
name: nodes
short_description: Kubernetes Nodes as hosts
version_added: 0.1.0
description:
  - Reads the Nodes of a cluster, from an API server or from files, and makes a host of each. Its address is one of the
    Node's, its zone, roles, readiness and the labels that are asked for become groups.
  - The name of the configuration file must end in C(kube_nodes.yml) or C(kube_nodes.yaml).
  - Reading needs the verb list on nodes, and nothing else.
author:
  - The agentless.kube_proxy contributors (@agentless)
extends_documentation_fragment:
  - constructed
options:
  plugin:
    description: Says that the file is meant for this plugin.
    required: true
    choices: [agentless.kube_proxy.nodes]
  cluster_dir:
    description: A file, or a directory of files, as kubectl prints them, to read instead of an API server. A relative
      path starts at the configuration file.
    type: str
  group:
    description: The group that all Nodes are in.
    type: str
    default: nodes
  address_types:
    description:
      - The types of a Node's addresses that can be C(ansible_host), the preferred one first.
      - What is neither an address nor a DNS name is not used, and a warning names the Node. A host without any is in
        the inventory, without C(ansible_host).
    type: list
    elements: str
    default: [InternalIP, ExternalIP, Hostname]
  address_family:
    description: The preferred family of C(ansible_host).
    type: str
    choices: [IPv4, IPv6]
    default: IPv4
  only_ready:
    description:
      - Leave out Nodes that are not ready. Such a Node may still carry traffic, and its rules grow old meanwhile; what
        cannot be reached fails by itself.
    type: bool
    default: false
  label_groups:
    description: Labels that become groups, named after label and value.
    type: list
    elements: str
    default: []
  kubeconfig:
    description: Path to a kubeconfig file, or its content as a mapping.
    type: raw
    env:
      - name: K8S_AUTH_KUBECONFIG
  context:
    description: Context of the kubeconfig.
    type: str
    env:
      - name: K8S_AUTH_CONTEXT
  host:
    description: URL of the API server.
    type: str
    env:
      - name: K8S_AUTH_HOST
  api_key:
    description: Bearer token.
    type: str
    env:
      - name: K8S_AUTH_API_KEY
  username:
    description: User for HTTP basic authentication.
    type: str
    env:
      - name: K8S_AUTH_USERNAME
  password:
    description: Password for HTTP basic authentication.
    type: str
    env:
      - name: K8S_AUTH_PASSWORD
  client_cert:
    description: Path to a client certificate.
    type: path
    env:
      - name: K8S_AUTH_CERT_FILE
  client_key:
    description: Path to the key of the client certificate.
    type: path
    env:
      - name: K8S_AUTH_KEY_FILE
  ca_cert:
    description: Path to the certificate of the authority that signed the API server's.
    type: path
    env:
      - name: K8S_AUTH_SSL_CA_CERT
  validate_certs:
    description: Whether to check the API server's certificate.
    type: bool
    env:
      - name: K8S_AUTH_VERIFY_SSL
  proxy:
    description: URL of an HTTP proxy.
    type: str
    env:
      - name: K8S_AUTH_PROXY
  no_proxy:
    description: Comma separated hosts and networks that are reached without the proxy.
    type: str
    env:
      - name: K8S_AUTH_NO_PROXY
  impersonate_user:
    description: User to act as.
    type: str
    env:
      - name: K8S_AUTH_IMPERSONATE_USER
  impersonate_groups:
    description: Groups to act as a member of.
    type: list
    elements: str
    env:
      - name: K8S_AUTH_IMPERSONATE_GROUPS
requirements:
  - kubernetes >= 30 (Python, on the control host), unless read from files
"""

EXAMPLES = r"""
# production.kube_nodes.yml
plugin: agentless.kube_proxy.nodes
kubeconfig: ~/.kube/config
label_groups:
  - example.com/rack
compose:
  ansible_user: "'ops'"
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin, Constructable
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.addresses import (
    family_of,
    parse_host,
    parse_ip,
    special,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.access import Access
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.api import connect
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.files import load
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.record import Record, snapshot_of
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.resources import NODES
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.snapshot import Node
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.errors import UserError
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.trust import require_ansible, untrusted
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.texts import shortened, visible

# Tasks that run on the control host would go to a host of such a name.
_CONTROL_HOST = ("localhost", "127.0.0.1")
_ROLE = "node-role.kubernetes.io/"
_API = (
    "kubeconfig",
    "context",
    "host",
    "api_key",
    "username",
    "password",
    "client_cert",
    "client_key",
    "ca_cert",
    "validate_certs",
    "proxy",
    "no_proxy",
    "impersonate_user",
    "impersonate_groups",
)


class InventoryModule(BaseInventoryPlugin, Constructable):
    """Hosts from Nodes."""

    NAME = "agentless.kube_proxy.nodes"
    # What Nodes say is data: nothing of it is a template.
    trusted_by_default = False

    def verify_file(self, path: str) -> bool:
        """Whether the file is meant for us, by its name."""
        return super().verify_file(path) and path.endswith(("kube_nodes.yml", "kube_nodes.yaml"))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        """Read the cluster and fill the inventory."""
        super().parse(inventory, loader, path, cache)
        self._read_config_data(path)
        try:
            require_ansible()
            nodes = self._nodes(Path(path).parent)
        except UserError as error:
            raise AnsibleParserError(visible(f"{path}: {error}")) from error
        self.inventory.add_group(self.get_option("group"))
        for node in nodes:
            if node.name in _CONTROL_HOST:
                self.display.warning(
                    f"Node {node.name} is left out: Ansible means the control host by that name; give the Node another"
                )
            elif node.ready or not self.get_option("only_ready"):
                self._add(node)

    def _nodes(self, folder: Path) -> Iterable[Node]:
        cluster_dir = self.get_option("cluster_dir")
        if cluster_dir:
            return load(folder / Path(cluster_dir).expanduser()).nodes
        with connect(Access.of({name: self.get_option(name) for name in _API})) as api:
            return snapshot_of(Record((api.list(NODES),), api.url)).nodes

    def _add(self, node: Node) -> None:
        self.inventory.add_host(node.name, group=self.get_option("group"))
        for group in sorted(set(self._groups(node))):
            self.inventory.add_child(self.inventory.add_group(group), node.name)
        variables: dict[str, Any] = {
            "kube_proxy_node_name": node.name,
            "kube_node": {
                "name": node.name,
                "addresses": [{"type": sort, "address": address} for sort, address in node.addresses],
                "zone": node.zone,
                "pod_cidrs": list(node.pod_cidrs),
                "labels": dict(node.labels),
                "ready": node.ready,
            },
        }
        address = self._address(node)
        if address:
            variables["ansible_host"] = address
        variables = untrusted(variables)
        for name, value in variables.items():
            self.inventory.set_variable(node.name, name, value)
        strict = self.get_option("strict")
        self._set_composite_vars(self.get_option("compose"), variables, node.name, strict=strict)
        self._add_host_to_composed_groups(self.get_option("groups"), variables, node.name, strict=strict)
        self._add_host_to_keyed_groups(self.get_option("keyed_groups"), variables, node.name, strict=strict)

    def _groups(self, node: Node) -> Iterator[str]:
        name = self._sanitize_group_name
        yield "ready" if node.ready else "not_ready"
        if node.zone:
            yield name(f"zone_{node.zone}")
        labels = dict(node.labels)
        for label, value in labels.items():
            if label.startswith(_ROLE):
                yield name(f"role_{label.removeprefix(_ROLE) or value}")
        for label in self.get_option("label_groups"):
            if label in labels:
                yield name(f"{label}_{labels[label]}" if labels[label] else label)

    def _address(self, node: Node) -> str | None:
        """Where the host is reached: of the first type that has one, an address or a DNS name, the family's first."""
        family = self.get_option("address_family")
        for sort in self.get_option("address_types"):
            own = list(self._usable(node, sort))
            # A name may have addresses of both families.
            preferred = [each for each in own if parse_ip(each) is None or family_of(each).value == family]
            if own:
                return (preferred or own)[0]
        return None

    def _usable(self, node: Node, sort: str) -> Iterator[str]:
        for kind, text in node.addresses:
            if kind != sort:
                continue
            host = parse_host(text)
            reason = "is neither an address nor a DNS name" if host is None else special(host)
            if host is not None and (host in _CONTROL_HOST or host.endswith(".localhost")):
                reason = "is the control host itself"
            if host is not None and not reason:
                yield host
                continue
            shown = visible(shortened(repr(text), 80))
            self.display.warning(
                f"Node {node.name}: status.addresses: the {sort} {shown} {reason}, and is not used for ansible_host; "
                "mend what sets it, usually --hostname-override of the kubelet, or choose other address_types"
            )
