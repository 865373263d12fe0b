"""The version store's contract, on the file system and in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.weights.base import (
    IncompleteVersionError,
    NoSpaceError,
    StaleWriterError,
    UnknownVersionError,
    VersionStore,
    VersionStoreError,
)
from sao.weights.checkpoint import sha256_of
from sao.weights.filesystem import FileSystemVersionStore
from sao.weights.memory import MemoryVersionStore
from tests.support.versions import floats, manifest_for, publish, write_safetensors


def _file_system(root: Path) -> VersionStore:
    return FileSystemVersionStore(root, min_free_bytes=0)


def _memory(_root: Path) -> VersionStore:
    return MemoryVersionStore()


MakeStore = Callable[[Path], VersionStore]
STORES = [pytest.param(_file_system, id="filesystem"), pytest.param(_memory, id="memory")]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> VersionStore:
    made: VersionStore = request.param(tmp_path / "versions")
    return made


def test_a_committed_version_reads_back(store: VersionStore) -> None:
    _, directory = store.allocate()
    assert list(directory.iterdir()) == []
    published = publish(store, 2.5)
    manifest = store.manifest(published)
    assert [tensor.name for tensor in manifest.tensors] == ["w"]
    assert store.path(published).is_absolute()
    assert (store.path(published) / "model.safetensors").stat().st_size == manifest.files[1].size
    store.verify(published)


def test_what_is_being_written_can_be_read_ahead_and_stays_the_same_file(store: VersionStore) -> None:
    assert store.staged() == []
    version, directory = store.allocate()
    write_safetensors(directory / "model.safetensors", {"w": floats(1.0)})
    assert store.staged() == [directory]
    before = (directory / "model.safetensors").stat()
    after = (store.commit(manifest_for(version, directory), directory) / "model.safetensors").stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert store.staged() == []


def test_a_caller_may_say_what_a_files_checksum_is(store: VersionStore) -> None:
    asked: list[str] = []

    def checksum(file: Path) -> str:
        asked.append(file.name)
        return sha256_of(file) if file.name == "config.json" else "0" * 64

    version = publish(store)
    with pytest.raises(IncompleteVersionError, match=r"model\.safetensors has sha256 000"):
        store.verify(version, checksum)
    assert asked == ["config.json", "model.safetensors"]


def test_a_half_written_version_is_invisible(store: VersionStore) -> None:
    version, directory = store.allocate()
    (directory / "model.safetensors").write_bytes(b"half")
    assert store.names() == []
    for reader in (store.path, store.manifest, store.verify):
        with pytest.raises(UnknownVersionError, match=version):
            reader(version)
    with pytest.raises(UnknownVersionError):
        store.lease(version, "engine-0")


def test_names_rise_and_are_never_given_twice(store: VersionStore) -> None:
    first, _ = store.allocate()
    second = publish(store)
    assert second > first
    store.collect(1)
    third, _ = store.allocate()
    assert third > second


def test_concurrent_allocators_never_share_a_name(tmp_path: Path) -> None:
    stores = [_file_system(tmp_path) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(lambda one: [one.allocate()[0] for _ in range(25)], stores))
    names = [name for batch in batches for name in batch]
    assert len(set(names)) == 100
    assert all(batch == sorted(batch) for batch in batches)


def test_concurrent_threads_of_one_store_never_share_a_name(store: VersionStore) -> None:
    with ThreadPoolExecutor(4) as pool:
        names = list(pool.map(lambda _: store.allocate()[0], range(60)))
    assert len(set(names)) == 60


def test_a_name_taken_before_a_crash_is_not_given_again(tmp_path: Path) -> None:
    crashed, _ = _file_system(tmp_path).allocate()
    after, _ = _file_system(tmp_path).allocate()
    assert after > crashed


def test_commit_refuses_files_the_manifest_does_not_describe(store: VersionStore) -> None:
    version, directory = store.allocate()
    (directory / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    published = publish(store)
    manifest = store.manifest(published).model_copy(update={"version": version})
    with pytest.raises(IncompleteVersionError, match=r"config\.json"):
        store.commit(manifest, directory)
    assert store.names() == [published]


def test_commit_refuses_a_directory_it_did_not_allocate(store: VersionStore, tmp_path: Path) -> None:
    version, directory = store.allocate()
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "model.bin").write_bytes(b"x")
    published = publish(store)
    manifest = store.manifest(published).model_copy(update={"version": version})
    with pytest.raises(VersionStoreError, match="alloc"):
        store.commit(manifest, other)
    assert directory.is_dir()


def test_a_version_is_committed_once(store: VersionStore) -> None:
    version = publish(store)
    with pytest.raises(VersionStoreError, match=version):
        store.commit(store.manifest(version), store.path(version))


def test_an_overtaken_trainer_commits_nothing(store: VersionStore) -> None:
    newer = publish(store, epoch=2)
    with pytest.raises(StaleWriterError, match="epoch 1"):
        publish(store, epoch=1)
    assert store.names() == [newer]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "add"])
def test_verify_finds_every_kind_of_damage(store: VersionStore, damage: str) -> None:
    version = publish(store)
    file = store.path(version) / "model.safetensors"
    data = file.read_bytes()
    if damage == "flip":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "truncate":
        file.write_bytes(data[:-1])
    elif damage == "remove":
        file.unlink()
    else:
        (file.parent / "model-extra.safetensors").write_bytes(data)
    with pytest.raises(IncompleteVersionError, match="model"):
        store.verify(version)


def test_too_little_space_refuses_before_a_name_is_taken(tmp_path: Path) -> None:
    for full in (
        FileSystemVersionStore(tmp_path, min_free_bytes=1 << 60),
        MemoryVersionStore(min_free_bytes=2, free_bytes=1),
    ):
        with pytest.raises(NoSpaceError, match="needs"):
            full.allocate()
    assert list((tmp_path / "names").iterdir()) == []


def test_a_leased_version_outlives_collection_until_released(store: VersionStore) -> None:
    old, middle, new = publish(store), publish(store), publish(store)
    store.lease(old, "engine-0")
    assert store.collect(1) == [middle]
    store.verify(old)
    assert store.leases() == {"engine-0": old}
    store.lease(new, "engine-0")
    assert store.collect(1) == [old]
    store.release("engine-0")
    store.release("engine-0")
    assert store.leases() == {}
    assert store.names() == [new]


def test_collect_refuses_to_remove_the_newest(store: VersionStore) -> None:
    publish(store)
    with pytest.raises(ValueError, match="at least 1"):
        store.collect(0)


def test_a_lease_survives_the_process_that_took_it(tmp_path: Path) -> None:
    first = _file_system(tmp_path)
    old = publish(first)
    first.lease(old, "engine-0")
    second = _file_system(tmp_path)
    publish(second)
    assert second.collect(1) == []
    assert second.leases() == {"engine-0": old}


def test_an_abandoned_staging_directory_is_collected(tmp_path: Path) -> None:
    store = FileSystemVersionStore(tmp_path, min_free_bytes=0, abandoned_after_s=-1.0)
    _, directory = store.allocate()
    store.collect(1)
    assert not directory.exists()


def test_an_unreadable_manifest_is_an_incomplete_version(tmp_path: Path) -> None:
    store = _file_system(tmp_path)
    version = publish(store)
    (store.path(version) / "manifest.json").write_text('{"version": 3}')
    with pytest.raises(IncompleteVersionError, match=version):
        store.manifest(version)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.just(0)),
        st.tuples(st.just("abandon"), st.just(0)),
        st.tuples(st.just("lease"), st.integers(0, 2)),
        st.tuples(st.just("release"), st.integers(0, 2)),
        st.tuples(st.just("collect"), st.integers(1, 3)),
    ),
    max_size=25,
)


@pytest.mark.parametrize("make", STORES)
@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_laws_of_any_history(make: MakeStore, steps: list[tuple[str, int]]) -> None:
    """Names rise; visible = committed - collected; leased and newest always survive; everything visible verifies."""
    with tempfile.TemporaryDirectory() as root:
        store = make(Path(root))
        given_names: list[str] = []
        visible: list[str] = []
        leases: dict[str, str] = {}
        for step, number in steps:
            if step == "publish":
                given_names.append(publish(store, float(number)))
                visible.append(given_names[-1])
            elif step == "abandon":
                given_names.append(store.allocate()[0])
            elif step == "lease" and visible:
                leases[f"engine-{number}"] = visible[number % len(visible)]
                store.lease(leases[f"engine-{number}"], f"engine-{number}")
            elif step == "release":
                leases.pop(f"engine-{number}", None)
                store.release(f"engine-{number}")
            elif step == "collect":
                expected = [name for name in visible[:-number] if name not in leases.values()]
                assert store.collect(number) == expected
                visible = [name for name in visible if name not in expected]
            assert given_names == sorted(set(given_names))
            assert store.names() == visible
            assert store.leases() == leases
        for version in visible:
            store.verify(version)
            manifest = store.manifest(version)
            assert manifest == manifest_for(version, store.path(version))


def test_an_interrupted_publication_is_rolled_back_and_its_names_are_not_used_again(store: VersionStore) -> None:
    announced = [publish(store, 1.0), publish(store, 2.0)]
    orphan = publish(store, 3.0)
    staged, directory = store.allocate()
    (directory / "model.safetensors").write_bytes(b"half")

    assert store.roll_back(announced) == [orphan, staged]

    assert store.names() == announced
    assert not directory.exists()
    assert store.roll_back(announced) == []
    assert publish(store, 4.0) > staged


def test_a_roll_back_leaves_what_is_in_use_and_what_a_lost_board_does_not_know(store: VersionStore) -> None:
    first, leased, orphan = publish(store, 1.0), publish(store, 2.0), publish(store, 3.0)
    store.lease(leased, "engine-0")
    assert store.roll_back([]) == []
    assert store.roll_back([first]) == [orphan]
    assert store.names() == [first, leased]
    store.verify(leased)
