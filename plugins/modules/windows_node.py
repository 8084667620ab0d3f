# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Documentation of agentless.kube_proxy.windows_node; the work is done by the action plugin of that name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: windows_node
short_description: Bring a bundle to a Windows node
version_added: 0.2.0
description:
  - A preview, never run on Windows. Copies a bundle that C(akp render) wrote to a Windows node, over C(ssh) or C(psrp),
    and starts C(akp-node.ps1) there, which compiles C(akp-node.cs) with the .NET Framework of the node.
  - Needs no module of another collection, and no Python on the node.
author:
  - The agentless.kube_proxy contributors (@agentless)
extends_documentation_fragment:
  - agentless.kube_proxy.directory
  - agentless.kube_proxy.attributes
  - agentless.kube_proxy.attributes.action_group
attributes:
  check_mode:
    description: Can be run without a change to a node.
    support: partial
    details: With O(state=applied) the node says what would change; the states that take away are skipped.
  diff_mode:
    description: Can say what changes in detail.
    support: none
  idempotent:
    description: Run a second time with nothing new, it reports no change.
    support: full
options:
  state:
    description:
      - V(applied) makes the Host Networking Service equal to the bundle, V(gathered) returns the facts that
        C(akp render --facts) reads, V(status) compares with the last bundle, V(rolled_back) applies the one before, and
        V(absent) deletes all that the program has made.
    type: str
    choices: [applied, gathered, status, rolled_back, absent]
    default: applied
  bundle:
    description: The directory of the bundle on the control host. Required with O(state=applied).
    type: str
    default: ""
  network:
    description: The HNS network of the pods, C(winkernel.networkName) of the configuration. For O(state=gathered).
    type: str
    default: ""
  root_endpoint:
    description: The name of the HNS endpoint that health checks are forwarded to. For O(state=gathered).
    type: str
    default: cbr0
  boot:
    description:
      - Whether a scheduled task restores the last bundle when Windows starts. If not given, it stays as it is.
    type: bool
seealso:
  - module: agentless.kube_proxy.node
"""

EXAMPLES = r"""
- name: Ask the node for its facts
  agentless.kube_proxy.windows_node:
    state: gathered
    network: pods
  register: asked

- name: Give the node its load balancers, and restore them at boot
  agentless.kube_proxy.windows_node:
    bundle: "bundles/{{ inventory_hostname }}"
    boot: true
"""

RETURN = r"""
answer:
  description: What the program printed.
  type: dict
  returned: success
  sample: {ok: true, changed: true, created: 12, modified: 0, deleted: 3, kept: 140, foreign: 0, missing: []}
"""
