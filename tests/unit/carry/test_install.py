"""Files and settings on a host: what is put there, and what is left alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.bundle.program import node_program, part_program
from agentless_kube_proxy.carry.answers import parse_answer
from agentless_kube_proxy.carry.install import File, Install, InvalidInstall, part_path

SHELLS = (["dash"], ["busybox", "ash"])


def run(wanted: Install, *, dry_run: bool = False, shell: list[str] = SHELLS[0]) -> dict[str, Any]:
    """What the host answered."""
    command = wanted.command(dry_run=dry_run)
    done = subprocess.run([*shell, "-c", command.text], input=command.stdin, capture_output=True, check=False)
    return parse_answer(done.returncode, done.stdout.decode(), done.stderr.decode()).result


@pytest.mark.parametrize("shell", SHELLS, ids=["dash", "busybox"])
def test_what_is_wanted_is_there_and_a_second_time_changes_nothing(tmp_path: Path, shell: list[str]) -> None:
    program, unit, marker = tmp_path / "bin" / "akp-node", tmp_path / "units" / "a.service", tmp_path / "marker"
    wanted = Install(
        files=[File(str(unit), "[Service]\nExecStart=/bin/true"), File(str(tmp_path / "secret"), "x\n", "0600")],
        program=True,
        program_path=str(program),
        mode="nftables",
        then=f"echo again >>{marker}",
    )
    paths = [str(program.with_name("akp-leave")), str(program), str(unit), str(tmp_path / "secret")]
    assert run(wanted, dry_run=True, shell=shell) == {"ok": True, "files": paths}
    assert not unit.exists()
    assert run(wanted, shell=shell) == {"ok": True, "files": paths}
    assert program.read_text() == node_program("nftables")
    assert unit.read_text() == "[Service]\nExecStart=/bin/true\n"
    assert [oct(Path(path).stat().st_mode & 0o777) for path in paths] == ["0o755", "0o755", "0o644", "0o600"]
    assert run(wanted, shell=shell) == {"ok": True, "files": []}
    unit.chmod(0o666)
    assert run(wanted, shell=shell)["files"] == [str(unit)]
    assert marker.read_text() == "again\nagain\n"


def test_only_named_settings_change(tmp_path: Path) -> None:
    conf = tmp_path / "node.conf"
    conf.write_text("# mine\ntextfile /srv\nurl http://old\nproxy none\n")
    wanted = Install(settings={"url": "http://new", "proxy": None, "cluster": "shop"}, etc_dir=str(tmp_path))
    assert run(wanted)["files"] == [str(conf)]
    assert conf.read_text() == "# mine\ntextfile /srv\nurl http://new\ncluster shop\n"
    assert run(wanted)["files"] == []


def test_what_goes_leaves_nothing_behind_and_takes_nothing_else(tmp_path: Path) -> None:
    etc, other = tmp_path / "akp", tmp_path / "cron.d"
    other.mkdir()
    wanted = Install(
        files=[File(str(etc / "allowed_signers"), "a b"), File(str(other / "akp-pull"), "x")],
        settings={"url": "http://a"},
        etc_dir=str(etc),
    )
    run(wanted)
    gone = Install(files=[File(each.path, None) for each in wanted.files], settings={"url": None}, etc_dir=str(etc))
    assert len(run(gone)["files"]) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["cron.d"]
    assert run(gone)["files"] == []


def test_what_should_follow_and_fails_is_told(tmp_path: Path) -> None:
    answer = run(Install(files=[File(str(tmp_path / "a"), "x")], then="echo no such unit; false"))
    assert answer["ok"] is False
    assert "no such unit" in answer["error"]
    assert json.dumps(answer)


@pytest.mark.parametrize(
    "wanted",
    [
        Install(files=[File("relative", "x")]),
        Install(files=[File("/etc/../x", "x")]),
        Install(files=[File("/etc/$(reboot)", "x")]),
        Install(files=[File("/etc/x", "x", "rw")]),
        Install(settings={"url": "a\nb"}),
        Install(settings={"URL;": "a"}),
    ],
)
def test_what_makes_no_sense_is_refused(wanted: Install) -> None:
    with pytest.raises(InvalidInstall):
        wanted.command(dry_run=True)


def test_programs_come_and_go_beside_the_node_program(tmp_path: Path) -> None:
    program = tmp_path / "akp-node"
    both = Install(program_path=str(program), parts={"pull": True, "health": True})
    assert run(both)["files"] == [str(tmp_path / "akp-pull"), str(tmp_path / "akp-health")]
    assert (tmp_path / "akp-health").read_text() == part_program("health")
    assert not program.exists()
    gone = Install(program_path=str(program), parts={"pull": False})
    assert run(gone)["files"] == [str(tmp_path / "akp-pull")]
    assert (tmp_path / "akp-health").exists()


def test_the_node_program_finds_what_checks_signatures_wherever_it_is_itself() -> None:
    assert part_path("pull", "/opt/akp/akp-node") == "/opt/akp/akp-pull"
    assert part_path("verify", "/opt/akp/akp-node") == "/usr/local/sbin/akp-verify"
    assert "VERIFY=${AKP_VERIFY:-/usr/local/sbin/akp-verify}" in node_program("iptables")
