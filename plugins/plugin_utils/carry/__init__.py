# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How it gets to nodes: the protocol with the node program, ways to reach it, workers, limits on time."""
