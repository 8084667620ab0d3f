"""A cluster goes in, each node's exact packet rules come out, and get there.

Data flows in one direction, and each part knows only those before it:

    cluster     facts in: a Snapshot of Services, EndpointSlices, Nodes and ServiceCIDRs
    proxy       decisions: which endpoints a node uses for which Service port (NodeView)
    backends    rule text: the NodeView as iptables, ipvs or nftables objects (State)
    bundle      what a node gets: files, manifest, digests, deltas, releases, and the program akp-node
    engine      the one place where choices, snapshot and facts become states
    plan        what will change on which node, limits on it, approvals, the record of it
    carry       how it gets there: the protocol with akp-node, ways to reach it, workers
    node        what one task does for one host: the states of the module node
    watch       the loop of `akp watch`, on engine, plan and carry
    publish     signed bundles for nodes that fetch them
    tasks       what the action plugins of Ansible share
    explain     the way back: rule text is read as a kernel reads it, and held against the decisions
    report      all of it as a page that people look at
    cli         the command `akp`
"""

from __future__ import annotations

__version__ = "0.2.0"
