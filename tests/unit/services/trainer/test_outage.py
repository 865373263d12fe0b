"""A store that is away or full is waited for, with a limit."""

from __future__ import annotations

import pytest

from sao.streams.base import StreamError, StreamFullError, StreamUnavailableError
from services.trainer.outage import ride_out


@pytest.mark.parametrize("error", [StreamUnavailableError("away"), StreamFullError("full")], ids=repr)
async def test_a_call_is_repeated_until_the_store_takes_it_and_not_for_ever(error: StreamError) -> None:
    answers: list[StreamError | str] = [error, error, "done"]

    async def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, StreamError):
            raise answer
        return answer

    assert await ride_out(call) == "done"

    answers[:] = [error, "too late"]
    with pytest.raises(type(error)):
        await ride_out(call, give_up_after_s=0.0)
    assert answers == ["too late"]
