"""Variables that are lists, as roles take them."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.agentless.kube_proxy.plugins.filter.lists import FilterModule

as_list = FilterModule().filters()["as_list"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("kubelet.service", ["kubelet.service"]),
        ("a.service, b.service", ["a.service", "b.service"]),
        ("", []),
        ([], []),
        (("hosts.yml",), ["hosts.yml"]),
        (["--limit", "n1,n2", ""], ["--limit", "n1,n2", ""]),
    ],
)
def test_words_are_a_list_and_a_list_is_itself(given: Any, meant: list[str]) -> None:
    assert as_list(given, "kube_proxy_x") == meant


@pytest.mark.parametrize("given", ["n1,", ",", {"a": 1}, 5, None])
def test_what_is_neither_is_refused_by_name_with_the_way_to_write_it(given: Any) -> None:
    with pytest.raises(
        AnsibleFilterError, match=r"^kube_proxy_x: .* write it as JSON, such as -e '.\"kube_proxy_x\": "
    ):
        as_list(given, "kube_proxy_x")
