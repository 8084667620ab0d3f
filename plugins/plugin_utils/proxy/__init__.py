# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Decisions: kube-proxy's rules about which Services count and which endpoints a node uses. Pure, no I/O."""
