"""Commit-confirmed on a real kernel: who confirms keeps the change, and without a word the host goes back."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta

from tests.lab.program import PROGRAM
from tests.node import bundles
from tests.node.host import Host
from tests.node.nftables import NO_SYSCTLS
from tests.node.shims import called, path_with, shim
from tests.node.test_faults import hiding, refused_in_nat
from tests.unit.build import node, port, render, service, slice_of

LONG = ("--confirm-within", "600")
SHORT = ("--confirm-within", "1")
MODES = [("iptables", "nft", "dash"), ("nftables", "nft", "busybox"), ("iptables", "legacy", "dash")]


@pytest.fixture(params=MODES, ids=["-".join(each) for each in MODES])
def host(request: pytest.FixtureRequest, new_host: Callable[..., Host]) -> Host:
    """A host of each way to write rules."""
    mode, flavour, shell = request.param
    made = new_host(flavour, shell)
    made.mode = mode
    return made


def shop(mode: str, ip: str) -> State:
    """A shop whose web has one endpoint."""
    ports = [port(8080), port(53, "dns", "UDP")]
    objects = (
        node("n1", "172.18.0.11"),
        service(ports=[port(), port(53, "dns", "UDP")]),
        slice_of("web", ip, ports=ports),
    )
    return render(*objects, mode=mode, conntrack=NO_SYSCTLS)


def bundle(host: Host, directory: Path, ip: str) -> Path:
    write_bundle(shop(host.mode, ip), directory)
    return directory


def kernel(host: Host) -> list[str]:
    """Everything that a cleanup would put back; nft lists objects in the order in which they were made."""
    return sorted(line.strip(" \t,") for line in host.kernel().splitlines())


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within a minute"
        time.sleep(0.1)


def undone(host: Host) -> None:
    """Wait until the host has undone a change."""
    wait_for((host.state / "undone").exists)
    wait_for(lambda: not (host.state / "unconfirmed").exists())


def waiting(host: Host) -> int:
    """The process that would undo the change."""
    return int((host.state / "undo.pid").read_text())


def ended(pid: int) -> bool:
    """The process is gone, or was somebody else's child that nobody has looked after yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def overdue(host: Host) -> str:
    """The process that waits is killed, and the term is over; the token of the change."""
    pid = waiting(host)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: ended(pid))
    note = host.state / "unconfirmed"
    note.write_text(re.sub("^deadline=.*", "deadline=0", note.read_text(), flags=re.M))
    return re.findall("^token=(.*)", note.read_text(), re.M)[0]


# ------------------------------------------------------------------ the two ends


def test_what_is_confirmed_stays(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    a, b = bundle(host, tmp_path / "a", "10.244.1.1"), bundle(host, tmp_path / "b", "10.244.1.2")
    host.apply(a)
    answer = host.apply(b, *LONG)
    assert 500 < answer["confirmWithin"] <= 600
    status = host.akp("status").json
    assert status["unconfirmed"] == {
        "generation": answer["generation"],
        "previous": answer["previous"],
        "seconds": status["unconfirmed"]["seconds"],
        "overdue": False,
    }
    pid = waiting(host)
    wrong = host.akp("confirm", "7c2db2a1-8644-41b4-8274-1cee39b67c61")
    assert (wrong.code, "not the token" in wrong.json["error"]) == (2, True)
    confirmed = host.akp("confirm", answer["confirm"])
    assert (confirmed.code, confirmed.json["changed"], confirmed.json["generation"]) == (0, True, answer["generation"])
    # An answer that was lost on its way is asked for again.
    assert host.akp("confirm", answer["confirm"]).json["changed"] is False
    wait_for(lambda: ended(pid))
    status = host.akp("status", "--verify").json
    assert (status["state"], status["drift"], status["unconfirmed"], status["undone"]) == ("applied", 0, None, None)
    assert not {"undo", "undo.pid", "undo.log"} & {file.name for file in host.state.iterdir()}
    nothing = host.akp("confirm")
    assert (nothing.code, nothing.json["error"]) == (2, "nothing waits for a confirmation here")


def test_what_nobody_confirms_is_undone(host: Host, tmp_path: Path) -> None:
    a, b = bundle(host, tmp_path / "a", "10.244.1.1"), bundle(host, tmp_path / "b", "10.244.1.2")
    was = host.apply(a)["generation"]
    before = kernel(host)
    # Long enough for the answer to come before the end of the term.
    answer = host.apply(b, "--confirm-within", "3")
    undone(host)
    assert kernel(host) == before
    status = host.akp("status", "--verify").json
    assert (status["state"], status["generation"], status["drift"]) == ("applied", was, 0)
    assert (status["undone"]["generation"], status["undone"]["reason"]) == (
        answer["generation"],
        "not confirmed within 3 s",
    )
    late = host.akp("confirm", answer["confirm"])
    assert late.code == 2
    assert f"too late: generation {answer['generation']} was undone" in late.json["error"]
    # A carrier that only asks is told too, and the next change takes the mark away.
    assert host.akp("ask").json["status"]["undone"]["generation"] == answer["generation"]
    host.apply(b)
    assert host.akp("status").json["undone"] is None


def test_the_first_bundle_is_undone_to_nothing(host: Host, tmp_path: Path) -> None:
    clean = kernel(host)
    host.apply(bundle(host, tmp_path / "a", "10.244.1.1"), *SHORT)
    undone(host)
    assert kernel(host) == clean
    status = host.akp("status").json
    assert (status["state"], status["generation"], status["kept"]) == ("absent", None, [])


def test_rules_that_were_taken_over_come_back(host: Host, tmp_path: Path) -> None:
    """A kube-proxy's rules are there, and no bundle of ours: that is what an undo leads to."""
    host.apply(bundle(host, tmp_path / "a", "10.244.1.1"))
    shutil.rmtree(host.state)
    before = kernel(host)
    host.apply(bundle(host, tmp_path / "b", "10.244.1.2"), *SHORT)
    undone(host)
    assert kernel(host) == before
    assert host.akp("status").json["state"] == "foreign"


def test_rules_of_another_mode_that_were_taken_over_come_back(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    host.apply(bundle(host, tmp_path / "a", "10.244.1.1"))
    shutil.rmtree(host.state)
    before = kernel(host)
    host.mode = "nftables"
    host.apply(bundle(host, tmp_path / "b", "10.244.1.2"), *SHORT)
    undone(host)
    assert kernel(host) == before


def test_a_change_of_mode_is_undone(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    host.apply(bundle(host, tmp_path / "a", "10.244.1.1"))
    before = kernel(host)
    host.mode = "nftables"
    host.apply(bundle(host, tmp_path / "b", "10.244.1.1"), *SHORT)
    undone(host)
    assert kernel(host) == before


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_a_delta_is_undone(new_host: Callable[..., Host], tmp_path: Path, mode: str) -> None:
    host = new_host()
    states = [shop(mode, f"10.244.1.{i}") for i in range(3)]
    write_bundle(states[0], tmp_path / "0")
    write_delta(delta(states[0], states[1]), states[1], tmp_path / "1")
    write_delta(delta(states[1], states[2]), states[2], tmp_path / "2")
    host.apply(tmp_path / "0")
    host.apply(tmp_path / "1")
    before = kernel(host)
    # A term that is over before the answer is written is none; a busy machine takes a while.
    assert host.apply(tmp_path / "2", "--confirm-within", "4")["confirm"]
    undone(host)
    assert kernel(host) == before
    status = host.akp("status", "--verify").json
    assert (status["generation"], status["drift"]) == (states[1].generation, 0)


# ------------------------------------------------------------------ the process that waits


def test_it_holds_nothing_of_the_session(nft_host: Host, tmp_path: Path) -> None:
    """The answer is read to its end while it waits, so it has no end of the pipe; and signals to our group miss it."""
    host = nft_host
    host.apply(bundle(host, tmp_path / "a", "10.244.1.1"), *LONG)
    pid = waiting(host)
    assert os.getsid(pid) == pid
    files = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
    assert files <= {"/dev/null", str(host.state / "undo")}
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    host.akp("confirm")
    wait_for(lambda: ended(pid))


def test_without_setsid_it_waits_all_the_same(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    clean = kernel(host)
    result = host.akp("apply", *SHORT, bundle(host, tmp_path / "a", "10.244.1.1"), prefix=hiding("setsid"))
    assert result.code == 0, result.stderr
    undone(host)
    assert kernel(host) == clean


def test_without_a_process_that_waits_nothing_is_done(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    clean = kernel(host)
    made = bundle(host, tmp_path / "a", "10.244.1.1")
    tools = shim(host, tmp_path / "bin", "setsid", "*", "exit 0", calls="-gt 0")
    shim(host, tools, "sleep", "*", "exit 0", calls="-gt 0")
    result = host.akp("apply", *SHORT, made, PATH=path_with(host, tools))
    assert (result.code, result.json["asBefore"]) == (3, True), result.stderr
    assert "the process that would undo it did not start; nothing was changed" in result.json["error"]
    assert host.akp("status").json["unconfirmed"] is None
    assert kernel(host) == clean


def test_a_process_that_ended_during_the_change_is_not_relied_on(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    clean = kernel(host)
    made = bundle(host, tmp_path / "a", "10.244.1.1")
    kill = (
        f"read -r pid <{host.state}/undo.pid; kill -9 $pid\n"
        "while grep -q -v ') Z ' /proc/$pid/stat 2>/dev/null; do sleep 0.05; done\n"
        'exec "$real" "$@"'
    )
    tools = shim(host, tmp_path / "bin", "mv", "*/unconfirmed.new*", kill, calls="-eq 2")
    result = host.akp("apply", *SHORT, made, PATH=path_with(host, tools))
    assert result.code == 0, result.stderr
    undone(host)
    assert kernel(host) == clean


def test_an_undo_that_fails_is_tried_until_it_succeeds(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    clean = kernel(host)
    host.apply(bundle(host, tmp_path / "a", "10.244.1.1"), *LONG)
    token = overdue(host)
    tools = shim(host, tmp_path / "bin", "sh", "*' undo '*", "exit 3", calls="-le 64")
    shim(host, tools, "sleep", "*", "exit 0", calls="-gt 0")
    assert host.akp("await", token, PATH=path_with(host, tools)).code == 0
    assert kernel(host) == clean
    assert called(tools, "sleep") == [f"{min(tries, 60)}" for tries in range(1, 65)]


def test_what_cannot_be_undone_is_not_done(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    before = kernel(host)
    made = bundle(host, tmp_path / "a", "10.244.1.1")
    piped = host.sh('cat "$P" | dash -s apply --confirm-within 9 "$B" || true', P=str(made / "akp-node"), B=str(made))
    assert "--confirm-within is not possible here: the program was not started from a file" in piped
    assert kernel(host) == before
    assert not (host.state / "unconfirmed").exists()


@pytest.mark.parametrize("then", ["restore", "apply", "confirm"])
def test_if_the_process_is_killed_the_next_run_decides(
    new_host: Callable[..., Host], tmp_path: Path, then: str
) -> None:
    host = new_host()
    first = host.apply(bundle(host, tmp_path / "a", "10.244.1.1"))["generation"]
    # Long enough that a busy machine gets to the kill before the term is over.
    second = host.apply(bundle(host, tmp_path / "b", "10.244.1.2"), "--confirm-within", "5")["generation"]
    os.kill(waiting(host), signal.SIGKILL)
    wait_for(lambda: host.akp("status").json["unconfirmed"]["overdue"])
    if then == "restore":
        assert host.akp("restore").json["generation"] == first
        assert host.akp("status").json["undone"]["generation"] == second
    elif then == "confirm":
        assert host.akp("confirm").code == 0
        assert host.akp("status").json["generation"] == second
    else:
        third = host.apply(bundle(host, tmp_path / "c", "10.244.1.3"))["generation"]
        assert host.akp("status").json["generation"] == third
    status = host.akp("status", "--verify").json
    assert (status["unconfirmed"], status["drift"]) == (None, 0)


def test_a_reboot_ends_the_term(host: Host, tmp_path: Path) -> None:
    was = host.apply(bundle(host, tmp_path / "a", "10.244.1.1"))["generation"]
    before = kernel(host)
    now = host.apply(bundle(host, tmp_path / "b", "10.244.1.2"), *LONG)["generation"]
    os.kill(waiting(host), signal.SIGKILL)
    host.sh("nft flush ruleset; for ipt in iptables-legacy ip6tables-legacy; do"
            " for t in nat filter mangle; do $ipt -t $t -F; $ipt -t $t -X; done; done")  # fmt: skip
    fresh = tmp_path / "boot_id"
    fresh.write_text("0f2ff2a2-a9f2-4b43-a9a5-000000000000\n")
    booted = ("unshare", "-m", "sh", "-c", f'mount --bind {fresh} /proc/sys/kernel/random/boot_id && exec "$@"', "sh")
    answer = host.akp("restore", prefix=booted)
    assert (answer.code, answer.json["generation"]) == (0, was), answer.stderr
    assert kernel(host) == before
    status = host.akp("status", prefix=booted).json
    assert (status["unconfirmed"], status["undone"]["generation"]) == (None, now)
    assert status["undone"]["reason"] == "not confirmed before the host was rebooted"


def test_a_boot_that_cannot_be_told_is_not_another_one(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    a, b = bundle(host, tmp_path / "a", "10.244.1.1"), bundle(host, tmp_path / "b", "10.244.1.2")
    host.apply(a)
    (tmp_path / "nothing").touch()
    hidden = f'mount --bind {tmp_path / "nothing"} /proc/sys/kernel/random/boot_id && exec "$@"'
    untold = ("unshare", "-m", "sh", "-c", hidden, "sh")
    # A reboot would then go unnoticed, and with it the end of the term.
    refused = host.akp("apply", *LONG, b, prefix=untold)
    assert (refused.code, "boot_id cannot be read" in refused.json["error"]) == (3, True)
    now = host.apply(b, *LONG)["generation"]
    failing = {"PATH": path_with(host, shim(host, tmp_path / "bin", "cat", "*boot_id*", calls="-gt 0"))}
    assert host.akp("restore", prefix=untold).json["generation"] == now
    assert host.akp("restore", **failing).json["generation"] == now
    unconfirmed = host.akp("status", prefix=untold).json["unconfirmed"]
    assert (unconfirmed["generation"], unconfirmed["overdue"]) == (now, False)
    host.akp("cleanup")


def test_a_restore_within_the_term_keeps_it(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    now = host.apply(bundle(host, tmp_path / "a", "10.244.1.1"), *LONG)["generation"]
    host.sh("nft flush ruleset")
    assert host.akp("restore").json["generation"] == now
    assert host.akp("status").json["unconfirmed"]["generation"] == now
    host.akp("cleanup")


def test_a_restore_that_comes_second_does_not_undo_once_more(nft_host: Host, tmp_path: Path) -> None:
    """Another run ends the change while this one waits for the lock: what is left is not undone to nothing."""
    host = nft_host
    first = host.apply(bundle(host, tmp_path / "a", "10.244.1.1"))["generation"]
    before = kernel(host)
    host.apply(bundle(host, tmp_path / "b", "10.244.1.2"), *LONG)
    overdue(host)
    other = f'dash {PROGRAM} restore >/dev/null 2>&1; exec "$real" "$@"'
    result = host.akp("restore", PATH=path_with(host, shim(host, tmp_path / "bin", "flock", "*", other)))
    assert (result.code, result.json["generation"]) == (0, first), result.stderr
    assert kernel(host) == before


def test_half_a_note_leads_nowhere(nft_host: Host, tmp_path: Path) -> None:
    """What a file system lost says nothing of where to go back to, and nothing is not what is meant."""
    host = nft_host
    now = host.apply(bundle(host, tmp_path / "a", "10.244.1.1"))["generation"]
    (host.state / "unconfirmed").write_text("")
    assert host.akp("restore").json["generation"] == now
    assert host.akp("status", "--verify").json["drift"] == 0


# ------------------------------------------------------------------ what else may happen meanwhile


def test_others_have_to_wait(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    a, b = bundle(host, tmp_path / "a", "10.244.1.1"), bundle(host, tmp_path / "b", "10.244.1.2")
    first = host.apply(a, *LONG)
    for options in ((), LONG):
        refused = host.akp("apply", *options, b, AKP_LOCK_WAIT="1")
        assert refused.code == 5
        assert f"generation {first['generation']} waits for its confirmation" in refused.json["error"]
        assert "akp-node confirm" in refused.json["error"]
    again = host.apply(a, *LONG)
    assert (again["changed"], again["confirm"]) == (False, first["confirm"])
    assert 0 < again["confirmWithin"] <= first["confirmWithin"]
    assert host.apply(a)["changed"] is False
    host.akp("confirm", first["confirm"])
    assert host.apply(b, *LONG)["changed"] is True
    host.akp("cleanup")


def test_the_one_who_waits_goes_on_after_the_confirmation(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    a, b = bundle(host, tmp_path / "a", "10.244.1.1"), bundle(host, tmp_path / "b", "10.244.1.2")
    host.apply(a, *LONG)
    script = 'dash "$a/akp-node" apply "$b" & sleep 1; dash "$a/akp-node" confirm; wait'
    answers = host.sh(script, a=str(a), b=str(b), AKP_LOCK_WAIT="60").splitlines()
    assert ['"ok": true' in line for line in answers] == [True, True]
    assert host.akp("status").json["generation"] == shop("iptables", "10.244.1.2").generation


def test_nothing_to_change_is_nothing_to_confirm(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    a = bundle(host, tmp_path / "a", "10.244.1.1")
    host.apply(a)
    for options in (LONG, (*LONG, "--verify")):
        answer = host.apply(a, *options)
        assert (answer["changed"], answer["confirm"], answer["confirmWithin"]) == (False, None, None)
    assert host.akp("status").json["unconfirmed"] is None
    assert "confirm" not in host.apply(bundle(host, tmp_path / "b", "10.244.1.2"))


def test_a_rollback_ends_it_at_once(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    first = host.apply(bundle(host, tmp_path / "a", "10.244.1.1"))["generation"]
    before = kernel(host)
    host.apply(bundle(host, tmp_path / "b", "10.244.1.2"), *LONG)
    pid = waiting(host)
    assert host.akp("rollback").json["generation"] == first
    assert kernel(host) == before
    status = host.akp("status").json
    assert (status["unconfirmed"], status["undone"]) == (None, None)
    wait_for(lambda: ended(pid))


def test_a_cleanup_ends_it_at_once(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    clean = kernel(host)
    host.apply(bundle(host, tmp_path / "a", "10.244.1.1"))
    host.apply(bundle(host, tmp_path / "b", "10.244.1.2"), *LONG)
    pid = waiting(host)
    assert host.akp("cleanup").code == 0
    assert kernel(host) == clean
    wait_for(lambda: ended(pid))
    assert not host.state.exists()


def test_a_refused_bundle_leaves_nothing_to_confirm(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    host.apply(bundles.simple(tmp_path / "a"))
    before = kernel(host)
    assert host.akp("apply", *LONG, refused_in_nat(tmp_path / "b")).code == 4
    assert kernel(host) == before
    status = host.akp("status").json
    assert (status["state"], status["unconfirmed"], status["undone"]) == ("applied", None, None)


def test_a_refused_bundle_does_not_confirm_the_one_before(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    first = host.apply(bundles.simple(tmp_path / "a"))["generation"]
    second = host.apply(bundles.simple(tmp_path / "b", bundles.shop("10.244.1.99:8080")), *LONG)["generation"]
    token = overdue(host)
    refused = host.akp("apply", *LONG, refused_in_nat(tmp_path / "c"))
    assert (refused.code, refused.json["asBefore"]) == (4, True), refused.stderr
    unconfirmed = host.akp("status").json["unconfirmed"]
    assert (unconfirmed["generation"], unconfirmed["previous"], unconfirmed["overdue"]) == (second, first, True)
    assert f"token={token}\n" in (host.state / "unconfirmed").read_text()
    assert host.akp("restore").json["generation"] == first


def test_what_an_undo_needs_is_kept(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    was = host.apply(bundle(host, tmp_path / "a", "10.244.1.1"))["generation"]
    result = host.akp("apply", *SHORT, bundle(host, tmp_path / "b", "10.244.1.2"), AKP_KEEP="1")
    assert result.code == 0
    undone(host)
    assert host.akp("status").json["generation"] == was


def test_an_undo_to_nothing_keeps_the_lock_to_its_end(nft_host: Host, tmp_path: Path) -> None:
    """A change that came before the undo had said so would lose its note, and the process that waits."""
    host = nft_host
    a, b = bundle(host, tmp_path / "a", "10.244.1.1"), bundle(host, tmp_path / "b", "10.244.1.2")
    host.apply(a, *LONG)
    token = overdue(host)
    other = f'AKP_LOCK_WAIT=0 dash {PROGRAM} apply --confirm-within 600 {b} >{tmp_path}/other; exec "$real" "$@"'
    result = host.akp("undo", token, PATH=path_with(host, shim(host, tmp_path / "bin", "mv", "*undone.new*", other)))
    assert result.code == 0, result.stderr
    assert json.loads((tmp_path / "other").read_text())["code"] == 5
    status = host.akp("status").json
    assert (status["state"], status["unconfirmed"]) == ("absent", None)
    assert status["undone"]["generation"] == shop("iptables", "10.244.1.1").generation
    host.apply(b, *LONG)
    assert waiting(host)
    host.akp("cleanup")


@pytest.mark.parametrize("shell", ["dash", "busybox"])
def test_a_lock_on_a_file_that_was_replaced_is_none(new_host: Callable[..., Host], tmp_path: Path, shell: str) -> None:
    host = new_host("nft", shell)
    replace = f'"$real" "$@"; rm {host.state}/lock; : >{host.state}/lock; exit 0'
    tools = shim(host, tmp_path / "bin", "flock", "*", replace)
    result = host.akp("apply", bundle(host, tmp_path / "a", "10.244.1.1"), PATH=path_with(host, tools))
    assert result.code == 0, result.stderr
    assert len(called(tools, "flock")) == 2


def test_a_term_is_a_number_of_seconds(nft_host: Host, tmp_path: Path) -> None:
    for seconds in ("0", "x", "-1", "1000000", ""):
        result = nft_host.akp("apply", "--confirm-within", seconds, tmp_path)
        assert (result.code, "takes a number of seconds" in result.json["error"]) == (2, True)
    assert nft_host.akp("cleanup", "--confirm-within", "9").code == 2
