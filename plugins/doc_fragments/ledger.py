# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The options that say where the ledger is."""

from __future__ import annotations


class ModuleDocFragment:
    """Of modules that change nodes, or are about to."""

    DOCUMENTATION = r"""
options:
  ledger:
    description:
      - The file on the control host that gets an entry for everything that is done to a node, each sealed with the one
        before. C(akp ledger) shows and verifies it. The default is C(ledger.jsonl) in O(dir); V(none) writes none.
      - If not given, the variable C(kube_proxy_ledger) holds.
    type: str
  ledger_copy:
    description:
      - Where each entry of the ledger goes as well, as it is made. V(syslog) sends it to the control host's syslog, and
        anything else is a file. C(akp ledger verify --copy) compares the two.
      - If not given, the variable C(kube_proxy_ledger_copy) holds.
    type: str
"""
