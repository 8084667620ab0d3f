# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Documentation of agentless.kube_proxy.install; the work is done by the action plugin of that name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: install
short_description: Put the node program and small files on a host without Python
version_added: 0.1.0
description:
  - Puts the node program, small text files such as units and cron entries, and single settings of C(node.conf) on a
    host, with one command and without Python there. Files belong to root and are replaced in one step.
author:
  - The agentless.kube_proxy contributors (@agentless)
extends_documentation_fragment:
  - agentless.kube_proxy.directory
  - agentless.kube_proxy.host
  - agentless.kube_proxy.attributes
  - agentless.kube_proxy.attributes.action_group
attributes:
  check_mode:
    description: Can be run without a change to a node.
    support: full
  diff_mode:
    description: Can say what changes in detail.
    support: partial
    details: Names the files that change.
  idempotent:
    description: Run a second time with nothing new, it reports no change.
    support: full
options:
  state:
    description: Whether what is listed shall be there.
    type: str
    choices: [present, absent]
    default: present
  program:
    description: The node program, C(akp-node), too.
    type: bool
    default: false
  mode:
    description:
      - The mode of the node program. A node has one of the mode that its bundles have.
      - If not given, the variable C(kube_proxy_mode) holds.
    type: str
    choices: [iptables, ipvs, nftables, userspace]
    default: iptables
  parts:
    description:
      - The programs C(akp-pull), C(akp-health) or C(akp-metrics), beside the node program.
      - C(akp-verify), which nodes that pin signers need, goes to C(/usr/local/sbin).
    type: list
    elements: str
    choices: [pull, health, metrics, verify]
    default: []
  install_path:
    description:
      - Where the node program is installed.
      - If not given, the variable C(kube_proxy_install_path) holds.
    type: str
    default: /usr/local/sbin/akp-node
  files:
    description: Files, by their paths on the host.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Where it is.
        type: str
        required: true
      content:
        description: What is in it.
        type: str
        default: ""
      mode:
        description: Its permissions, in octal.
        type: str
        default: "0644"
      state:
        description: Whether it shall be there.
        type: str
        choices: [present, absent]
        default: present
  settings:
    description:
      - Settings of C(node.conf) by name; one without a value is removed. Others in that file stay as they are.
    type: dict
    default: {}
  etc_dir:
    description:
      - The directory of C(node.conf).
      - If not given, the variable C(kube_proxy_etc_dir) holds.
    type: str
    default: /etc/akp
  then:
    description:
      - Shell commands to run there if something changed, for instance C(systemctl daemon-reload).
    type: str
    default: ""
  command:
    description:
      - The only command that the account may run. Then this module cannot do anything and says so.
      - If not given, the variable C(kube_proxy_command) holds.
    type: str
seealso:
  - module: agentless.kube_proxy.node
"""

EXAMPLES = r"""
- name: Put the node program and the keys of those who may publish on the host
  agentless.kube_proxy.install:
    program: true
    files:
      - path: /etc/akp/allowed_signers
        content: "publisher ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEzIL3rRmA7wDvgOMTPDQHMm4p3PiU9s3BPJWy6Bwq0w"
    settings:
      cluster: production
      url: https://updates.example.org/akp
"""

RETURN = r"""
files:
  description: What was changed, or would be in check mode.
  type: list
  elements: str
  returned: success
  sample: [/usr/local/sbin/akp-node, /etc/akp/node.conf]
"""
