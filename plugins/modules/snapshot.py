# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Documentation of agentless.kube_proxy.snapshot; the work is done by the action plugin of that name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: snapshot
short_description: Read a cluster's Services, EndpointSlices, Nodes and ServiceCIDRs
version_added: 0.1.0
description:
  - Reads, from an API server or from files, what kube-proxy would have read, and writes it to one file that the module
    M(agentless.kube_proxy.bundle) renders from.
  - The lists are read in pages, with the selectors that kube-proxy uses, and at one resource version as far as the API
    server still has it. A list that expires half-way is started again; answers 429 and 5xx are waited out.
  - There is no partial snapshot. If any list cannot be read completely, the module fails and the old file stays.
  - The file holds only the fields that rules and inventories depend on, one object a line, in the form of a Kubernetes
    List. The same cluster gives the same bytes. Only its owner can read it.
author:
  - The agentless.kube_proxy contributors (@agentless)
extends_documentation_fragment:
  - agentless.kube_proxy.directory
  - agentless.kube_proxy.api
  - agentless.kube_proxy.attributes
  - agentless.kube_proxy.attributes.control
  - agentless.kube_proxy.attributes.action_group
options:
  cluster_dir:
    description:
      - A file, or a directory of files, as C(kubectl get -o yaml) or C(-o json) prints them, to read instead of an API
        server.
      - If not given, the variable C(kube_proxy_cluster_dir) holds.
    type: path
  dest:
    description: Where the snapshot is written. The default is C(snapshot.json) in O(dir).
    type: path
  resource_version:
    description:
      - Read the cluster as it was at this resource version, RV(resource_version) of another snapshot, so that runs on
        several control hosts see the same cluster without sharing a file. Fails if the API server does not have it any
        more, usually after about five minutes.
      - If not given, the variable C(kube_proxy_resource_version) holds.
    type: str
  digest:
    description:
      - Fail unless what was read has this digest.
      - If not given, the variable C(kube_proxy_snapshot_digest) holds.
    type: str
  timeout:
    description:
      - Seconds that the API server may take for one answer.
      - If not given, the variable C(kube_proxy_api_timeout) holds.
    type: int
    default: 60
  config:
    description:
      - V(cluster) reads the configuration of the cluster's own kube-proxy as well, from the ConfigMap
        C(kube-system/kube-proxy), and fails if it cannot. Without any, and if no run has left one in O(dir), it is read
        where that is possible. Anything else is for M(agentless.kube_proxy.bundle).
      - If not given, the variable C(kube_proxy_config) holds.
    type: raw
  lease:
    description:
      - A Lease in the cluster, as C(NAMESPACE/NAME). Fail, unless in check mode, while an C(akp watch) holds it and
        keeps renewing it.
    type: str
  strict:
    description:
      - Fail if an object cannot be used, instead of leaving it out.
      - If not given, the variable C(kube_proxy_strict) holds.
    type: bool
    default: false
seealso:
  - module: agentless.kube_proxy.bundle
  - module: agentless.kube_proxy.wait_for_change
"""

EXAMPLES = r"""
- name: Read the cluster
  agentless.kube_proxy.snapshot:
    kubeconfig: ~/.kube/config
  run_once: true
  register: snapshot

- name: Read the cluster as another control host saw it a moment ago
  agentless.kube_proxy.snapshot:
    resource_version: "4711"
    digest: 2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824
  run_once: true

- name: Read the cluster from what kubectl printed
  agentless.kube_proxy.snapshot:
    cluster_dir: cluster/
  run_once: true
"""

RETURN = r"""
path:
  description: The file.
  type: str
  returned: success
  sample: /home/ops/.akp/production/snapshot.json
digest:
  description: Names all that rules depend on. It does not change with a resource version or the readiness of a Node.
  type: str
  returned: success
  sample: 2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824
source:
  description: Where the cluster was read from.
  type: str
  returned: success
  sample: https://10.0.0.1:6443
counts:
  description: How many objects of each kind there are.
  type: dict
  returned: success
  sample: {EndpointSlice: 12, Node: 3, Service: 10, ServiceCIDR: 1}
resource_version:
  description: The one moment that all lists are of. Empty if the API server could no longer tell, and for files.
  type: str
  returned: success
  sample: "4711"
resource_versions:
  description: The resource version of each list. All the same, unless the API server could no longer tell.
  type: dict
  returned: success
  sample: {EndpointSlice: "4711", Node: "4711", Service: "4711", ServiceCIDR: "4711"}
problems:
  description: Objects that cannot be used and why. From an API server, only with O(strict); otherwise
    M(agentless.kube_proxy.bundle) tells.
  type: list
  elements: str
  returned: success
  sample: ["Service/shop/cart: spec.ports[0].port: 70000 is not between 1 and 65535"]
seconds:
  description: How long it took.
  type: float
  returned: success
  sample: 0.41
"""
