# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Documentation of agentless.kube_proxy.wait_for_change; the work is done by the action plugin of that name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: wait_for_change
short_description: Wait until something changes in a cluster that packet rules depend on
version_added: 0.1.0
description:
  - Watches Services, EndpointSlices, Nodes and ServiceCIDRs from where a snapshot left off, and returns as soon as an
    object differs from it in a field that a rule depends on. Heartbeats, annotations and selectors do not count.
  - Returns without a change when the time is over.
author:
  - The agentless.kube_proxy contributors (@agentless)
extends_documentation_fragment:
  - agentless.kube_proxy.directory
  - agentless.kube_proxy.api
  - agentless.kube_proxy.attributes
  - agentless.kube_proxy.attributes.action_group
attributes:
  check_mode:
    description: Can be run without a change to a node.
    support: full
    details: It only ever reads.
  diff_mode:
    description: Can say what changes in detail.
    support: none
  idempotent:
    description: Run a second time with nothing new, it reports no change.
    support: full
options:
  snapshot:
    description:
      - The snapshot to compare with. The default is C(snapshot.json) in O(dir). If there is none, a change is whatever
        differs from when the module began.
    type: path
  timeout:
    description: Seconds to wait at most.
    type: int
    default: 300
  settle:
    description: After a change, wait until there was none for so many seconds, so that a rollout is one change.
    type: float
    default: 1.0
seealso:
  - module: agentless.kube_proxy.snapshot
"""

EXAMPLES = r"""
- name: Wait until there is something to do
  agentless.kube_proxy.wait_for_change:
    kubeconfig: ~/.kube/config
    timeout: 600
  run_once: true
  register: news
"""

RETURN = r"""
timed_out:
  description: Whether the time was over before anything changed.
  type: bool
  returned: success
objects:
  description: The objects that changed; at most 1000 of them.
  type: list
  elements: dict
  returned: success
  sample:
    - {kind: EndpointSlice, namespace: shop, name: cart-x7k2p, action: changed}
count:
  description: How many objects changed.
  type: int
  returned: success
  sample: 1
seconds:
  description: How long it waited.
  type: float
  returned: success
  sample: 12.3
"""
