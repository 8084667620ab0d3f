"""Variables that are lists, as roles take them."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.agentless.kube_proxy.plugins.filter.lists import FilterModule

as_list, as_batches = (FilterModule().filters()[name] for name in ("as_list", "as_batches"))


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


@pytest.mark.parametrize("given", ["n1,", ",", '["a", "b"]', "[a,b]", '"a"', "it's", "a,{b}", {"a": 1}, 5, None])
def test_what_is_neither_is_refused_by_name_with_the_way_to_write_it(given: Any) -> None:
    with pytest.raises(
        AnsibleFilterError, match=r"^kube_proxy_x: .* write it as JSON, such as -e '.\"kube_proxy_x\": "
    ):
        as_list(given, "kube_proxy_x")


def test_json_that_came_as_text_is_told_as_what_it_was_meant_to_be() -> None:
    with pytest.raises(AnsibleFilterError, match=r"""-e '{"kube_proxy_x": \["a.service", "b.service"\]}'$"""):
        as_list('["a.service","b.service"]', "kube_proxy_x")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("1,100%", ["1", "100%"]),
        ("2", ["2"]),
        (2, [2]),
        ([1, "10%", "100%"], [1, "10%", "100%"]),
        ("", []),
    ],
)
def test_batches_are_numbers_and_percentages(given: Any, meant: list[Any]) -> None:
    assert as_batches(given, "kube_proxy_x") == meant


@pytest.mark.parametrize("given", ["all", "1,ten", "1.5", "-1", "%", [True], True, [None], 0.5, "[1,2]"])
def test_what_is_no_batch_is_refused_by_name_with_the_way_to_write_it(given: Any) -> None:
    with pytest.raises(AnsibleFilterError, match=r"^kube_proxy_x: .* write it "):
        as_batches(given, "kube_proxy_x")
