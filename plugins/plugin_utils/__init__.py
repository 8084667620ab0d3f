"""The engine: a cluster goes in, each node's exact packet rules come out.

Data flows in one direction through six packages, and each knows only those before it:

    cluster     facts in: a Snapshot of Services, EndpointSlices, Nodes and ServiceCIDRs
    proxy       decisions: which endpoints a node uses for which Service port (NodeView)
    backends    rule text: the NodeView as iptables, ipvs or nftables objects (State)
    bundle      what a node gets: files, manifest, digests, deltas, releases, and the program akp-node
    controller  how it gets there: what Ansible's plugins and `akp watch` do on the control host
    cli         the command `akp`
"""

from __future__ import annotations

__version__ = "0.1.0"
