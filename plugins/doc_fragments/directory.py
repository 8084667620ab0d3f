# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The option that names the working directory."""

from __future__ import annotations


class ModuleDocFragment:
    """Of all modules."""

    DOCUMENTATION = r"""
options:
  dir:
    description:
      - Working directory on the control host. It holds the snapshot, the bundles, what nodes answered and what each
        run did. Each cluster has its own; two runs must not share one at the same time.
      - If not given, it is the variable C(kube_proxy_dir), else C(~/.akp/) and the variable C(kube_proxy_cluster_name),
        else C(~/.akp/default).
    type: path
notes:
  - Options that are not given are taken from variables of the host, as their descriptions say, so that tasks stay short
    and a whole cluster is configured in one place. The roles of the collection describe the variables.
"""
