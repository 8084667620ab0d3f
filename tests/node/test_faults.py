# ruff: noqa: E501 -- a rule stands on one line, as it would be typed.
"""What goes wrong on a node, and what is left afterwards."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.program import PROGRAM
from tests.node import bundles, nftables
from tests.node.host import Host, failing_restores
from tests.node.test_apply import INVALID, everything

EXT = "KUBE-EXT-67NZLRHBNDSAWJRO"
LOCALHOST = f'-A KUBE-NODEPORTS -d 127.0.0.0/8 -p tcp -m comment --comment "shop/web:http" -m tcp --dport 31080 -m nfacct --nfacct-name localhost_nps_accepted_pkts -j {EXT}'


def refused_in_filter(directory: Path) -> Path:
    """Good to the guard, refused by the kernel: the counter of a filter rule does not exist."""
    text = bundles.rules(bundles.shop("10.244.5.5:80")).replace("-A KUBE-FORWARD", f"{INVALID}\n-A KUBE-FORWARD", 1)
    return bundles.simple(directory, iptables_rules=text)


def refused_in_nat(directory: Path) -> Path:
    """The same in nat, whose transaction comes after that of filter."""
    text = bundles.rules(bundles.shop("10.244.5.5:80"), extra={"nat": [LOCALHOST]})
    service = f"# shop/web:http tcp\n:{EXT} - [0:0]\n"
    return bundles.simple(directory, iptables_rules=text.replace("# shop/web:http tcp\n", service))


def refused_in_ipv6(directory: Path) -> Path:
    """The same in IPv6, which comes after IPv4."""
    text = bundles.rules((), ipv6=True).replace("-A KUBE-FORWARD", f"{INVALID}\n-A KUBE-FORWARD", 1)
    return bundles.simple(directory, bundles.shop("10.244.5.5:80"), ip6tables_rules=text)


REFUSED = {"filter": refused_in_filter, "nat": refused_in_nat, "ipv6": refused_in_ipv6}


@pytest.mark.parametrize("where", REFUSED)
@pytest.mark.parametrize("first", [True, False], ids=["fresh", "applied"])
def test_a_refused_bundle_leaves_the_old_state(any_flavour: Host, tmp_path: Path, where: str, first: bool) -> None:
    host = any_flavour
    if not first:
        host.apply(bundles.simple(tmp_path / "a", sysctls_conf="net.ipv4.conf.all.route_localnet = 1\n"))
    before = host.kernel()
    status = host.akp("status").json["state"]
    result = host.akp("apply", REFUSED[where](tmp_path / "b"))
    assert result.code == 4, result.stdout + result.stderr
    assert ("old state is back" in result.json["error"], result.json["asBefore"]) == (True, True)
    # Legacy commits a table as a whole, so the kernel cannot tell the rule.
    named = "nfacct" if host.flavour == "nft" else f"COMMIT of table {'nat' if where == 'nat' else 'filter'}"
    assert named in result.json["error"]
    assert host.kernel() == before
    assert host.akp("status").json["state"] == status


def test_the_refused_line_is_named(nft_host: Host, tmp_path: Path) -> None:
    result = nft_host.akp("apply", refused_in_filter(tmp_path / "a"))
    assert result.code == 4
    assert "-- -A KUBE-FORWARD " in result.json["error"]
    assert nft_host.chains() == set()


@pytest.mark.parametrize("verb", ["apply", "cleanup"])
@pytest.mark.parametrize("back", [True, False], ids=["undone", "stuck"])
def test_a_refused_run_says_whether_the_old_state_is_back(
    nft_host: Host, tmp_path: Path, verb: str, back: bool
) -> None:
    """The first restore is carried out and yet fails; those that would take it back work, or fail too."""
    nft_host.apply(bundles.simple(tmp_path / "a"))
    before = nft_host.kernel()
    path = failing_restores(nft_host, tmp_path / "bin", back=back)
    operand = [bundles.simple(tmp_path / "b", bundles.shop("10.244.5.5:80"))] if verb == "apply" else []
    result = nft_host.akp(verb, *operand, PATH=path)
    assert (result.code, result.json["asBefore"]) == (4, back), result.stdout + result.stderr
    assert ("the old state is back" in result.json["error"], nft_host.kernel() == before) == (back, back)


def test_what_stays_of_a_first_apply_is_not_taken_for_what_was_there_before(nft_host: Host, tmp_path: Path) -> None:
    """The undo fails too: what the host had before is known to the next run, and comes back with a cleanup."""
    virgin = nft_host.kernel()
    bundle = bundles.simple(tmp_path / "a")
    refused = nft_host.akp("apply", bundle, PATH=failing_restores(nft_host, tmp_path / "bin"))
    assert (refused.code, refused.json["asBefore"]) == (4, False), refused.stdout + refused.stderr
    assert nft_host.kernel() != virgin
    nft_host.apply(bundle)
    assert nft_host.akp("cleanup").code == 0
    assert nft_host.kernel() == virgin


def test_a_mode_that_is_refused_leaves_no_tables(nft_host: Host, tmp_path: Path) -> None:
    nft_host.apply(nftables.write(nftables.shop("10.244.1.1"), tmp_path / "a"))
    before = nft_host.kernel()
    refused = nft_host.akp("apply", refused_in_nat(tmp_path / "b"))
    assert (refused.code, refused.json["asBefore"]) == (4, True), refused.stdout + refused.stderr
    assert nft_host.kernel() == before


def killer(directory: Path, host: Host, *, before: str, after: str) -> str:
    """A PATH where restore kills akp-node around the switching transaction: `before` or `after` it."""
    directory.mkdir()
    for tool in (f"iptables-{host.flavour}", f"ip6tables-{host.flavour}"):
        real = shutil.which(f"{tool}-restore")
        (directory / tool).symlink_to(str(shutil.which(tool)))
        (directory / f"{tool}-save").symlink_to(str(shutil.which(f"{tool}-save")))
        script = directory / f"{tool}-restore"
        script.write_text(
            "#!/bin/sh\nset -eu\n"
            f'cat >"{directory}/input"\n'
            f'grep -q "^-I " "{directory}/input" || exec {real} "$@" <"{directory}/input"\n'
            f'{before}\n{real} "$@" <"{directory}/input"\n{after}\n'
        )
        script.chmod(0o755)
    return f"{directory}:{host.environment['PATH']}"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_run_killed_around_the_switch_is_healed_by_the_next(host: Host, tmp_path: Path, moment: str) -> None:
    clean = host.kernel()
    kill = 'kill -9 "$PPID"; exit 1'
    path = killer(tmp_path / "bin", host, before=kill * (moment == "before"), after=kill * (moment == "after"))
    bundle = bundles.simple(tmp_path / "a", bundles.many(60, 4))
    assert host.akp("apply", bundle, PATH=path).code == -9
    if host.flavour == "nft" and moment == "before":
        assert len(host.chains("KUBE-S[EV][PC]-")) == 300  # staged, and nothing jumps to them
        assert "-j KUBE-SERVICES" not in host.rules()
    answer = host.apply(bundle)
    assert answer["changed"] is True
    assert host.akp("status", "--verify").json["drift"] == 0
    assert host.apply(bundle, "--verify")["changed"] is False
    host.akp("cleanup")
    assert host.kernel() == clean


def test_staged_chains_of_a_killed_run_go_with_the_next_bundle(nft_host: Host, tmp_path: Path) -> None:
    path = killer(tmp_path / "bin", nft_host, before='kill -9 "$PPID"; exit 1', after="")
    nft_host.akp("apply", bundles.simple(tmp_path / "a", bundles.many(60, 4)), PATH=path)
    answer = nft_host.apply(bundles.simple(tmp_path / "b"))
    assert answer["chains"]["ipv4"]["removed"] == 300
    assert len(nft_host.chains("KUBE-S[EV][PC]-")) == 6


def test_a_held_lock_ends_with_5(nft_host: Host, tmp_path: Path) -> None:
    nft_host.state.mkdir()
    with subprocess.Popen(["flock", nft_host.state / "lock", "sh", "-c", "echo held; read x"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:  # fmt: skip
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        result = nft_host.akp("apply", bundles.simple(tmp_path / "a"), AKP_LOCK_WAIT="1")
        assert (result.code, result.json["code"], result.json["asBefore"]) == (5, 5, True)
        assert "locked" in result.json["error"]
        assert nft_host.chains() == set()
        assert holder.stdin
        holder.stdin.close()


def test_two_runs_at_once_take_turns(nft_host: Host, tmp_path: Path) -> None:
    first, second = bundles.simple(tmp_path / "a"), bundles.simple(tmp_path / "b", bundles.shop("10.244.7.7:1"))
    command = 'for b in "$A" "$B" "$A" "$B"; do dash "$program" apply "$b" & done; wait'
    answers = nft_host.sh(command, A=str(first), B=str(second), program=str(PROGRAM)).splitlines()
    assert len(answers) == 4
    assert all('"ok": true' in answer for answer in answers)
    assert nft_host.akp("status", "--verify").json["drift"] == 0


def hiding(*tools: str) -> tuple[str, ...]:
    """Run a command where these tools cannot be executed."""
    mounts = " && ".join(f"mount --bind /dev/null {shutil.which(tool)}" for tool in tools)
    return ("unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh")


@pytest.mark.parametrize(
    ("tool", "package", "files"),
    [
        ("nfacct", "nfacct", {"nfacct.rules": "ct_state_invalid_dropped_pkts\n"}),
        ("conntrack", "conntrack", {"conntrack.udp": "ipv4 10.96.0.10 53 10.244.1.3:53\n"}),
        ("flock", "util-linux", {}),
    ],
)
def test_a_missing_tool_is_named_with_its_package(
    nft_host: Host, tmp_path: Path, tool: str, package: str, files: dict[str, str]
) -> None:
    result = nft_host.akp(
        "apply", bundles.write(tmp_path / "a", {"iptables.rules": bundles.rules(()), **files}), prefix=hiding(tool)
    )
    assert result.code == 3
    assert result.json["error"] == f"missing tool: {tool} (package {package})"
    assert result.json["asBefore"] is True
    assert nft_host.chains() == set()


def test_conntrack_is_not_needed_without_udp(nft_host: Host, tmp_path: Path) -> None:
    result = nft_host.akp("apply", bundles.simple(tmp_path / "a", conntrack_udp=""), prefix=hiding("conntrack"))
    assert result.code == 0


def without_ipv6(directory: Path) -> tuple[str, ...]:
    """Run a command where /usr/sbin has everything but ip6tables."""
    directory.mkdir()
    for tool in Path("/usr/sbin").iterdir():
        if tool.name.startswith(("iptables", "xtables", "nft", "conntrack", "nfacct", "ip")) and "ip6" not in tool.name:
            shutil.copy(tool, directory / tool.name, follow_symlinks=False)
    return ("unshare", "-m", "sh", "-c", f'mount --bind {directory} /usr/sbin && exec "$@"', "sh")


def test_a_host_without_ip6tables_takes_only_bundles_without_ipv6(nft_host: Host, tmp_path: Path) -> None:
    prefix = without_ipv6(tmp_path / "sbin")
    result = nft_host.akp("apply", bundles.simple(tmp_path / "a"), prefix=prefix)
    assert result.code == 3
    assert "ip6tables" in result.json["error"]
    assert nft_host.akp("facts", prefix=prefix).json["capabilities"]["ipv6"] is False
    only = bundles.write(tmp_path / "b", {"iptables.rules": bundles.rules(bundles.shop()), "ip6tables.rules": ""})
    answer = nft_host.akp("apply", only, prefix=prefix)
    assert answer.code == 0, answer.stderr
    assert nft_host.akp("apply", only, prefix=prefix).json["changed"] is False
    assert nft_host.akp("status", "--verify", prefix=prefix).json["drift"] == 0


def test_a_full_disk_changes_nothing(nft_host: Host, tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a", bundles.many(200, 4))
    small = tmp_path / "small"
    small.mkdir()
    prefix = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=300k none {small} && exec "$@"', "sh")
    result = nft_host.akp("apply", bundle, prefix=prefix, AKP_RUN=str(small))
    assert result.code != 0
    assert result.json["ok"] is False
    assert nft_host.chains() == set()


def test_a_full_disk_of_the_state_directory_changes_nothing(nft_host: Host, tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a", bundles.many(200, 4), sysctls_conf="net.ipv4.conf.all.route_localnet = 1\n")
    nft_host.state.mkdir()
    before = nft_host.kernel()
    mount = f'mount -t tmpfs -o size=300k none {nft_host.state} && exec "$@"'
    result = nft_host.akp("apply", bundle, prefix=("unshare", "-m", "sh", "-c", mount, "sh"))
    assert (result.code, "is the disk full" in result.json["error"]) == (3, True), result.stdout
    assert result.json["asBefore"] is True
    assert nft_host.kernel() == before


def test_a_run_ended_by_a_signal_says_so(host: Host, tmp_path: Path) -> None:
    """The signal comes during a transaction, which ends first."""
    path = killer(tmp_path / "bin", host, before="", after='kill -TERM "$PPID"')
    bundle = bundles.simple(tmp_path / "a", bundles.many(60, 4))
    result = host.akp("apply", bundle, PATH=path)
    assert result.code == 0  # once the switch has begun a run goes on to its end
    assert host.akp("status", "--verify").json["drift"] == 0

    other = tmp_path / "bin" / "sha256sum"
    other.write_text('#!/bin/sh\nkill -TERM "$PPID"\nsleep 1\nexit 1\n')
    other.chmod(0o755)
    result = host.akp("apply", bundles.simple(tmp_path / "b"), PATH=path)
    assert (result.code, result.json["error"], result.json["asBefore"]) == (143, "ended by a signal", True)


def test_it_needs_root(nft_host: Host, tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    result = nft_host.akp("apply", bundle, program=PROGRAM, prefix=("setpriv", "--reuid=65534", "--clear-groups"))
    assert (result.code, result.json["error"]) == (3, "apply needs root")


def test_a_state_directory_that_cannot_be_written_changes_nothing(nft_host: Host, tmp_path: Path) -> None:
    result = nft_host.akp("apply", bundles.simple(tmp_path / "a"), AKP_STATE="/proc/akp")
    assert (result.code, "/proc/akp" in result.json["error"]) == (3, True), result.stdout
    assert nft_host.chains() == set()


def test_a_lost_state_directory_is_made_again(any_flavour: Host, tmp_path: Path) -> None:
    bundle = everything(tmp_path / "a")
    any_flavour.apply(bundle)
    rules = any_flavour.rules()
    shutil.rmtree(any_flavour.state)
    assert any_flavour.akp("status").json["state"] == "foreign"
    answer = any_flavour.apply(bundle)
    assert answer["chains"]["ipv4"]["same"] == 21
    assert any_flavour.rules() == rules
    assert any_flavour.akp("status").json["state"] == "applied"


def test_files_that_change_after_they_were_checked_are_not_used(new_host: Callable[..., Host], tmp_path: Path) -> None:
    """The program works on its own copy, so a writable bundle directory is no way in."""
    host = new_host()
    bundle = bundles.simple(tmp_path / "a")
    directory = tmp_path / "bin"
    directory.mkdir()
    script = directory / "sha256sum"
    script.write_text(
        f"#!/bin/sh\necho '-A INPUT -j ACCEPT' >>{bundle}/iptables-3-frontends.rules\nexec {shutil.which('sha256sum')} \"$@\"\n"
    )
    script.chmod(0o755)
    result = host.akp("apply", bundle, PATH=f"{directory}:{host.environment['PATH']}")
    assert result.code in {0, 2}
    assert "ACCEPT\n" not in host.sh("$ipt -S INPUT").replace("-P INPUT ACCEPT\n", "")


def test_files_of_killed_runs_do_not_pile_up(any_flavour: Host, tmp_path: Path) -> None:
    host = any_flavour
    run = host.directory / "run"
    with subprocess.Popen(["sleep", "600"]) as busy:
        for name in (f"{run}/999999999.dead", f"{host.state}/in.999999999", f"{run}/{busy.pid}.busy"):
            Path(name).mkdir(parents=True)
        result = host.akp("apply", bundles.simple(tmp_path / "a"))
        assert result.code == 0, result.stdout + result.stderr
        assert [each.name for each in run.iterdir()] == [f"{busy.pid}.busy"]
        assert list(host.state.glob("in.*")) == []
        busy.kill()
