# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What the action plugins share: the engine as Ansible tasks use it. Nothing here decides about rules."""
