# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The option that limits the time of a host."""

from __future__ import annotations


class ModuleDocFragment:
    """Of modules that run commands on a host."""

    DOCUMENTATION = r"""
options:
  task_timeout:
    description:
      - Seconds that the host may take to answer. If it takes longer, it has failed; other hosts do not wait for it.
        What waiting for a confirmation and for probes may take comes on top.
      - If not given, the variable C(kube_proxy_task_timeout) holds.
    type: int
    default: 300
"""
