# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What will change on nodes: bundles to give, limits on what may go, approvals, the record of what was done."""
