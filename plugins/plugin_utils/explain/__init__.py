# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Rule text read as a kernel reads it: packets are followed through it, and clusters are proved by it.

    packet    a packet, the host it meets, the rules it met, and where it ended
    iptables  text of iptables-save, as chains of rules
    ipset     text of ipset save
    ipvs      text of ipvsadm -Sn
    nft_text  commands of nft, or what nft list prints, as chains, sets and maps
    nft_rule  one rule of nft, as statements
    walk      the hooks of the kernel in order
    iptables_walk, nft_walk  the same with tables of iptables and virtual servers, and with nft
    ruleset   which files are read by what

These know nothing of what wrote the text. The rest asks them, and compares with the decisions of `proxy`:

    intent    a node as it is meant to be
    links     the source address of what a node sends
    needed    the objects of a cluster that a question depends on
    question  who sends what to whom, as people ask it
    suggestions  the right question that is nearest to a wrong one
    answer    the way of a packet, and why, as data
    words     the same for people
    compare   where the rules of a kernel differ from those that were meant
    service   everything about one Service
    prove     every frontend of every node
    claims    what a proof claims, and what does not hold
    overlaps  addresses that have two owners
    bundles   what changes between two directories of bundles
    attribution  which lines of a bundle are there for which service port
"""
