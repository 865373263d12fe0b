from __future__ import annotations

import os
from pathlib import Path

import pytest

from sao import atomic


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    atomic.write_file(path, b"one, rather long")
    atomic.write_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_before_the_rename_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    atomic.write_file(path, b"old")

    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        atomic.write_file(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_directory_appears_whole_under_its_name(tmp_path: Path) -> None:
    source, target = tmp_path / "private", tmp_path / "published" / "v1"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "tensor").write_bytes(b"1")
    target.parent.mkdir()
    atomic.publish_directory(source, target)
    assert (target / "inner" / "tensor").read_bytes() == b"1"
    assert not source.exists()


def test_a_published_directory_is_never_replaced(tmp_path: Path) -> None:
    source, target = tmp_path / "private", tmp_path / "v1"
    source.mkdir()
    target.mkdir()
    with pytest.raises(FileExistsError, match="v1 exists already"):
        atomic.publish_directory(source, target)
    assert source.exists()


def test_content_is_durable_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rename comes after the file's fsync and before the directory's."""
    steps: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        steps.append("fsync")
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    atomic.write_file(tmp_path / "f", b"x")
    assert steps == ["fsync", "rename", "fsync"]
