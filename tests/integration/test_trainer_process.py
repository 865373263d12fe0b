"""The trainer as it is deployed: its own process, DeepSpeed, a real Valkey; scored trajectories in, versions out."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import tomli_w

import sao.board
import sao.streams
from sao.board.base import TrainerState
from sao.config.schema import RunConfig
from sao.rows import read_rows
from sao.weights.filesystem import FileSystemVersionStore
from services.trainer import metrics
from tests.support.processes import free_port, wait_until
from tests.support.training import PREFERENCE, World


def process_of(path: Path) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    command = [sys.executable, "-m", "services.trainer", "--config", str(path)]
    with (path.parent / "trainer.log").open("ab") as output:
        return subprocess.Popen(command, env=environment | {"OMP_NUM_THREADS": "1"}, stderr=output, stdout=output)


@pytest.mark.timeout(300)
async def test_a_trainer_process_trains_stops_resumes_and_finishes(
    run_config: RunConfig, tiny_checkpoints: tuple[Path, Path]
) -> None:
    port = free_port()
    trainer = run_config.trainer.model_copy(
        update={"trajectories_per_update": 2, "max_lag": 50, "metrics_port": port, "kl_coef": 0.02}
    )
    config = run_config.model_copy(
        update={
            "model": run_config.model.model_copy(update={"path": tiny_checkpoints[0]}),
            "run": run_config.run.model_copy(update={"updates": 4}),
            "trainer": trainer,
            "critic": run_config.critic.model_copy(update={"pretrain_trajectories": 0, "warmup_updates": 1}),
        }
    )
    config.run.dir.mkdir(parents=True)
    path = config.run.dir / "run.toml"
    shape = {"hidden_size", "layers", "experts", "experts_per_token"}
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude={"model": shape})))
    world = World(config, tiny_checkpoints[0], streams=sao.streams.connect(config), board=sao.board.connect(config))
    await world.board.put_preference(PREFERENCE)
    rows = config.run.dir / "updates.jsonl"

    first = process_of(path)
    try:
        await world.deliver_many(6)  # one warm-up update, two of the policy
        wait_until(lambda: len(list(read_rows(rows))) == 3, timeout_s=120, what="three updates")
        async with httpx.AsyncClient() as client:
            scrape = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=60) == 0
    finally:
        first.kill()
    served = set(re.findall(r"^# TYPE (sao_trainer_\w+)", scrape, re.MULTILINE))
    documented = {metric._name for metric in vars(metrics).values() if hasattr(metric, "_documentation")}
    assert {name.removesuffix("_total") for name in documented} <= {name.removesuffix("_total") for name in served}
    assert (await world.streams.unconsumed()) == 0

    second = process_of(path)
    try:
        await world.deliver_many(4)
        assert second.wait(timeout=120) == 0, (config.run.dir / "trainer.log").read_text()[-3000:]
    finally:
        second.kill()
    facts = await world.board.trainer()
    assert facts is not None
    assert (facts.update, facts.consumed, facts.state, facts.epoch) == (4, 10, TrainerState.FINISHED, 2)
    found = [row for row, _ in read_rows(rows)]
    assert [(row.update, row.critic_only) for row in found] == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
        (4, False),
    ]
    ids = [t.id for row in found for t in row.trajectories]
    assert len(ids) == len(set(ids)) == 10
    store = FileSystemVersionStore(config.versions_dir, 0)
    store.verify(facts.version)
    assert store.manifest(facts.version).update == 4

    third = process_of(path)
    try:
        assert third.wait(timeout=60) == 0
    finally:
        third.kill()
    await world.streams.close()
    await world.board.close()
