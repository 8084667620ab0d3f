# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Documentation of agentless.kube_proxy.report; the work is done by the action plugin of that name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: report
short_description: Write a page that people look at
version_added: 0.1.0
description:
  - Writes one HTML file on the control host, from the working directory. No node is asked. The page makes no request,
    so it can be mailed or kept as an artifact of a job.
author:
  - The agentless.kube_proxy contributors (@agentless)
extends_documentation_fragment:
  - agentless.kube_proxy.directory
  - agentless.kube_proxy.rules
  - agentless.kube_proxy.attributes
  - agentless.kube_proxy.attributes.control
  - agentless.kube_proxy.attributes.action_group
options:
  path:
    description:
      - The file to write.
      - If not given, the variable C(kube_proxy_report) holds.
    type: path
    required: true
  content:
    description:
      - V(cluster) shows the cluster of the snapshot, its nodes, the plan, the ledger, and how fresh nodes were. V(plan)
        shows the plan alone, as its approvers read it.
    type: str
    choices: [cluster, plan]
    default: cluster
  plan:
    description:
      - The file of the plan. If not given, the variable C(kube_proxy_plan_file) holds, else it is C(plan.json) in
        O(dir).
    type: path
  allowed_signers:
    description:
      - The keys of those who may approve plans, to say who has signed.
      - If not given, the variable C(kube_proxy_allowed_signers) holds.
    type: path
"""

EXAMPLES = r"""
- name: Write a page of the cluster and its nodes
  agentless.kube_proxy.report:
    path: ./report.html
  run_once: true
"""

RETURN = r"""
path:
  description: The page.
  type: str
  returned: success
  sample: /home/alice/report.html
"""
