"""Which engine the next turn runs on, and when a finished turn may be believed."""

from __future__ import annotations

import asyncio

import pytest

from sao.board.base import EngineFacts, EngineState
from sao.board.memory import MemoryBoard
from sao.streams.base import StreamUnavailableError
from services.rollout import metrics
from services.rollout.engines.base import Engine, EngineUnavailableError
from services.rollout.engines.memory import MemoryEngine
from services.rollout.rotation import NoEngineError, Rotation, UnverifiedVersionError
from tests.support.rollout_worker import memory_engines, write_engine
from tests.support.trajectories import VERSIONS


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def rotation(*states: EngineState) -> tuple[Rotation, MemoryBoard, Clock]:
    board, clock = MemoryBoard(), Clock()
    for index, state in enumerate(states):
        await write_engine(board, f"engine-{index}", state)
    made = Rotation(board, memory_engines(len(states)), clock=clock)
    await made.refresh()
    return made, board, clock


async def chosen(made: Rotation, prefer: str | None = None) -> str:
    async with made.turn(timeout_s=1, prefer=prefer) as engine:
        return engine.engine_id


@pytest.mark.parametrize("state", [state for state in EngineState if state is not EngineState.SERVING])
async def test_only_a_serving_engine_gets_turns(state: EngineState) -> None:
    made, _, _ = await rotation(state)
    with pytest.raises(NoEngineError, match=state.value):
        async with made.turn(timeout_s=0.01):
            pass


async def test_the_least_loaded_engine_is_chosen_and_the_preferred_one_before_it() -> None:
    made, board, _ = await rotation(EngineState.SERVING, EngineState.SERVING)
    async with made.turn(timeout_s=1) as first:
        assert first.engine_id == "engine-0"
        assert await chosen(made) == "engine-1"
        assert await chosen(made, prefer="engine-0") == "engine-0"
        await write_engine(board, "engine-0", EngineState.QUIESCING)
        await made.refresh()
        assert await chosen(made, prefer="engine-0") == "engine-1"


async def test_what_an_engine_serves_is_never_what_it_is_only_loading() -> None:
    made, board, _ = await rotation(EngineState.SERVING)
    assert made.served("engine-0") == VERSIONS[0]
    facts = (await board.engines())["engine-0"]
    await board.write_engine(facts.model_copy(update={"state": EngineState.QUIESCING, "version": VERSIONS[1]}))
    await made.refresh()
    assert made.served("engine-0") == VERSIONS[0]
    await board.write_engine(facts.model_copy(update={"version": VERSIONS[1]}))
    await made.refresh()
    assert made.served("engine-0") == VERSIONS[1]


async def test_an_engine_that_failed_a_turn_is_the_last_choice_for_a_while() -> None:
    made, board, clock = await rotation(EngineState.SERVING, EngineState.SERVING)
    with pytest.raises(EngineUnavailableError):
        async with made.turn(timeout_s=1) as engine:
            raise EngineUnavailableError(engine.engine_id, "connection refused")
    assert await chosen(made, prefer="engine-0") == "engine-1"
    await write_engine(board, "engine-1", EngineState.LOADING)
    await made.refresh()
    assert await chosen(made) == "engine-0", "better than none"
    await write_engine(board, "engine-1")
    await made.refresh()
    clock.now += 5
    assert await chosen(made) == "engine-0"


async def test_an_engine_of_another_run_file_is_ignored() -> None:
    made, board, _ = await rotation(EngineState.LOADING)
    await write_engine(board, "engine-9")
    await made.refresh()
    with pytest.raises(NoEngineError):
        async with made.turn(timeout_s=0.01):
            pass


async def test_a_waiting_turn_starts_when_an_engine_comes_into_rotation() -> None:
    made, board, _ = await rotation(EngineState.VERIFYING)
    waiting = asyncio.create_task(chosen(made))
    await asyncio.sleep(0)
    assert not waiting.done()
    await write_engine(board, "engine-0")
    await made.refresh()
    assert await waiting == "engine-0"


async def test_a_verified_version_is_believed_at_once_and_stays_so() -> None:
    made, board, _ = await rotation(EngineState.SERVING)
    await made.verified("engine-0", [VERSIONS[0]], timeout_s=0)
    await write_engine(board, "engine-0", EngineState.LOADING, verified=[], version=VERSIONS[1])
    await made.refresh()
    await made.verified("engine-0", [VERSIONS[0]], timeout_s=0.01)


ROUND = [EngineState.QUIESCING, EngineState.QUIESCED, EngineState.LOADING, EngineState.VERIFYING]


@pytest.mark.parametrize("state", ROUND)
async def test_a_version_that_an_engine_is_brought_to_anew_is_not_believed_for_having_passed_before(
    state: EngineState,
) -> None:
    """A roll-back loads a version again, and the load may go wrong this time."""
    made, board, _ = await rotation(EngineState.SERVING)
    await write_engine(board, "engine-0", state)  # the worker has not looked since
    with pytest.raises(UnverifiedVersionError, match=f"'{VERSIONS[0]}'. were not sure"):
        await made.verified("engine-0", VERSIONS[:1], timeout_s=0.01)
    waiting = asyncio.create_task(made.verified("engine-0", VERSIONS[:1], timeout_s=60))
    await asyncio.sleep(0)
    await write_engine(board, "engine-0")
    await made.refresh()
    await waiting


async def test_a_turn_is_believed_on_what_the_board_says_after_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    made, board, clock = await rotation(EngineState.SERVING)
    clock.now += 1

    async def away() -> dict[str, EngineFacts]:
        msg = "no answer within 5 s"
        raise StreamUnavailableError(msg)

    with monkeypatch.context() as patch:
        patch.setattr(board, "engines", away)
        waiting = asyncio.create_task(made.verified("engine-0", VERSIONS[:1], timeout_s=60))
        await asyncio.sleep(0)
        assert not waiting.done()
    await made.refresh()
    await waiting


async def test_an_answer_that_was_overtaken_is_not_news(monkeypatch: pytest.MonkeyPatch) -> None:
    made, board, clock = await rotation(EngineState.SERVING)
    old, asked, go_on = await board.engines(), asyncio.Event(), asyncio.Event()

    async def late() -> dict[str, EngineFacts]:
        asked.set()
        await go_on.wait()
        return old

    with monkeypatch.context() as patch:
        patch.setattr(board, "engines", late)
        slow = asyncio.create_task(made.refresh())
        await asked.wait()
    clock.now += 1
    await write_engine(board, "engine-0", EngineState.LOADING)
    await made.refresh()
    go_on.set()
    await slow
    assert not await made.serving(timeout_s=0)


async def test_a_quarantined_engine_is_not_believed_about_a_verified_version() -> None:
    """A failed load may leave the old label on weights that are no version at all."""
    made, board, _ = await rotation(EngineState.SERVING)
    await write_engine(board, "engine-0", EngineState.QUARANTINED)
    await made.refresh()
    with pytest.raises(UnverifiedVersionError, match="quarantined"):
        await made.verified("engine-0", [VERSIONS[0]], timeout_s=60)


async def test_a_version_verified_elsewhere_is_not_verified_here() -> None:
    made, board, _ = await rotation(EngineState.SERVING, EngineState.SERVING)
    await write_engine(board, "engine-1", verified=VERSIONS[:2])
    await made.refresh()
    with pytest.raises(UnverifiedVersionError, match=VERSIONS[1]):
        await made.verified("engine-0", VERSIONS[:2], timeout_s=0.01)


async def test_a_quarantine_ends_the_wait_at_once() -> None:
    made, board, _ = await rotation(EngineState.VERIFYING)
    waiting = asyncio.create_task(made.verified("engine-0", [VERSIONS[2]], timeout_s=60))
    await asyncio.sleep(0)
    await write_engine(board, "engine-0", EngineState.QUARANTINED)
    await made.refresh()
    with pytest.raises(UnverifiedVersionError, match="quarantined"):
        await waiting


async def test_idle_time_is_counted_only_while_no_turn_runs() -> None:
    made, _, clock = await rotation(EngineState.SERVING)
    counter = metrics.ENGINE_IDLE.labels("engine-0")
    before = counter._value.get()
    clock.now += 3
    async with made.turn(timeout_s=1):
        clock.now += 50
        await made.refresh()
    clock.now += 2
    await made.refresh()
    assert counter._value.get() - before == pytest.approx(5)


class Connections:
    """Clients that are made and closed as the board says."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.closed: list[str] = []

    def __call__(self, facts: EngineFacts) -> Engine:
        self.made.append(facts.engine_id)
        connections = self

        class Closing(MemoryEngine):
            async def close(self) -> None:
                connections.closed.append(self.engine_id)

        return Closing(facts.engine_id, 32)


async def test_engines_that_join_are_taken_and_those_that_leave_are_let_go_after_their_last_turn() -> None:
    board, connections = MemoryBoard(), Connections()
    made = Rotation(board, {}, connect=connections)
    await made.refresh()
    assert not await made.serving(timeout_s=0)
    await write_engine(board, "engine-10-0-0-6", EngineState.STARTING)
    await write_engine(board, "engine-10-0-0-5", EngineState.STARTING)
    await made.refresh()
    assert not await made.serving(timeout_s=0), "it is on the board before it is in rotation"
    await write_engine(board, "engine-10-0-0-5")
    await made.refresh()
    async with made.turn(timeout_s=1) as engine:
        assert engine.engine_id == "engine-10-0-0-5"
        await board.remove_engine("engine-10-0-0-5")
        await made.refresh()
        assert not await made.serving(timeout_s=0)
        assert connections.closed == [], "its turn is not over"
    await made.refresh()
    assert connections.closed == ["engine-10-0-0-5"]
    await made.verified("engine-10-0-0-5", VERSIONS[:1], timeout_s=1)


async def test_another_engine_under_the_same_name_has_verified_nothing() -> None:
    board, connections = MemoryBoard(), Connections()
    made = Rotation(board, {}, connect=connections)
    await write_engine(board, "engine-10-0-0-5")
    await made.refresh()
    await board.remove_engine("engine-10-0-0-5")
    await made.refresh()
    await write_engine(board, "engine-10-0-0-5", EngineState.STARTING, verified=())
    await made.refresh()
    assert connections.made == ["engine-10-0-0-5"] * 2
    with pytest.raises(UnverifiedVersionError):
        await made.verified("engine-10-0-0-5", VERSIONS[:1], timeout_s=0.01)


async def test_closing_lets_every_engine_go() -> None:
    board, connections = MemoryBoard(), Connections()
    made = Rotation(board, {}, connect=connections)
    for name in ("engine-a", "engine-b"):
        await write_engine(board, name)
    await made.refresh()
    await made.close()
    assert sorted(connections.closed) == ["engine-a", "engine-b"]


async def test_a_turn_that_crossed_a_doubt_is_not_believed_though_its_version_is_proven_again() -> None:
    made, board, _ = await rotation(EngineState.SERVING)
    facts = (await board.engines())["engine-0"]
    before = made.doubted("engine-0")
    await board.write_engine(facts.model_copy(update={"state": EngineState.QUARANTINED, "doubted_s": before + 1}))
    await board.write_engine(facts.model_copy(update={"doubted_s": before + 1}))

    with pytest.raises(UnverifiedVersionError, match="is quarantined, or was while the turn ran"):
        await made.verified("engine-0", VERSIONS[:1], timeout_s=60, doubted=before)

    await made.verified("engine-0", VERSIONS[:1], timeout_s=60, doubted=made.doubted("engine-0"))


async def test_a_turn_that_ends_under_weights_nobody_has_checked_waits_whatever_label_it_bears() -> None:
    """An engine may load and keep its old label: that is one of the things its round looks at."""
    made, board, _ = await rotation(EngineState.SERVING)
    await write_engine(board, "engine-0", EngineState.VERIFYING, version=VERSIONS[1])
    with pytest.raises(UnverifiedVersionError, match="were not sure"):
        await made.verified("engine-0", VERSIONS[:1], timeout_s=0.01)
    waiting = asyncio.create_task(made.verified("engine-0", VERSIONS[:1], timeout_s=60))
    await asyncio.sleep(0)
    await write_engine(board, "engine-0", EngineState.QUARANTINED, version=VERSIONS[1])
    await made.refresh()
    with pytest.raises(UnverifiedVersionError, match="quarantined"):
        await waiting


async def test_an_emptied_board_makes_nobody_believe_a_turn() -> None:
    made, board, _ = await rotation(EngineState.SERVING)
    before = made.doubted("engine-0")
    facts = (await board.engines())["engine-0"]
    await board.remove_engine("engine-0")
    waiting = asyncio.create_task(made.verified("engine-0", VERSIONS[:1], timeout_s=60, doubted=before))
    await asyncio.sleep(0)
    await made.refresh()
    assert not waiting.done()
    await board.write_engine(facts.model_copy(update={"state": EngineState.QUARANTINED, "doubted_s": before + 1}))
    await made.refresh()
    with pytest.raises(UnverifiedVersionError, match="quarantined"):
        await waiting


@pytest.mark.parametrize("state", [EngineState.QUARANTINED, EngineState.LOADING, EngineState.SERVING])
async def test_an_engine_that_left_in_doubt_is_not_believed(state: EngineState) -> None:
    board, connections = MemoryBoard(), Connections()
    made = Rotation(board, {}, connect=connections)
    for name in ("engine-a", "engine-b"):
        await write_engine(board, name)
    await made.refresh()
    before, facts = made.doubted("engine-a"), (await board.engines())["engine-a"]
    await board.write_engine(facts.model_copy(update={"state": state, "doubted_s": before + 1}))
    await made.refresh()
    await board.remove_engine("engine-a")
    with pytest.raises(UnverifiedVersionError, match="left"):
        await made.verified("engine-a", VERSIONS[:1], timeout_s=60, doubted=before)


async def test_engines_that_leave_together_are_let_go_once_though_the_board_is_read_twice() -> None:
    board, closed = MemoryBoard(), asyncio.Event()

    class SlowToClose(MemoryEngine):
        async def close(self) -> None:
            await closed.wait()

    made = Rotation(board, {}, connect=lambda facts: SlowToClose(facts.engine_id, 32))
    for name in ("engine-a", "engine-b"):
        await write_engine(board, name)
    await made.refresh()
    for name in ("engine-a", "engine-b"):
        await board.remove_engine(name)
    reads = [asyncio.create_task(made.refresh()) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    closed.set()
    await asyncio.gather(*reads)
