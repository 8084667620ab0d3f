"""What the roles leave on a host with a real systemd: timers that pull, and rules that come back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.publisher import Publisher
from tests.lab.systemd import SystemdHost
from tests.lab.web import WebServer

from .play import SHOP, Run, playbook

RULES = "iptables-save | grep KUBE || :"
EXPOSURE = 42  # tenths: what systemd-analyze security may find at most
# What the kernel's rules are when kubelet starts.
KUBELET = """
mkdir -p /var/lib/kubelet
cat >/etc/systemd/system/kubelet.service <<'END'
[Service]
Type=oneshot
ExecStart=/bin/sh -c "iptables-save | grep KUBE >/var/lib/kubelet/saw"
[Install]
WantedBy=multi-user.target
END
systemctl enable kubelet.service
"""


@pytest.fixture(scope="module")
def host() -> Iterator[SystemdHost]:
    with SystemdHost(f"n1-{os.getpid()}") as made:
        yield made


def services(what: str, host: SystemdHost, work: Path, **variables: Any) -> Run:
    """Runs a playbook on the host itself, without Python for modules."""
    inventory = work / "hosts.ini"
    work.mkdir(exist_ok=True)
    inventory.write_text("n1 ansible_connection=local ansible_python_interpreter=/nonexistent\n")
    chosen = {"kube_proxy_cluster_name": "shop", "kube_proxy_node_name": "n1", **variables}
    return playbook(f"{what}_services", inventory, work, variables=chosen, prefix=host.enter([]))


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not what():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def test_a_timer_pulls_and_the_rules_outlive_firewalls_and_reboots(host: SystemdHost, tmp_path: Path) -> None:
    with WebServer(host.enter([])) as web:
        publisher = Publisher(tmp_path / "publisher", web.www)
        publisher.publish(SHOP)
        signers = [publisher.allowed_signers]
        pulling = {"kube_proxy_pull_url": web.url, "kube_proxy_pull_signers": signers, "kube_proxy_pull_jitter": 0}
        assert services("pull", host, tmp_path / "work", **pulling).changed == {"n1": 1}
        again = services("pull", host, tmp_path / "work", **pulling)
        assert [each.result["files"] for each in again.of("install")] == [[]]
        wait_for(lambda: "KUBE-SERVICES" in host.sh(RULES))
        wait_for(lambda: "inactive" in host.sh("systemctl is-active akp-pull.service || :"))
    assert host.sh("systemctl show -P Result akp-pull.service").strip() == "success"
    rules = host.sh(RULES)

    # From here on nobody is there to help.
    assert services("boot", host, tmp_path / "work").changed == {"n1": 1}
    host.sh("systemctl disable --now akp-pull.timer; systemctl start nftables.service")
    for verb in ("restart", "reload"):
        # The firewall flushes everything; what is ours is back when systemctl returns, or a moment later.
        assert "flush ruleset" in host.sh("cat /etc/nftables.conf")
        host.sh(f"systemctl {verb} nftables.service")
        wait_for(lambda: host.sh("systemctl is-active akp-restore.service || :").strip() == "active")
        wait_for(lambda: host.sh(RULES) == rules)

    host.sh(KUBELET)
    host.power_off()
    host.boot()
    assert host.sh("cat /var/lib/kubelet/saw") == rules
    assert host.sh("systemctl is-active akp-restore.service").strip() == "active"


# The lab has no bus unless it is needed.
FIREWALLD = """
rm /etc/systemd/system/dbus.service /etc/systemd/system/dbus.socket
systemctl daemon-reload
systemctl start dbus.socket firewalld.service
firewall-cmd --state
"""


def test_a_reload_of_firewalld_brings_the_rules_back_within_two_seconds(tmp_path: Path) -> None:
    with SystemdHost(f"fw-{os.getpid()}") as host:
        assert host.sh(FIREWALLD).strip() == "running"
        assert services("sync", host, tmp_path, kube_proxy_confirm_within=0).changed == {"n1": 1}
        rules = host.sh(RULES)
        assert services("boot", host, tmp_path).changed == {"n1": 1}
        # It answers at once, and flushes a moment later.
        host.sh("systemctl reload firewalld.service")
        wait_for(lambda: "KUBE-SERVICES" not in host.sh(RULES))
        flushed = time.monotonic()
        wait_for(lambda: host.sh(RULES) == rules)
        assert time.monotonic() - flushed < 2
        wait_for(lambda: host.sh("systemctl is-active akp-restore.service || :").strip() == "active")
        host.sh("systemctl restart firewalld.service")
        wait_for(lambda: host.sh("firewall-cmd --state || :").strip() == "running")
        wait_for(lambda: host.sh(RULES) == rules)


def test_a_look_now_and_then_and_no_trace_at_the_end(host: SystemdHost, tmp_path: Path) -> None:
    looking = services("boot", host, tmp_path, kube_proxy_boot_check_minutes=1)
    assert looking.changed == {"n1": 1}
    assert host.sh("systemctl is-active akp-check.timer").strip() == "active"
    units = host.sh("cd /etc/systemd/system; for unit in akp-*; do echo /etc/systemd/system/$unit; done").split()
    assert [Path(unit).name for unit in units] == [
        *("akp-check.service", "akp-check.timer"),
        *("akp-pull.service", "akp-pull.timer", "akp-restore.service"),
    ]
    assert host.run(["systemd-analyze", "verify", "--man=no", *units]).stderr == ""
    # They run as root, with no more of it than they need.
    for unit in (each for each in units if each.endswith(".service")):
        analyse = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", unit]
        analysed = host.run(analyse, check=False)
        assert analysed.returncode == 0, analysed.stdout + analysed.stderr
    assert services("boot", host, tmp_path).changed == {"n1": 1}
    assert host.sh("systemctl is-active akp-check.timer || :").strip() == "inactive"
    for name in ("boot", "pull"):
        absent = {f"kube_proxy_{name}_state": "absent"}
        assert services(name, host, tmp_path, **absent).changed == {"n1": 1}
    assert host.sh("find /etc/systemd /etc/cron.d /etc/akp /usr/local/sbin -name '*akp*' 2>/dev/null || :") == ""
    assert host.sh("systemctl list-unit-files --no-legend 'akp-*' || :") == ""
