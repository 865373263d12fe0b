"""The engine boundary of the weights service, on the in-memory twin and on a real SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from services.weights.engines.base import (
    EngineControl,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    PauseMode,
)
from services.weights.engines.memory import MemoryEngine
from services.weights.engines.releases import TESTED, is_tested
from services.weights.engines.sglang import SGLangEngine

IDS = [1, 5, 9, 7, 3, 8, 11, 4]
DEADLINE_S = 20.0
SHORT_S = 0.5


@pytest.fixture(params=["memory", pytest.param("sglang", marks=pytest.mark.engine)])
def url(request: pytest.FixtureRequest) -> str:
    """Empty for the twin."""
    if request.param == "memory":
        return ""
    found: str = request.getfixturevalue("sglang_engine").url
    return found


@pytest.fixture
async def engine(url: str, tiny_checkpoints: tuple[Path, Path]) -> AsyncIterator[EngineControl]:
    """At seed 0 before and after each test."""
    made: EngineControl = (
        SGLangEngine("engine-0", url, deadline_s=DEADLINE_S) if url else MemoryEngine("engine-0", tiny_checkpoints[0])
    )
    await made.resume()
    yield made
    with suppress(EngineError):
        await made.pause()
        await made.load(tiny_checkpoints[0], "initial")
        await made.resume()
    await made.close()


async def update(engine: EngineControl, path: Path, version: str) -> None:
    await engine.pause()
    await engine.load(path, version)
    await engine.resume()


async def test_an_update_changes_what_is_served(engine: EngineControl, tiny_checkpoints: tuple[Path, Path]) -> None:
    seed0, seed1 = tiny_checkpoints
    await update(engine, seed0, "a")
    sums0, scores0 = await engine.checksums(), await engine.score([IDS])
    await update(engine, seed1, "b")
    sums1, scores1 = await engine.checksums(), await engine.score([IDS])
    assert (await engine.model_info()).weight_version == "b"
    assert sums0.keys() == sums1.keys()
    assert sums0 != sums1
    assert max(abs(x - y) for x, y in zip(scores0[0], scores1[0], strict=True)) > 0.01
    await update(engine, seed0, "c")
    assert await engine.checksums() == sums0
    assert (await engine.score([IDS]))[0] == pytest.approx(scores0[0], abs=1e-5)


async def test_scores_are_one_log_prob_for_each_token_but_the_first(engine: EngineControl) -> None:
    short, long = await engine.score([IDS[:2], IDS])
    assert (len(short), len(long)) == (1, len(IDS) - 1)
    assert all(value < 0 for value in long)
    assert short[0] == pytest.approx(long[0], abs=1e-5)


async def test_a_prompt_is_cached_until_the_update(engine: EngineControl, tiny_checkpoints: tuple[Path, Path]) -> None:
    await update(engine, tiny_checkpoints[0], "a")
    assert (await engine.generate_one(IDS)).cached_tokens == 0
    assert (await engine.generate_one(IDS)).cached_tokens == len(IDS) - 1
    await update(engine, tiny_checkpoints[1], "b")
    token = await engine.generate_one(IDS)
    assert (token.cached_tokens, token.version) == (0, "b")
    scored = (await engine.score([[*IDS, token.token_id]]))[0][-1]
    assert token.logprob == pytest.approx(scored, abs=1e-5)


async def test_a_load_that_does_not_flush_leaves_the_cache_and_another_salt_reads_none_of_it(
    engine: EngineControl, tiny_checkpoints: tuple[Path, Path]
) -> None:
    await update(engine, tiny_checkpoints[0], "a")
    old = await engine.generate_one(IDS, salt="a")
    await engine.pause(PauseMode.IN_PLACE)
    await engine.load(tiny_checkpoints[1], "b", flush=False)
    await engine.resume()
    token = await engine.generate_one(IDS, salt="b")
    assert (old.cached_tokens, token.cached_tokens, token.version) == (0, 0, "b")
    scored = (await engine.score([[*IDS, token.token_id]]))[0][-1]
    assert token.logprob == pytest.approx(scored, abs=1e-5)
    stale = await engine.generate_one(IDS, salt="a")
    assert stale.cached_tokens == len(IDS) - 1, "why each version needs a salt of its own"


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_an_engine_goes_on_after_each_kind_of_pause(engine: EngineControl, mode: PauseMode) -> None:
    await engine.pause(mode)
    await engine.resume()
    assert (await engine.generate_one(IDS)).logprob < 0


async def test_it_says_its_release_also_while_paused(engine: EngineControl) -> None:
    assert is_tested("engine-0", await engine.server_release())
    await engine.pause()
    assert await engine.server_release() == TESTED


async def test_flush_empties_the_cache(engine: EngineControl) -> None:
    await engine.generate_one(IDS)
    await engine.pause()
    await engine.flush()
    await engine.resume()
    assert (await engine.generate_one(IDS)).cached_tokens == 0


async def test_scoring_does_not_fill_the_cache_of_generation(engine: EngineControl) -> None:
    await engine.pause()
    await engine.flush()
    await engine.resume()
    await engine.score([[*IDS, 2]])
    assert (await engine.generate_one(IDS)).cached_tokens == 0


async def test_pause_and_resume_may_be_repeated(engine: EngineControl) -> None:
    await engine.pause()
    await engine.pause()
    await engine.resume()
    await engine.resume()
    assert len((await engine.score([IDS]))[0]) == len(IDS) - 1


async def test_while_paused_scoring_waits_and_control_answers(engine: EngineControl) -> None:
    await engine.pause()
    waiting = asyncio.ensure_future(engine.score([IDS]))
    await engine.checksums()
    await engine.model_info()
    assert not waiting.done()
    await engine.resume()
    assert len((await waiting)[0]) == len(IDS) - 1


async def test_a_call_while_paused_ends_at_the_deadline(
    engine: EngineControl, url: str, tiny_checkpoints: tuple[Path, Path]
) -> None:
    if url:
        hasty: EngineControl = SGLangEngine("engine-0", url, deadline_s=SHORT_S)
    else:
        hasty = MemoryEngine("engine-0", tiny_checkpoints[0], deadline_s=SHORT_S)
    await hasty.pause()
    with pytest.raises(EngineUnreachableError, match="engine-0"):
        await hasty.generate_one(IDS)
    await hasty.resume()
    await hasty.close()


async def test_a_missing_path_is_refused_and_the_old_weights_stay(engine: EngineControl, tmp_path: Path) -> None:
    before = await engine.checksums()
    await engine.pause()
    with pytest.raises(EngineRefusedError) as caught:
        await engine.load(tmp_path / "nothing", "x")
    await engine.resume()
    assert caught.value.status == 400
    assert await engine.checksums() == before


async def test_half_a_checkpoint_is_taken_without_a_word(
    engine: EngineControl, tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """Why preflight and canary exist: the twin must fool a round the way the real one does."""
    from safetensors.torch import load_file, save_file

    await update(engine, tiny_checkpoints[0], "a")
    before = await engine.checksums()
    tensors = load_file(tiny_checkpoints[1] / "model.safetensors")
    half = {name: tensor for name, tensor in tensors.items() if "experts" not in name}
    half["model.layers.0.mlp.experts.gate_up_proj"] = tensors["lm_head.weight"].clone()
    (tmp_path / "config.json").write_bytes((tiny_checkpoints[1] / "config.json").read_bytes())
    save_file(half, tmp_path / "model.safetensors", metadata={"format": "pt"})
    await update(engine, tmp_path, "half")
    after = await engine.checksums()
    assert (await engine.model_info()).weight_version == "half"
    changed = {name for name in before if before[name] != after[name]}
    assert changed
    assert changed != set(before)
