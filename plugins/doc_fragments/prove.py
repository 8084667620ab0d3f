# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The option that has changes proved before any node gets them."""

from __future__ import annotations


class ModuleDocFragment:
    """Of modules that give nodes new rules, or publish them."""

    DOCUMENTATION = r"""
options:
  prove:
    description:
      - Prove what changes before any node gets it, as C(akp prove) does. Every frontend of each node that changes is
        followed through its new rules, and no address may have two owners. Fails with the smallest counterexample.
      - If not given, the variable C(kube_proxy_prove) holds.
    type: bool
    default: false
"""
