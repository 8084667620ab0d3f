"""Files that are replaced in one step, where another user may have laid something in the way."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.cluster.record import Record
from agentless_kube_proxy.files import make_directory, open_regular, write_atomic, write_directory
from agentless_kube_proxy.ledger import append
from agentless_kube_proxy.locks import Lock
from agentless_kube_proxy.plan.metrics import Freshness
from agentless_kube_proxy.tasks.directory import WorkDirectory, write_json

from . import build

ENGINE = Path(__file__).parents[2] / "plugins" / "plugin_utils"


def metrics(file: Path) -> None:
    """What every run leaves in the directory of the textfile collector."""
    with Freshness(WorkDirectory(file.parent.parent / "akp").make(), "shop") as fresh:
        fresh.confirmed("n1", "n1", "g", 1.0)
        assert fresh.write(file.parent) == file


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "metrics": ("akp_shop.prom", metrics),
    "json": ("status.json", lambda file: write_json(file, {"a": 1})),
    "record": ("snapshot.json", lambda file: Record((), "test").write(file)),
    "bytes": ("file", lambda file: write_atomic(file, b"new")),
}


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[Path], None]]:
    """A file in a directory that all may write, and what writes it."""
    name, write = WRITERS[request.param]
    folder = tmp_path / "textfiles"
    folder.mkdir()
    folder.chmod(0o777)
    return folder / name, write


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", ["", ".new", ".tmp"])
def test_a_link_in_the_way_leads_nowhere(
    writer: tuple[Path, Callable[[Path], None]], suffix: str, tmp_path: Path
) -> None:
    file, write = writer
    secret = tmp_path / "shadow"
    secret.write_text("secret")
    secret.chmod(0o600)
    file.with_name(file.name + suffix).symlink_to(secret)
    write(file)
    assert secret.read_text() == "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_ISREG(file.lstat().st_mode)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", ["", ".new", ".tmp"])
def test_a_pipe_in_the_way_holds_nothing_up(writer: tuple[Path, Callable[[Path], None]], suffix: str) -> None:
    file, write = writer
    os.mkfifo(file.with_name(file.name + suffix))
    write(file)
    assert stat.S_ISREG(file.lstat().st_mode)


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")

    def broken() -> object:
        yield "half"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_atomic(file, broken())  # type: ignore[arg-type]
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
    folder = tmp_path / "folder"
    (folder / "full").mkdir(parents=True)
    with pytest.raises(OSError, match=str(folder)):
        write_atomic(folder, b"")
    assert sorted(tmp_path.iterdir()) == [file, folder]


def test_a_file_has_the_mode_that_was_asked_for_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_atomic(tmp_path / "private", b"")
        os.umask(0o077)
        write_atomic(tmp_path / "public", b"", 0o644)
        make_directory(tmp_path / "folder", 0o755)
    finally:
        os.umask(before)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    assert modes == {"private": 0o600, "public": 0o644, "folder": 0o755}


def test_a_directory_is_replaced_with_all_that_it_held(tmp_path: Path) -> None:
    for content in (b"one", b"two"):
        write_directory(tmp_path / "d", [("a", content, 0o644), (content.decode(), b"", 0o755)])
    assert sorted(each.name for each in (tmp_path / "d").iterdir()) == ["a", "two"]
    assert (tmp_path / "d" / "a").read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [tmp_path / "d"]


def test_a_bundle_goes_where_a_link_was_and_not_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "n1").symlink_to(tmp_path / "elsewhere")
    write_bundle(build.render(build.service()), tmp_path / "n1")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "n1" / "manifest.json").is_file()
    assert not (tmp_path / "n1").is_symlink()


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=name):
            open_regular(tmp_path / name, os.O_WRONLY | os.O_CREAT)
    assert not (tmp_path / "target").exists()
    with pytest.raises(OSError, match="pipe"):
        append(tmp_path / "pipe", {"action": "sync"})
    with pytest.raises(OSError, match="link"):
        Lock(tmp_path / "link").take()


def test_there_is_one_way_to_write_a_file() -> None:
    """Each of the others would have to be right as well."""
    found = [
        f"{file.relative_to(ENGINE)}: {line.strip()}"
        for file in sorted(ENGINE.rglob("*.py"))
        if file.name != "files.py"
        for line in file.read_text().splitlines()
        if re.search(
            r"write_text\(|write_bytes\(|\.chmod\(|mkstemp|mkdtemp|shutil\.copy|(?<!fd)open\([^)]*[\"'][wax]", line
        )
    ]
    # In a directory of its own that nothing else can reach.
    assert found == ['plan/approval.py: file.write_text(signature, encoding="utf-8")']


# ------------------------------------------------------------------ whose the working directory is

OTHER = 65_533  # a user who is not us


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("owner", "belongs to user 65533, who could change it"),
        ("owner above", "belongs to user 65533, who could change it"),
        ("group", "others than its owner may write to"),
        ("world", "others than its owner may write to"),
        ("world above", "others than its owner may write to"),
        ("link in a place of others", "others than its owner may write to"),
    ],
)
def test_a_working_directory_that_another_user_can_write_is_refused(tmp_path: Path, what: str, told: str) -> None:
    above = tmp_path / "above"
    work = above / "akp"
    WorkDirectory(work).make()
    if what.startswith("owner"):
        os.chown(above if what.endswith("above") else work, OTHER, OTHER)
    elif what == "link in a place of others":
        place = tmp_path / "place"
        place.mkdir()
        place.chmod(0o777)
        (place / "akp").symlink_to(work)
        work = place / "akp"
    else:
        (above if what.endswith("above") else work).chmod(0o770 if what == "group" else 0o777)
    with pytest.raises(PermissionError) as refused:
        WorkDirectory(work).make()
    assert told in str(refused.value)
    assert "is not safe" in str(refused.value)


def test_a_working_directory_in_one_that_all_may_write_but_not_rename_in_is_safe(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    WorkDirectory(tmp_path / "tmp" / "akp").make()
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o775)  # as homes in containers are
    assert WorkDirectory(tmp_path / "group" / "akp").make().run.is_dir()
