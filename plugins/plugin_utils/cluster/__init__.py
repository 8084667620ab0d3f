# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Facts in: a Snapshot of the cluster's Services, EndpointSlices, Nodes and ServiceCIDRs."""
