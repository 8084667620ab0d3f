# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A cluster and its nodes as one page that people look at; it makes no request and decides nothing.

services    Services with their frontends, and what each node does with traffic to them
nodes       what is known of each node, from the working directory; `akp status` prints the same
changes     the plan that waits for approval
runs        the ledger as a timeline
freshness   how fresh nodes were, and how fast changes came to them
page        all of it as HTML
"""
