# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Documentation of agentless.kube_proxy.bundle; the work is done by the action plugin of that name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle
short_description: Compute the packet rules of nodes
version_added: 0.1.0
description:
  - Computes, from a snapshot of the cluster, a C(KubeProxyConfiguration) and the facts of each node, exactly the state
    that kube-proxy would have programmed there, and writes it as one bundle of native files per node.
  - Facts are those that the module M(agentless.kube_proxy.node) with O(agentless.kube_proxy.node#module:state=gathered)
    got from a host; without them, those of the Node object.
  - Hosts that have their state already get no bundle. With nothing new, nothing is computed at all.
author:
  - The agentless.kube_proxy contributors (@agentless)
extends_documentation_fragment:
  - agentless.kube_proxy.directory
  - agentless.kube_proxy.prove
  - agentless.kube_proxy.rules
  - agentless.kube_proxy.ledger
  - agentless.kube_proxy.attributes
  - agentless.kube_proxy.attributes.control
  - agentless.kube_proxy.attributes.action_group
options:
  digest:
    description:
      - Fail unless the snapshot has this digest. Runs that share out the nodes of a cluster among themselves give the
        same one, so that none of them renders another state of the cluster.
      - If not given, the variable C(kube_proxy_snapshot_digest) holds.
    type: str
  hosts:
    description:
      - The hosts of the inventory to render for, usually C(ansible_play_batch). Without it, a bundle is written for
        every Node of the snapshot.
    type: list
    elements: str
  node_names:
    description: Names of Nodes by host, for hosts that are called otherwise and were not gathered.
    type: dict
    default: {}
  max_removed_percent:
    description:
      - Fail, before any node is touched, if a host would lose more than this share of the service ports that it has.
        If none has endpoints any more, they count as lost. Hosts whose generation was not computed with this O(dir) are
        looked at when it is their turn.
      - If not given, the variable C(kube_proxy_max_removed_percent) holds.
    type: int
    default: 100
  plan:
    description:
      - A plan that the playbook C(plan_services) wrote. Fails unless it has the digest O(plan_digest), or enough
        signatures of O(allowed_signers), and what was computed now is what it says.
      - If not given, the variable C(kube_proxy_plan) holds.
    type: path
  plan_digest:
    description:
      - The digest of the plan that was approved.
      - If not given, the variable C(kube_proxy_plan_digest) holds.
    type: str
  planning:
    description:
      - In check mode, tell what would be done if everything was approved, for those who are asked to. Without it, check
        mode tells what would be done.
      - If not given, the variable C(kube_proxy_planning) holds, which the playbook C(plan_services) sets.
    type: bool
    default: false
  approval:
    description:
      - Which changes need a plan. V(none) needs one for nothing. V(frontends) lets endpoints come and go; whatever else
        changes in Services waits, and the Services of the last plan that was carried out hold until then. V(all) needs
        one for everything.
      - If not given, the variable C(kube_proxy_approval) holds.
    type: str
    choices: [none, frontends, all]
    default: none
  allowed_signers:
    description:
      - Whose signatures of a plan count, in the form of C(ssh-keygen -Y). The signer C(automation) never does.
      - If not given, the variable C(kube_proxy_allowed_signers) holds.
    type: path
  signatures:
    description:
      - How many approvers have to sign a plan, one at least.
      - If not given, the variable C(kube_proxy_signatures) holds.
    type: int
    default: 1
  allow_running:
    description:
      - Whether hosts get rules though kube-proxy was seen there. Otherwise they fail and are left as they are; in
        check mode that is a warning.
      - If not given, the variable C(kube_proxy_allow_running) holds.
    type: bool
    default: false
  signing_key:
    description:
      - An SSH key that signs what is sent to nodes without a plan, for nodes that take nothing unsigned.
      - If not given, the variable C(kube_proxy_signing_key) holds.
    type: path
seealso:
  - module: agentless.kube_proxy.snapshot
  - module: agentless.kube_proxy.node
"""

EXAMPLES = r"""
- name: Compute the bundles of the hosts of this play
  agentless.kube_proxy.bundle:
    config: kube-proxy.yaml
    hosts: "{{ ansible_play_batch }}"
  run_once: true
  register: bundles

- name: Write the bundles of all nodes, with settings given here
  agentless.kube_proxy.bundle:
    config:
      mode: iptables
      clusterCIDR: 10.244.0.0/16
  run_once: true
"""

RETURN = r"""
path:
  description: The directory that holds a bundle per node.
  type: str
  returned: success
  sample: /home/ops/.akp/production/bundles
generations:
  description: What names the state of each host.
  type: dict
  returned: success
  sample: {n1: fa9c6eafd069cc9972575b3015aa4c60a3740d98a146ae12f8a126997b85702f}
counts:
  description: What the state of each host holds.
  type: dict
  returned: success
  sample: {n1: {service_ports: 21}}
stale:
  description: Hosts that do not have their state, as far as is known, or for which there is an error.
  type: list
  elements: str
  returned: success
  sample: [n2]
changing:
  description: Hosts that will be given another state, those with an error left out.
  type: list
  elements: str
  returned: success
  sample: [n2]
ansible_facts:
  description: What a later play needs to change the hosts in batches.
  type: dict
  returned: success
  contains:
    kube_proxy_run:
      description: C(changing), the C(hosts) of this play, and the C(batches) that the variables ask for.
      type: dict
      returned: success
written:
  description: Nodes whose bundle was written.
  type: list
  elements: str
  returned: success
  sample: [n2]
rendered:
  description: How many nodes had to be computed.
  type: int
  returned: success
  sample: 1
errors:
  description: Hosts whose state cannot be computed, and why. They fail when it is their turn; the others go on.
  type: dict
  returned: success
  sample: {n9: the cluster has no Node n9}
problems:
  description: Objects of the cluster that were left out, and why.
  type: list
  elements: str
  returned: success
  sample: ["Service/shop/cart: spec.ports[0].port: 70000 is not between 1 and 65535"]
ignored:
  description: How many objects there were that kube-proxy would not have looked at, by kind.
  type: dict
  returned: success
  sample: {headless Service: 1}
seconds:
  description: How long it took.
  type: float
  returned: success
  sample: 0.12
"""
