# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Following a cluster: the loop of `akp watch`, its hosts, and Ansible as it runs there."""
