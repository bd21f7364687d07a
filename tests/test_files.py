"""Files under names where other people may have put links, pipes and devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hwrl.checkpoint import DurableFS
from hwrl.files import create_file, open_to_append, open_to_read, read_file, replacing


def _link(path: Path) -> None:
    path.symlink_to(path.with_name("victim"))


def _dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def _hard_link(path: Path) -> None:
    path.hardlink_to(path.with_name("victim"))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


PLANTED = [_link, _dangling_link, _hard_link, os.mkfifo, _socket, _device]


def _write_by_replacing(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"new")


def _write_durably(path: Path) -> None:
    DurableFS().replace_file(path, b"new")


def _create(path: Path) -> None:
    with create_file(path.with_name(f".tmp_{path.name}")) as file:
        file.write(b"new")
    path.with_name(f".tmp_{path.name}").rename(path)


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("write", [_write_by_replacing, _write_durably, _create])
def test_a_draft_goes_through_nothing_that_has_its_name(
    tmp_path: Path, write: Callable[[Path], None], plant: Callable[[Path], None]
) -> None:
    (tmp_path / "victim").write_text("precious")
    for name in ("page", ".tmp_page"):
        plant(tmp_path / name)
    write(tmp_path / "page")
    assert sorted(os.listdir(tmp_path)) == ["page", "victim"]
    assert (tmp_path / "page").read_text() == "new" and not (tmp_path / "page").is_symlink()
    assert (tmp_path / "victim").read_text() == "precious"


def test_after_an_error_the_old_file_stays_and_no_draft(tmp_path: Path) -> None:
    (tmp_path / "page").write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "page") as file:
        file.write(b"new")
        _ = 1 // 0
    assert os.listdir(tmp_path) == ["page"] and (tmp_path / "page").read_text() == "old"


@pytest.mark.parametrize("plant", [_link, _dangling_link, os.mkfifo, _socket, _device, os.mkdir])
def test_only_regular_files_are_opened_and_at_once(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    (tmp_path / "victim").write_text("precious")
    plant(tmp_path / "file")
    for use in (open_to_append, open_to_read, lambda path: read_file(path, max_nbytes=10)):
        with pytest.raises(OSError, match=r"symbolic link|pipe or a socket|not a regular file|directory"):
            use(tmp_path / "file")
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_length_is_checked_before_the_content_is_read(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"12345")
    link.symlink_to(path)
    assert read_file(path, max_nbytes=5) == read_file(link, max_nbytes=5, follow_links=True) == b"12345"
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match="more than 1,000 bytes"):
        read_file(path, max_nbytes=1000)
