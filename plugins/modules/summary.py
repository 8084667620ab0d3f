# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Documentation of agentless.kube_proxy.summary; the work is done by the action plugin of that name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: summary
short_description: Say how a run went
version_added: 0.1.0
description:
  - Puts together what the other modules did in this run of C(ansible-playbook) - nodes, Services, endpoints, objects
    that were left out, seconds - and writes it as a plan that can be approved, if asked to.
author:
  - The agentless.kube_proxy contributors (@agentless)
extends_documentation_fragment:
  - agentless.kube_proxy.directory
  - agentless.kube_proxy.attributes
  - agentless.kube_proxy.attributes.control
  - agentless.kube_proxy.attributes.action_group
options:
  hosts:
    description: The hosts to tell about, usually C(ansible_play_hosts_all).
    type: list
    elements: str
    required: true
  write_plan:
    description:
      - Write down what the hosts were told in check mode. The digest in it covers all of it, so that who approves the
        digest approves exactly that. The snapshot that it was made from is copied beside it.
      - Nothing is written if the run was stopped, or there is no host to tell of.
    type: bool
    default: false
  plan:
    description:
      - The file for the plan. If not given, the variable C(kube_proxy_plan_file) holds, else it is C(plan.json) in
        O(dir).
    type: path
  snapshot:
    description: The snapshot that the plan was made from. The default is C(snapshot.json) in O(dir).
    type: path
  status_file:
    description:
      - A file to write RV(nodes) to, as one line of JSON, for whatever started the run.
      - If not given, the variable C(kube_proxy_status_file) holds.
    type: path
  textfile:
    description:
      - The directory of the textfile collector of Prometheus' C(node_exporter), to write C(akp_CLUSTER.prom) to. It
        tells when each node was last confirmed to be up to date, and how long changes of endpoints took to
        get there. If it cannot be written, that is a warning.
      - If not given, the variable C(kube_proxy_textfile) holds.
    type: path
"""

EXAMPLES = r"""
- name: Say how it went
  agentless.kube_proxy.summary:
    hosts: "{{ ansible_play_hosts_all }}"
  run_once: true
  register: summary
"""

RETURN = r"""
lines:
  description: For people.
  type: list
  elements: str
  returned: success
  sample: ["3 nodes: 1 changed, 2 unchanged, 0 failed"]
nodes:
  description:
    - The hosts that C(changed), that are C(unchanged), that C(failed) with the reason, and that are C(untried) because
      the run ended before their turn.
  type: dict
  returned: success
  sample: {changed: [n1], unchanged: [n2, n3], failed: {}, untried: []}
services:
  description: How many Services were added, changed and removed on at least one node.
  type: dict
  returned: success
  sample: {added: 1, changed: 0, removed: 0}
endpoints:
  description: How many endpoints were added and removed on at least one node.
  type: dict
  returned: success
  sample: {added: 3, removed: 0}
left_out:
  description: Objects of the cluster that cannot be used, and why.
  type: list
  elements: str
  returned: success
seconds:
  description: How long each phase took, from its first beginning to its last end.
  type: dict
  returned: success
  sample: {snapshot: 0.4, ask: 0.3, render: 0.1, push: 0.6}
textfile:
  description: The file with metrics.
  type: str
  returned: with O(textfile)
plan:
  description: The file of the plan.
  type: str
  returned: with O(write_plan=true), if one was written
plan_digest:
  description: What names the plan.
  type: str
  returned: with O(write_plan=true), if one was written
"""
