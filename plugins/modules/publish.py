# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Documentation of agentless.kube_proxy.publish; the work is done by the action plugin of that name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: publish
short_description: Publish signed bundles for nodes that pull
version_added: 0.1.0
description:
  - Computes the rules of every node, from a snapshot of the cluster, and writes it, compressed and signed, into a
    directory that any static web server or file share can serve. Nodes fetch from there with C(akp-pull).
  - Everything that a release names is there before the release is; a run that ends in the middle leaves what was there.
  - A node without news gets a new release only when half of the time of its old one is over.
  - Facts are those that hosts answered when M(agentless.kube_proxy.node) asked them; without them, those of the Node
    object.
author:
  - The agentless.kube_proxy contributors (@agentless)
extends_documentation_fragment:
  - agentless.kube_proxy.directory
  - agentless.kube_proxy.ledger
  - agentless.kube_proxy.prove
  - agentless.kube_proxy.rules
  - agentless.kube_proxy.attributes
  - agentless.kube_proxy.attributes.control
  - agentless.kube_proxy.attributes.action_group
options:
  path:
    description:
      - The directory to publish in, on the control host.
      - If not given, the variable C(kube_proxy_publish_path) holds.
    type: path
    required: true
  cluster:
    description:
      - What nodes know the cluster as. A node refuses releases of another cluster.
      - If not given, the variable C(kube_proxy_cluster_name) holds.
    type: str
    default: default
  keys:
    description:
      - SSH private keys to sign with, or public parts of keys that an agent holds.
      - If not given, the variable C(kube_proxy_publish_keys) holds.
    type: list
    elements: path
    required: true
  valid_hours:
    description:
      - How long a release counts.
      - If not given, the variable C(kube_proxy_publish_valid_hours) holds.
    type: int
    default: 168
  grace_minutes:
    description:
      - How long an archive stays after the last release that named it.
      - If not given, the variable C(kube_proxy_publish_grace_minutes) holds.
    type: int
    default: 60
  deltas:
    description:
      - From how many earlier states deltas are made.
      - If not given, the variable C(kube_proxy_publish_deltas) holds.
    type: int
    default: 3
  renew:
    description:
      - Sign everything anew, for instance with another key.
      - If not given, the variable C(kube_proxy_publish_renew) holds.
    type: bool
    default: false
  nodes:
    description:
      - The nodes to publish for. The default, or an empty list, is all, and then releases of nodes that the cluster
        lost are removed.
      - If not given, the variable C(kube_proxy_publish_nodes) holds.
    type: list
    elements: str
  max_removed_percent:
    description:
      - Publish nothing if a node would lose more than this share of its service ports.
      - If not given, the variable C(kube_proxy_max_removed_percent) holds.
    type: int
    default: 50
seealso:
  - module: agentless.kube_proxy.snapshot
  - module: agentless.kube_proxy.install
"""

EXAMPLES = r"""
- name: Read the cluster
  agentless.kube_proxy.snapshot:
    kubeconfig: ~/.kube/config
  run_once: true

- name: Publish the rules of its nodes
  agentless.kube_proxy.publish:
    path: /srv/www/akp
    cluster: production
    keys: [~/.ssh/akp_publisher]
    config: kube-proxy.yaml
  run_once: true
"""

RETURN = r"""
path:
  description: The directory.
  type: str
  returned: success
  sample: /srv/www/akp
generations:
  description: What names the state of each node.
  type: dict
  returned: success
  sample: {n1: fa9c6eafd069cc9972575b3015aa4c60a3740d98a146ae12f8a126997b85702f}
updated:
  description: Nodes with news.
  type: list
  elements: str
  returned: success
  sample: [n2]
renewed:
  description: Nodes whose release was only signed anew.
  type: list
  elements: str
  returned: success
  sample: []
unchanged:
  description: How many nodes have neither.
  type: int
  returned: success
  sample: 2
withdrawn:
  description: Nodes that the cluster has no more; their releases are gone.
  type: list
  elements: str
  returned: success
  sample: []
errors:
  description: Nodes whose state cannot be computed, and why. What is published for them stays.
  type: dict
  returned: success
  sample: {}
problems:
  description: Objects of the cluster that were left out, and why.
  type: list
  elements: str
  returned: success
  sample: []
ledger:
  description: Where this run stands in the ledger, as file, number and head of its last entry; empty if it wrote none.
  type: str
  returned: success, and where it failed to publish
  sample: "ledger: /home/alice/.akp/production/ledger.jsonl, entry 2, head 4c1b9f8d"
seconds:
  description: How long it took.
  type: float
  returned: success
  sample: 0.5
"""
