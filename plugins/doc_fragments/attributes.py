# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Attributes of the modules: what check mode, diff mode and the rest mean to them."""

from __future__ import annotations


class ModuleDocFragment:
    """Attributes that all or some modules share."""

    DOCUMENTATION = r"""
options: {}
attributes:
  action:
    description: Has an action plugin, so that part of it or all of it runs on the control host.
    support: full
  async:
    description: Can be run in the background with the keyword C(async).
    support: none
  platform:
    description: The systems it works on.
    platforms: posix
    support: full
"""

    CONTROL = r"""
options: {}
attributes:
  check_mode:
    description: Can be run without a change to a node.
    support: full
    details: Files in the working directory of the control host are written in check mode too, since later tasks of the
      same run predict from them.
  diff_mode:
    description: Can say what changes in detail.
    support: none
  idempotent:
    description: Run a second time with nothing new, it reports no change.
    support: full
"""

    ACTION_GROUP = r"""
options: {}
attributes:
  action_group:
    description: Belongs to an action group, for which C(module_defaults) can be set.
    support: full
    membership: [agentless.kube_proxy.kube_proxy]
"""
