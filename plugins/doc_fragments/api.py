# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Options that name an API server and the credentials for it."""

from __future__ import annotations


class ModuleDocFragment:
    """Named and read as in kubernetes.core."""

    DOCUMENTATION = r"""
options:
  kubeconfig:
    description:
      - Path to a kubeconfig file, or its content as a mapping.
      - Without it, and without O(host), credentials are looked for where a pod has them, then in C(~/.kube/config).
      - If not given, the variable C(kube_proxy_kubeconfig) holds, else the environment variable E(K8S_AUTH_KUBECONFIG).
    type: raw
  context:
    description:
      - Context of the kubeconfig. Also E(K8S_AUTH_CONTEXT).
      - If not given, the variable C(kube_proxy_context) holds.
    type: str
  host:
    description:
      - URL of the API server. Also E(K8S_AUTH_HOST).
      - If not given, the variable C(kube_proxy_api_host) holds.
    type: str
  api_key:
    description:
      - Bearer token. Also E(K8S_AUTH_API_KEY).
      - If not given, the variable C(kube_proxy_api_key) holds.
    type: str
  username:
    description: User for HTTP basic authentication. Also E(K8S_AUTH_USERNAME).
    type: str
  password:
    description: Password for HTTP basic authentication. Also E(K8S_AUTH_PASSWORD).
    type: str
  client_cert:
    description: Path to a client certificate. Also E(K8S_AUTH_CERT_FILE).
    type: path
    aliases: [cert_file]
  client_key:
    description: Path to the key of the client certificate. Also E(K8S_AUTH_KEY_FILE).
    type: path
    aliases: [key_file]
  ca_cert:
    description:
      - Path to the certificate of the authority that signed the API server's. Also E(K8S_AUTH_SSL_CA_CERT).
      - If not given, the variable C(kube_proxy_api_ca_cert) holds.
    type: path
    aliases: [ssl_ca_cert]
  validate_certs:
    description: Whether to check the API server's certificate. Also E(K8S_AUTH_VERIFY_SSL).
    type: bool
    aliases: [verify_ssl]
  proxy:
    description: URL of an HTTP proxy. Also E(K8S_AUTH_PROXY).
    type: str
  no_proxy:
    description: Comma separated hosts and networks that are reached without the proxy. Also E(K8S_AUTH_NO_PROXY).
    type: str
  proxy_headers:
    description: Headers for the HTTP proxy.
    type: dict
    suboptions:
      proxy_basic_auth:
        description: C(user:password) for the proxy. Also E(K8S_AUTH_PROXY_HEADERS_PROXY_BASIC_AUTH).
        type: str
      basic_auth:
        description: C(user:password). Also E(K8S_AUTH_PROXY_HEADERS_BASIC_AUTH).
        type: str
      user_agent:
        description: The user agent that the proxy sees. Also E(K8S_AUTH_PROXY_HEADERS_USER_AGENT).
        type: str
  impersonate_user:
    description: User to act as. Also E(K8S_AUTH_IMPERSONATE_USER).
    type: str
  impersonate_groups:
    description: Groups to act as a member of. Also E(K8S_AUTH_IMPERSONATE_GROUPS), comma separated.
    type: list
    elements: str
requirements:
  - kubernetes >= 30 (Python, on the control host)
notes:
  - The credentials need the verbs list and watch on services, nodes, endpointslices and servicecidrs, and nothing else.
    For Services that have Endpoints and no EndpointSlices, they need both on endpoints, too.
    The collection ships a manifest that grants exactly that, C(examples/access/rbac.yaml).
"""
