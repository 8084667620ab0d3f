"""What goes to a node and what comes back, through real shells: dash and busybox, each with its own awk."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.bundle.archive import archive, lines_of
from agentless_kube_proxy.bundle.program import PROGRAM, node_program
from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.carry.answers import Answer, NoAnswer, parse_answer
from agentless_kube_proxy.carry.protocol import Command, Way, bundle_files, program_digest

from tests.unit import build

SHELLS = {"dash": ["dash", "-c"], "busybox": ["busybox", "ash", "-c"]}


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """A shell and its environment. With busybox, everything that busybox has is busybox's."""
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    if request.param == "busybox":
        tools = tmp_path / "busybox"
        tools.mkdir()
        for tool in (
            "sh",
            "awk",
            "gzip",
            "sed",
            "mktemp",
            "sha256sum",
            "cmp",
            "cat",
            "grep",
            "tr",
            "cut",
            "wc",
            "sort",
            "head",
            "rm",
            "mv",
            "cp",
            "mkdir",
        ):
            (tools / tool).symlink_to("/bin/busybox")
        path = f"{tools}:{path}"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    return SHELLS[request.param], {"PATH": path, "AKP_PATH": path, "AKP_RUN": str(temporary), "TMPDIR": str(temporary)}


def run(shell: tuple[list[str], dict[str, str]], command: Command) -> Answer:
    """Runs a command in a network namespace of its own."""
    argv, environment = shell
    done = subprocess.run(
        ["unshare", "--net", *argv, command.text],
        input=command.stdin,
        capture_output=True,
        env=environment,
        check=False,
    )
    return parse_answer(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture
def way(tmp_path: Path) -> Way:
    return Way(installed=str(tmp_path / "sbin" / "akp-node"), state_dir=str(tmp_path / "state-dir"))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    state = build.render(build.service(), build.slice_of("web", "10.244.1.5"), conntrack={"maxPerCore": 0})
    write_bundle(state, tmp_path / "bundle")
    return tmp_path / "bundle"


def test_a_node_without_the_program_says_so(shell: Any, way: Way) -> None:
    assert run(shell, way.ask(["ask"])).needs_program


def test_the_question_is_small(way: Way) -> None:
    command = way.ask(["ask", "--known", "f01910a0-effa-45e0-8798-c4449ea6c931"])
    assert len(command.text) + len(command.stdin) < 900


def test_the_program_can_travel_with_the_question(shell: Any, way: Way, tmp_path: Path) -> None:
    answer = run(shell, way.carry(["ask"]))
    assert answer.result["status"]["state"] == "absent"
    assert answer.result["facts"]["capabilities"]["ipv4"] is True
    assert list((tmp_path / "tmp").iterdir()) == [], "nothing stays behind"
    assert not (tmp_path / "state-dir").exists(), "asking changes nothing"


def test_a_node_that_applied_a_bundle_has_the_program(shell: Any, way: Way, bundle: Path, tmp_path: Path) -> None:
    first = run(shell, way.carry(["apply"], bundle))
    assert first.result["changed"] is True
    shown = run(shell, way.ask(["show"]))
    assert [json.loads(line)["service"] for line in shown.lines] == ["shop/web"]
    answer = run(shell, way.ask(["ask"]))
    assert not answer.needs_program
    # Each command runs in a namespace of its own, so what was applied is gone: as after a reboot.
    assert answer.result["status"]["state"] == "flushed"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_program_of_another_version_does_not_count(shell: Any, way: Way) -> None:
    installed = Path(way.installed)
    installed.parent.mkdir()
    installed.write_text(node_program("iptables") + "# older\n")
    assert run(shell, way.ask(["ask"])).needs_program
    installed.write_text(node_program("iptables"))
    assert not run(shell, way.ask(["ask"])).needs_program


def test_only_an_installed_program_counts_where_it_shall_be_installed(shell: Any, way: Way, bundle: Path) -> None:
    run(shell, way.carry(["apply"], bundle))
    strict = Way(installed=way.installed, state_dir=way.state_dir, only_installed=True)
    assert run(shell, strict.ask(["ask"])).needs_program
    answer = run(shell, strict.carry(["apply"], bundle, install=True))
    assert answer.installed
    stat = Path(way.installed).stat()
    assert (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777) == (0, 0, 0o755)
    assert not run(shell, strict.carry(["apply"], bundle, install=True)).installed, "a second time changes nothing"
    assert not run(shell, strict.ask(["ask"])).needs_program


def test_it_can_be_uninstalled(shell: Any, way: Way) -> None:
    Path(way.installed).parent.mkdir()
    Path(way.installed).write_text("x")
    assert run(shell, way.uninstall(dry_run=True)).result["removed"] is True
    assert Path(way.installed).exists()
    assert run(shell, way.uninstall(dry_run=False)).result["removed"] is True
    assert run(shell, way.uninstall(dry_run=False)).result["removed"] is False


@pytest.mark.parametrize("part", [0, 1, 100, -30])
def test_a_bundle_that_is_cut_short_is_refused(shell: Any, way: Way, bundle: Path, part: int) -> None:
    command = way.carry(["apply"], bundle)
    answer = run(shell, Command(command.text, command.stdin[:part] or b"\n"))
    assert answer.result["ok"] is False
    assert answer.result["code"] == 2
    assert "cut short" in answer.result["error"]
    assert answer.as_before


@pytest.mark.parametrize(
    ("said", "as_before"),
    [('"asBefore": true', True), ('"asBefore": false', False), ('"error": "the old state is back"', False)],
    ids=["yes", "no", "unsaid"],
)
def test_only_a_node_that_says_so_is_as_before(said: str, as_before: bool) -> None:
    answer = parse_answer(5, f'{{"ok": false, "code": 5, {said}}}', "")
    assert answer.as_before is as_before


def test_a_bundle_comes_on_stdin_to_an_account_that_may_run_nothing_else(
    shell: Any, bundle: Path, tmp_path: Path
) -> None:
    program = tmp_path / "akp-node"
    program.write_text(node_program("iptables"))
    restricted = Way(restricted=f"AKP_STATE={tmp_path}/state sh {program}")
    answer = run(shell, restricted.carry(["apply"], bundle))
    assert answer.result["changed"] is True
    assert restricted.ask(["ask"]).text == f"AKP_STATE={tmp_path}/state sh {program} ask"


@pytest.mark.parametrize(
    "content",
    [
        b"== ../evil 1\nx\n==\n",
        b"== a/b 1\nx\n==\n",
        b"== manifest.json 1\nx\n== manifest.json 1\ny\n==\n",
        b"== log 1\nx\n==\n",
        b"junk\n",
    ],
    ids=["parent", "folder", "twice", "log", "junk"],
)
def test_an_archive_can_name_nothing_but_its_own_files(shell: Any, tmp_path: Path, content: bytes) -> None:
    program = tmp_path / "akp-node"
    program.write_text(node_program("iptables"))
    restricted = Way(restricted=f"AKP_STATE={tmp_path}/state sh {program}")
    answer = run(shell, Command(restricted.carry(["apply"]).text, gzip.compress(content)))
    assert answer.result["ok"] is False
    assert answer.result["code"] == 2
    assert not (tmp_path / "evil").exists()
    assert not Path("/tmp/evil").exists()


def test_an_archive_is_the_files_and_their_number_of_lines() -> None:
    packed = archive([("a", b"one\ntwo\n"), ("empty", b"")])
    assert packed == b"== a 2\none\ntwo\n== empty 0\n==\n"
    small = archive([("a", b"one\ntwo\n"), ("empty", b"")], plain_below=0)
    assert gzip.decompress(small) == packed
    large = [("a", b"0123456789\n" * 3000), ("b", b"end\n")]
    assert gzip.decompress(archive(large)).startswith(b"== a 3000\n0123456789\n")
    assert archive(large) == archive(large)
    assert [lines_of(each, "a") for each in (packed, small)] == [["one", "two"]] * 2
    assert lines_of(archive(large), "b") == ["end"]
    with pytest.raises(ValueError, match="a: its last line has no end"):
        archive([("a", b"one")])


def test_a_bundle_travels_as_its_manifest_lists_it(bundle: Path) -> None:
    (bundle / "left-behind").write_text("x\n")
    names = [name for name, _content in bundle_files(bundle)]
    assert names[0] == "manifest.json"
    assert PROGRAM in names
    assert "left-behind" not in names


@pytest.mark.parametrize(
    ("stdout", "stderr", "words"),
    [
        ("", "sudo: a password is required", "a password is required"),
        ("", "", "no output at all"),
        ("Welcome to this host\n", "", "Welcome"),
        ("[1, 2]\n", "", "exit 1"),
    ],
)
def test_a_node_that_talks_nonsense_is_quoted(stdout: str, stderr: str, words: str) -> None:
    with pytest.raises(NoAnswer, match=words):
        parse_answer(1, stdout, stderr)


def test_a_terminal_in_between_does_no_harm() -> None:
    answer = parse_answer(0, '-{"a": 1}\r\n+{"b": 2}\r\n{"ok": true}\r\n', "")
    assert answer.lines == ('-{"a": 1}', '+{"b": 2}')


def test_the_digest_is_that_of_the_program() -> None:
    done = subprocess.run(["sha256sum"], input=node_program("iptables").encode(), capture_output=True, check=True)
    assert done.stdout.decode().split()[0] == program_digest("iptables")
    assert os.access("/bin/busybox", os.X_OK)
