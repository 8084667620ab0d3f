# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Documentation of agentless.kube_proxy.node; the work is done by the action plugin of that name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node
short_description: Make a node's packet rules equal to its bundle, or see what is there
version_added: 0.1.0
description:
  - Speaks to the node with one command over whatever connection and C(become) the play has. Nothing has to be installed
    there, not even Python; a POSIX shell, awk, gzip and the netfilter tools are enough.
  - A node that is up to date answers in a few hundred bytes. Only the others are sent their bundles.
  - The change is atomic. If the kernel refuses any of it, the module fails with the reason, and the old state is back.
    Where some of that could not be put back either, the node is C(partial), and the next run puts it right.
author:
  - The agentless.kube_proxy contributors (@agentless)
extends_documentation_fragment:
  - agentless.kube_proxy.directory
  - agentless.kube_proxy.host
  - agentless.kube_proxy.ledger
  - agentless.kube_proxy.attributes
  - agentless.kube_proxy.attributes.action_group
attributes:
  check_mode:
    description: Can be run without a change to a node.
    support: full
    details: The node compares its kernel with the bundle, as it would before a change, and then stops.
  diff_mode:
    description: Can say what changes in detail.
    support: full
    details: Per Service, port and endpoint, and what was changed on the node since the last run.
  idempotent:
    description: Run a second time with nothing new, it reports no change.
    support: partial
    details: O(state=rolled_back) without O(generation) goes back one more bundle each time.
options:
  state:
    description:
      - V(applied) makes the node equal to its bundle.
      - V(confirmed) makes good a change that was applied with O(confirm=false), once the O(probes) answer.
      - V(gathered) asks what is applied there, whether it was changed since, and for the facts that rules depend on.
        The module M(agentless.kube_proxy.bundle) uses the answer.
      - V(compared) asks the node how its kernel differs from its bundle, and changes nothing. It is for nodes whose
        rules are kube-proxy's, and leaves out what no packet notices, which are our markers, the order of Services in a
        chain, and chains that no rule leads to.
      - V(restored) applies again what was applied last, and so puts right what was changed since. The cluster is
        not asked.
      - V(rolled_back) goes back to the bundle before, or to O(generation).
      - V(absent) removes everything that was ever applied, and puts settings back to what they were.
      - V(released) leaves rules and settings as they are, to a kube-proxy that runs there, and has the node forget what
        was applied. It needs C(unshare) on the node.
    type: str
    choices: [applied, confirmed, gathered, compared, restored, rolled_back, absent, released]
    default: applied
  name:
    description:
      - The name of the Node object, if it is not the name of the host in the inventory.
      - If not given, the variable C(kube_proxy_node_name) holds.
    type: str
  bundle:
    description: The directory of the bundle. The default is where M(agentless.kube_proxy.bundle) wrote it.
    type: path
  delta:
    description:
      - With O(state=applied), the archive of a delta, as C(akp watch) and C(akp publish) make them. It is sent without
        a question before, and O(bundle) is not looked at. A node that is not where the delta begins changes nothing,
        and the result says that it needs its whole bundle.
    type: path
  snapshot:
    description:
      - With O(state=applied), give the node its whole bundle even if it has that generation. The bundle takes the place
        of the deltas that the node keeps, and the kernel is left alone.
    type: bool
    default: false
  generation:
    description:
      - With O(state=rolled_back), the generation to go back to, or its first digits.
      - With O(state=confirmed), the RV(previous) of the change. If a probe fails, the node is sent back there at once;
        without it, or out of reach, it goes back by itself.
    type: str
  time:
    description:
      - With O(state=rolled_back), go back to what the host had at this time, as the ledger tells it, if the node keeps
        that. V(2026-11-17T21:30) is the control host's time, V(2026-11-17T21:30Z) is not.
    type: str
  verify:
    description:
      - With O(state=gathered), compare every rule with what was applied. Up to 300 service ports that is done anyway;
        beyond, reading them all takes seconds, and without this option only markers and jumps are looked at.
      - If not given, the variable C(kube_proxy_verify) holds.
    type: bool
    default: false
  max_removed_percent:
    description:
      - Refuse a bundle that would remove more than this share of the service ports that the node has.
      - If not given, the variable C(kube_proxy_max_removed_percent) holds.
    type: int
    default: 100
  confirm_within:
    description:
      - With O(state=applied) and O(state=rolled_back), the node returns by itself to what it had unless the change is
        confirmed within so many seconds. The module does that over a new connection, once the O(probes) answer. V(0)
        changes it at once and for good.
      - If not given, the variable C(kube_proxy_confirm_within) holds.
    type: int
    default: 0
  confirm:
    description:
      - Whether the module confirms the change itself. If not, the result has RV(confirm), and O(state=confirmed) has to
        follow within O(confirm_within) seconds; in between is time for checks of your own, or for other nodes.
    type: bool
    default: true
  token:
    description: With O(state=confirmed), the RV(confirm) of the change.
    type: str
  probes:
    description:
      - What must answer before a change is confirmed. Each has a C(port), and may have a C(type) (V(tcp), V(udp),
        V(http) or V(https)), an C(address) (that of the node, if there is none), a C(path), the C(status) codes that
        are good, what the answer C(contains), what to C(send) in a datagram, a C(timeout) in seconds, a C(name), and
        C(from), V(control) or V(node).
      - If not given, the variable C(kube_proxy_probes) holds.
    type: list
    elements: dict
    default: []
  install:
    description:
      - Keep the node program, owned by root, at O(install_path), for those who want to allow exactly that program or to
        run it by hand. With O(state=absent), remove it.
      - If not given, the variable C(kube_proxy_install) holds.
    type: bool
    default: false
  install_path:
    description:
      - Where the node program is installed.
      - If not given, the variable C(kube_proxy_install_path) holds.
    type: str
    default: /usr/local/sbin/akp-node
  state_dir:
    description:
      - Where the node keeps its last bundles.
      - If not given, the variable C(kube_proxy_state_dir) holds.
    type: str
    default: /var/lib/akp
  keep:
    description:
      - How many bundles the node keeps for O(state=rolled_back), the one in force included. V(0) leaves it to the node,
        which keeps 3, or as many as the line C(keep) of its C(/etc/akp/node.conf) says.
      - With O(command) only the node decides, as nothing can be said to it but a verb and its options.
      - If not given, the variable C(kube_proxy_keep) holds.
    type: int
    default: 0
  command:
    description:
      - The command that runs an installed node program, for accounts that may run nothing else, such as
        C(sudo -n /usr/local/sbin/akp-node). It is sent as it is, with a verb and options after it, and without
        C(become).
      - If not given, the variable C(kube_proxy_command) holds.
    type: str
seealso:
  - module: agentless.kube_proxy.bundle
"""

EXAMPLES = r"""
- name: See what is applied, and gather what rules depend on
  agentless.kube_proxy.node:
    state: gathered
  register: gathered

- name: Make the node equal to its bundle
  agentless.kube_proxy.node:
    state: applied
    max_removed_percent: 50

- name: Make the node equal to a bundle that was rendered elsewhere
  agentless.kube_proxy.node:
    bundle: "out/{{ inventory_hostname }}"

- name: Make the node equal to its bundle, and leave it to later tasks whether that stays
  agentless.kube_proxy.node:
    confirm_within: 120
    confirm: false
  register: applied

- name: Look for yourself
  ansible.builtin.uri:
    url: http://shop.example.com/
  delegate_to: localhost

- name: It stays
  agentless.kube_proxy.node:
    state: confirmed
    token: "{{ applied.confirm }}"
    generation: "{{ applied.previous }}"
    confirm_within: "{{ applied.confirm_within }}"
  when: applied.confirm is defined

- name: Go back to what was there before
  agentless.kube_proxy.node:
    state: rolled_back

- name: Remove everything
  agentless.kube_proxy.node:
    state: absent
"""

RETURN = r"""
node:
  description: The name of the Node object.
  type: str
  returned: success
  sample: n1
generation:
  description: What names the state that is there now, or would be in check mode.
  type: str
  returned: success
  sample: fa9c6eafd069cc9972575b3015aa4c60a3740d98a146ae12f8a126997b85702f
frame:
  description:
    - What belongs to no Service and changes, settings, sysctls, health listeners and rules, in the form of RV(changes).
    - As far as the bundles were computed on this control host; of a first one, everything but its rules.
  type: list
  elements: dict
  returned: O(state=applied), O(state=rolled_back) or O(state=restored), if the node had something to do
digest:
  description: The digest of the bundle that was given, or would be in check mode.
  type: str
  returned: O(state=applied), if the node had to be given one
  sample: 5d1b3cbc1c80e0bc0ec9af874769c71c5e35e61a02733796e7833f2fb87f8788
confirm:
  description: Names the change that has to be confirmed.
  type: str
  returned: with O(confirm=false), if the node waits for that
  sample: 3b0ffb71-1c9c-4ac0-8b4a-0e1f6e7a4f0b
confirm_within:
  description: The seconds that are left for it.
  type: int
  returned: with O(confirm=false), if the node waits for that
  sample: 60
need:
  description: V(full) if the delta will not do on this node, and only its whole bundle will. Nothing was changed then.
  type: str
  returned: with O(delta), if so
reason:
  description: Why the delta will not do.
  type: str
  returned: with O(delta), if so
previous:
  description: What was there before.
  type: str
  returned: O(state=applied) or O(state=rolled_back)
  sample: 87f87885d1b3cbc1c80e0bc0ec9af874769c71c5e35e61a02733796e7833f2fb
state:
  description: V(applied), V(absent), V(flushed), V(partial) or V(foreign).
  type: str
  returned: O(state=gathered)
  sample: applied
facts:
  description: What the node is and can do.
  type: dict
  returned: O(state=gathered)
  contains:
    addresses:
      description: Every address of every interface.
      type: list
      elements: dict
    capabilities:
      description: What the kernel and its tools can do.
      type: dict
kept:
  description: Generations that O(state=rolled_back) can go back to.
  type: list
  elements: str
  returned: O(state=gathered)
kube_proxy:
  description:
    - What tells of a kube-proxy that runs there, which is its process, its metrics port, or chains of Services that it
      wrote since the last apply.
  type: list
  elements: str
  returned: O(state=gathered)
kube_proxy_runs:
  description: Whether a kube-proxy runs there now, by its process or its metrics port.
  type: bool
  returned: O(state=gathered)
drift:
  description: How many differences there are between what was applied and what is there, if all rules were compared.
  type: int
  returned: O(state=gathered)
unconfirmed:
  description: A change that the node undoes by itself unless it is confirmed, with its generation and the seconds left.
  type: dict
  returned: O(state=gathered), if there is one
intact:
  description: Whether what is there is what was applied, as far as was looked.
  type: bool
  returned: O(state=gathered)
drifted:
  description: What was changed on the node since the last run, in words.
  type: list
  elements: str
  returned: O(state=gathered)
applied_at:
  description: When the last change was made, in seconds since the epoch, if that was looked up.
  type: int
  returned: O(state=gathered)
differences:
  description:
    - What was changed in our rules since the last run, and what V(applied) repairs.
    - With O(state=compared), the first 1000 differences between the kernel and the bundle.
  type: list
  elements: dict
  returned: O(state=gathered), O(state=compared) or O(state=applied)
  sample:
    - {kind: missing-rule, family: ipv4, table: nat, chain: KUBE-SERVICES, service: "shop/cart:http"}
differing:
  description: How many differences there are between the kernel and the bundle.
  type: int
  returned: O(state=compared)
lines:
  description: The first differences in words.
  type: list
  elements: str
  returned: O(state=compared)
mode:
  description: How rules are written.
  type: str
  returned: when changed, or O(state=compared)
  sample: iptables
chains:
  description: How many chains were added, changed, removed and left alone, by family.
  type: dict
  returned: when changed
sysctls:
  description: How many kernel settings were changed.
  type: int
  returned: when changed
flows:
  description: How many stale UDP flows were removed from the connection tracking table.
  type: int
  returned: when changed
services:
  description: How many Services were added, changed and removed.
  type: dict
  returned: when changed
  sample: {added: 1, changed: 0, removed: 0}
endpoints:
  description: How many endpoints were added and removed.
  type: dict
  returned: when changed
  sample: {added: 3, removed: 0}
changes:
  description: What changed, per service port; at most 1000 of them.
  type: list
  elements: dict
  returned: when changed
  contains:
    action:
      description: V(added), V(removed) or V(changed).
      type: str
    service:
      description: Namespace and name.
      type: str
    port:
      description: Name of the port.
      type: str
    protocol:
      description: V(tcp), V(udp) or V(sctp).
      type: str
    family:
      description: V(IPv4) or V(IPv6).
      type: str
    details:
      description: What changed about it.
      type: list
      elements: str
ledger:
  description: Where the entry about this is in the ledger, as file, number and head; empty if none was written.
  type: str
  returned: success, and where the node could not be changed
  sample: "ledger: /home/alice/.akp/production/ledger.jsonl, entry 2, head 4c1b9f8d"
seconds:
  description: How long the node worked.
  type: float
  returned: when changed
  sample: 0.35
"""
