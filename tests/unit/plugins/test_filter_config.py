"""The mode that the role prepare takes from the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.agentless.kube_proxy.plugins.filter.config import FilterModule
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.choices import load_config
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.configuration import Kept

config_mode = FilterModule().filters()["config_mode"]


@pytest.mark.parametrize(
    ("given", "mode"),
    [({}, "iptables"), ("", "iptables"), (None, "iptables"), ({"mode": "ipvs"}, "ipvs"), ({"mode": ""}, "iptables")],
)
def test_a_mapping_has_its_mode_or_the_default(given: Any, mode: str) -> None:
    assert config_mode(given) == mode


def test_a_file_has_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "kube-proxy.yaml"
    file.write_text("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n")
    assert config_mode(str(file)) == "nftables"


@pytest.mark.parametrize(
    ("given", "told"),
    [({"mode": "ebpf"}, "kube_proxy_config: the KubeProxyConfiguration is not valid: mode"), ("/no", "/no")],
)
def test_what_is_no_configuration_is_refused_by_name(given: Any, told: str) -> None:
    with pytest.raises(AnsibleFilterError, match=told):
        config_mode(given)


def test_without_one_it_is_that_of_the_last_run(tmp_path: Path) -> None:
    assert config_mode("", str(tmp_path), "default") == "iptables"
    Kept(load_config({"mode": "nftables"})).write(tmp_path / "config.json")
    assert config_mode("", str(tmp_path), "default") == "nftables"
    assert config_mode({"mode": "ipvs"}, str(tmp_path), "default") == "ipvs"
