# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Signed bundles for nodes that fetch them: the store, and from a cluster to a publication."""
