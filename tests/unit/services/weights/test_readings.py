"""What is read of a version, when, and how often."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sao.weights.base import IncompleteVersionError
from sao.weights.checkpoint import FileReading, read_file
from sao.weights.memory import MemoryVersionStore
from services.weights.preflight import RefusedVersionError, inspect
from services.weights.readings import ReadAhead, Readings
from tests.support.versions import floats, manifest_for, publish, write_safetensors

WEIGHTS = "model.safetensors"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was read, by name."""
    times: Counter[str] = Counter()

    def counted(file: Path) -> FileReading:
        times[file.name] += 1
        return read_file(file)

    monkeypatch.setattr("services.weights.readings.read_file", counted)
    return times


@pytest.fixture
def store() -> MemoryVersionStore:
    return MemoryVersionStore()


def begin(store: MemoryVersionStore, *values: float) -> tuple[str, Path]:
    """What a trainer has written before it commits."""
    version, directory = store.allocate()
    write_safetensors(directory / WEIGHTS, {"w": floats(*values)})
    (directory / "config.json").write_text("{}")
    return version, directory


def commit(store: MemoryVersionStore, version: str, directory: Path) -> None:
    store.commit(manifest_for(version, directory), directory)


def test_what_was_read_while_the_trainer_wrote_is_not_read_again(store: MemoryVersionStore, read: Counter[str]) -> None:
    readings = Readings()
    ahead = ReadAhead(store, readings)
    version, directory = begin(store, 1.0, 2.0)
    ahead.look()
    assert not read, "it may still grow"
    ahead.look()
    ahead.look()
    readings.begin(directory / WEIGHTS).result(10)
    commit(store, version, directory)
    inspect(store, version, None, readings)
    assert read[WEIGHTS] == 1


def test_a_file_that_was_read_too_early_is_read_again(store: MemoryVersionStore, read: Counter[str]) -> None:
    readings = Readings()
    ahead = ReadAhead(store, readings)
    version, directory = begin(store, 1.0)
    for _ in range(2):
        ahead.look()
    readings.begin(directory / WEIGHTS).result(10)
    write_safetensors(directory / WEIGHTS, {"w": floats(1.0, float("nan"))})
    commit(store, version, directory)
    with pytest.raises(RefusedVersionError, match="w holds NaN"):
        inspect(store, version, None, readings)
    assert read[WEIGHTS] == 2


def test_nothing_is_refused_on_a_reading_from_before(store: MemoryVersionStore, read: Counter[str]) -> None:
    """As through a cache of NFS: size and time are those of the whole file, the bytes are not."""
    readings, version = Readings(), publish(store)
    file = store.path(version) / WEIGHTS
    early = readings.begin(file)
    early.result(10)
    object.__setattr__(early.result(), "sha256", "0" * 64)
    assert [one.sha256 for one in readings.verify(store, version)][1] == read_file(file).sha256
    assert read[WEIGHTS] == 2


def test_a_damaged_file_is_found_by_one_reading(store: MemoryVersionStore, read: Counter[str]) -> None:
    version = publish(store)
    file = store.path(version) / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(IncompleteVersionError, match="sha256"):
        Readings().verify(store, version)
    assert read[WEIGHTS] == 1


def test_an_old_reading_does_not_count(store: MemoryVersionStore, read: Counter[str]) -> None:
    clock = Clock()
    readings, version = Readings(fresh_s=60.0, clock=clock), publish(store)
    for clock.now in (0.0, 60.0, 60.5):
        readings.verify(store, version)
    assert read[WEIGHTS] == 2


def test_a_disk_that_failed_once_is_asked_again(store: MemoryVersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    readings, version = Readings(), publish(store)

    def broken(file: Path) -> FileReading:
        raise OSError(5, "Input/output error", str(file))

    with monkeypatch.context() as patch:
        patch.setattr("services.weights.readings.read_file", broken)
        with pytest.raises(OSError, match="Input/output"):
            readings.verify(store, version)
    readings.verify(store, version)


def test_a_slow_writers_files_are_not_read_again_and_again(store: MemoryVersionStore, read: Counter[str]) -> None:
    readings = Readings()
    ahead = ReadAhead(store, readings)
    version, directory = begin(store, 0.0)
    for length in range(1, 6):
        write_safetensors(directory / WEIGHTS, {"w": floats(*range(length))})
        for _ in range(2):
            ahead.look()
        if length <= 2:
            readings.begin(directory / WEIGHTS).result(10)
    commit(store, version, directory)
    readings.verify(store, version)
    assert read[WEIGHTS] == 3, "two ahead, and the one that counts"


def test_a_version_that_is_given_up_is_no_error(store: MemoryVersionStore, read: Counter[str]) -> None:
    ahead = ReadAhead(store, Readings())
    begin(store, 1.0)
    ahead.look()
    store.roll_back([])
    ahead.look()
    assert not read


def test_a_version_that_goes_while_its_folder_is_listed_is_no_error(
    store: MemoryVersionStore, read: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone_meanwhile(folder: Path, _: str) -> Iterator[Path]:
        shutil.rmtree(folder)
        return map(Path, os.scandir(folder))

    begin(store, 1.0)
    monkeypatch.setattr(Path, "rglob", gone_meanwhile)
    ReadAhead(store, Readings()).look()
    assert not read


def test_who_asks_while_a_file_is_read_waits_for_that(
    store: MemoryVersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, times = threading.Event(), Counter[str]()

    def slow(file: Path) -> FileReading:
        times[file.name] += 1
        assert go.wait(10)
        return read_file(file)

    monkeypatch.setattr("services.weights.readings.read_file", slow)
    readings, version = Readings(), publish(store)
    file = store.path(version) / WEIGHTS
    first = readings.begin(file)
    assert readings.begin(file) is first
    go.set()
    first.result(10)
    assert times == {WEIGHTS: 1}
