"""Checkpoint facts, trajectory folders, repeated completions."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from sao.board.memory import MemoryBoard
from sao.config import load_run_config
from sao.v1.ingest_pb2 import PublishRequest
from sao.weights.memory import MemoryVersionStore
from services.rollout.app import spool_folder
from services.rollout.checkpoint import first_checkpoint, vocabulary_size
from services.rollout.folder import TrajectoryFolder
from services.rollout.repeats import Repeats
from tests.support.trajectories import good


@pytest.mark.parametrize("config", [{"vocab_size": 320}, {"text_config": {"vocab_size": 320}}])
def test_the_vocabulary_is_the_embeddings_row_count(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocabulary_size(tmp_path) == 320


@pytest.mark.parametrize("config", [{}, {"vocab_size": 0}, {"vocab_size": "many"}])
def test_a_checkpoint_that_does_not_say_is_an_error(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="expected the embedding's row count"):
        vocabulary_size(tmp_path)


async def test_waiting_for_the_first_version_ends_when_the_service_is_stopped() -> None:
    stop = asyncio.Event()
    store = MemoryVersionStore()
    waiting = asyncio.create_task(first_checkpoint(store, MemoryBoard(), stop, poll_s=60))
    stop.set()
    assert await waiting is None


def test_a_folder_gives_back_what_was_put_oldest_first(tmp_path: Path) -> None:
    folder = TrajectoryFolder(tmp_path / "new")
    assert folder.ids() == []
    requests = [PublishRequest(trajectory=good(random.Random(n)), routed_experts=bytes([n])) for n in range(3)]
    for request in requests:
        folder.put(request)
    ids = [request.trajectory.id for request in requests]
    assert folder.ids() == sorted(ids)
    assert folder.get(ids[1]) == requests[1]
    folder.remove(ids[1])
    folder.remove(ids[1])
    assert len(folder.ids()) == 2
    assert not list((tmp_path / "new").glob("*.tmp"))


def test_a_completion_is_repeated_when_it_equals_the_one_before_for_the_same_prompt() -> None:
    repeats = Repeats(capacity=1)
    first, other = good(random.Random(0)), good(random.Random(1))
    assert [repeats.see(first), repeats.see(first), repeats.see(other), repeats.see(other)] == [
        False,
        True,
        False,
        True,
    ]
    other.prompt_id = "p1"
    assert not repeats.see(other)
    first.prompt_id = "p0"
    assert not repeats.see(first), "only the newest prompts are remembered"


@pytest.mark.parametrize(("sets", "parent"), [([], "runs/run/spool"), (['rollout.spool_dir="/spool"'], "/spool")])
def test_every_worker_has_a_spool_of_its_own(sets: list[str], parent: str) -> None:
    folders = {str(spool_folder(load_run_config(None, [*sets, f"rollout.worker_id={name}"], env={}))) for name in "ab"}
    assert folders == {f"{parent}/a", f"{parent}/b"}
