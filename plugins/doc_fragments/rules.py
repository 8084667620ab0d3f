# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Options that say what rules are made of."""

from __future__ import annotations


class ModuleDocFragment:
    """Of modules that compute the rules of nodes."""

    DOCUMENTATION = r"""
options:
  snapshot:
    description:
      - The snapshot to render from. The default is C(snapshot.json) in O(dir).
      - If not given, the variable C(kube_proxy_snapshot) holds.
    type: path
  config:
    description:
      - A C(KubeProxyConfiguration), as the path of a YAML or JSON file or as a mapping. In a mapping C(apiVersion) and
        C(kind) may be left out. C(mode) in it chooses how rules are written.
      - V(cluster) is that of the cluster's own kube-proxy, in the ConfigMap C(kube-system/kube-proxy), as the snapshot
        has it.
      - Without it, the one holds that the last run left in O(dir), else that of the snapshot, or else kube-proxy's
        defaults.
      - If not given, the variable C(kube_proxy_config) holds.
    type: raw
  compat:
    description:
      - The kube-proxy minor whose rules are written. The default is that of the last run in O(dir), or V(1.37).
      - If not given, the variable C(kube_proxy_compat) holds.
    type: str
  allow_mode_change:
    description:
      - Let the mode, O(compat) or the fields of O(config) that rules depend on be others than those of the last run in
        O(dir). Otherwise nothing is rendered, and a host that has rules of another mode is left as it is.
      - If not given, the variable C(kube_proxy_allow_mode_change) holds.
    type: bool
    default: false
  schedulers:
    description:
      - Schedulers of single Services in ipvs mode, by V(namespace/name); kube-proxy has one for all.
      - If not given, the variable C(kube_proxy_schedulers) holds.
    type: dict
    default: {}
  scheduler_annotations:
    description:
      - In ipvs mode, let a Service choose its scheduler with the annotation C(kube-proxy.agentless.io/scheduler).
      - If not given, the variable C(kube_proxy_scheduler_annotations) holds.
    type: bool
    default: false
  vip_policy:
    description:
      - What becomes of an external IP or the IP of a load balancer that lies outside of the ranges that are allowed,
        or is an address of a node, a pod, the API server or another Service. Whatever it says, the cluster IP of
        another Service, the way in for the control host and the API server are not taken at their ports.
      - V(warn) does what kube-proxy does, and says so. V(omit) leaves that address out of the Service. V(refuse) fails
        before anything is sent or published.
      - If not given, the variable C(kube_proxy_vip_policy) holds.
    type: str
    choices: [warn, omit, refuse]
    default: warn
  external_ip_cidrs:
    description:
      - Where external IPs of Services may lie. With an empty list nowhere, without one anywhere.
      - An address that is named by itself may be one that an interface of a node has.
      - If not given, the variable C(kube_proxy_external_ip_cidrs) holds.
    type: list
    elements: str
  load_balancer_cidrs:
    description:
      - Where IPs of load balancers may lie. With an empty list nowhere, without one anywhere.
      - If not given, the variable C(kube_proxy_load_balancer_cidrs) holds.
    type: list
    elements: str
  control_ports:
    description:
      - The ports by which the control host comes in, which no Service gets at an address of a node. Without it, 22.
      - If not given, the variable C(kube_proxy_control_ports) holds.
    type: list
    elements: str
  health_check_ports:
    description:
      - The first and the last port that nodes open for health checks of load balancers. A health check port of a
        Service that is not among them is left out and named.
      - If not given, the variable C(kube_proxy_health_check_ports) holds.
    type: str
    default: 30000-32767
"""
