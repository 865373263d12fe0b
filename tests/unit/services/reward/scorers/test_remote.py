"""Calls over HTTP: what is repeated, how often, when, and what the end says."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from email.utils import formatdate

import pytest

from bench.judge.server import Asked, Breakage, LoopbackServer, Reply
from sao.config import ConfigError, load_run_config
from sao.tasks.base import UnscorableError
from services.reward import metrics
from services.reward.scorers.base import DeadlinePassedError, ScorerFailedError
from services.reward.scorers.remote import MAX_ANSWER_BYTES, RemoteCalls, RemoteSettings
from tests.support.processes import free_port
from tests.support.waiting import eventually

GOOD = Reply(body=b'{"fine": true}')


class Script:
    """Answers one after the other, the last one again and again; remembers what was asked, and when."""

    def __init__(self, *answers: Reply | Breakage) -> None:
        self._answers = list(answers)
        self.asked: list[Asked] = []
        self.at_s: list[float] = []

    async def __call__(self, asked: Asked) -> Reply | Breakage:
        self.asked.append(asked)
        self.at_s.append(time.monotonic())
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


@contextlib.asynccontextmanager
async def calling(
    script: Callable[[Asked], Awaitable[Reply | Breakage]],
    *,
    retries: int = 2,
    backoff_s: float = 0.01,
    deadline_s: float = 5.0,
    token: str | None = None,
) -> AsyncIterator[RemoteCalls]:
    async with LoopbackServer(script) as server:
        token_env = "JUDGE_TOKEN" if token is not None else None
        settings = RemoteSettings("critic", f"{server.url}/score", token_env, deadline_s, 4, retries, backoff_s)
        calls = RemoteCalls(settings, environment={"JUDGE_TOKEN": token or ""}, jitter=lambda: 0.0)
        try:
            yield calls
        finally:
            await calls.close()


async def post(calls: RemoteCalls) -> object:
    return await calls.post(lambda: {"text": "möwe"}, trajectory_id="t-1")


@pytest.mark.parametrize(
    "failure", [Reply(429), *map(Reply, (500, 502, 503, 504)), Breakage.RESET], ids=["429", *"5555", "reset"]
)
async def test_what_may_pass_is_repeated_until_it_does(failure: Reply | Breakage) -> None:
    script = Script(failure, failure, GOOD)
    async with calling(script) as calls:
        assert await post(calls) == {"fine": True}
    assert len(script.asked) == 3
    assert {asked.body for asked in script.asked} == {'{"text": "möwe"}'.encode()}
    assert {asked.headers["x-request-id"] for asked in script.asked} == {"t-1"}


async def test_repeats_are_counted_by_what_they_met() -> None:
    counter = metrics.SCORER_RETRIES.labels("critic", "503")
    before = counter._value.get()
    async with calling(Script(Reply(503), Reply(503), GOOD)) as calls:
        await post(calls)
    assert counter._value.get() == before + 2


async def test_they_end_at_their_number_with_what_the_last_one_met() -> None:
    script = Script(Reply(500, b"one"), Reply(503, b"two"))
    async with calling(script, retries=1) as calls:
        with pytest.raises(ScorerFailedError, match=r"answers 503: two \(try 2, the last\)"):
            await post(calls)
    assert len(script.asked) == 2


@pytest.mark.parametrize("status", [301, 400, 401, 404])
async def test_what_would_not_pass_is_not_repeated(status: int) -> None:
    script = Script(Reply(status, b"no such thing", {"Location": "http://127.0.0.1:1/"}), GOOD)
    async with calling(script) as calls:
        with pytest.raises(ScorerFailedError, match=f"answers {status}: no such thing"):
            await post(calls)
    assert len(script.asked) == 1


async def test_422_is_about_the_trajectory() -> None:
    async with calling(Script(Reply(422, b"it is empty"))) as calls:
        with pytest.raises(UnscorableError, match="it is empty"):
            await post(calls)


async def test_pauses_double() -> None:
    script = Script(Reply(503), Reply(503), Reply(503), GOOD)
    async with calling(script, retries=3, backoff_s=0.1) as calls:
        await post(calls)
    pauses = [after - before for before, after in zip(script.at_s, script.at_s[1:], strict=False)]
    for pause, least in zip(pauses, (0.05, 0.1, 0.2), strict=True):
        assert pause >= least - 0.005


async def test_retry_after_is_honoured() -> None:
    script = Script(Reply(429, headers={"Retry-After": "1"}), GOOD)
    async with calling(script) as calls:
        await post(calls)
    assert script.at_s[1] - script.at_s[0] >= 1.0 - 0.005


@pytest.mark.parametrize("retry_after", ["60", formatdate(time.time() + 3600, usegmt=True)], ids=["seconds", "date"])
async def test_a_repeat_that_the_deadline_does_not_allow_is_not_waited_for(retry_after: str) -> None:
    script = Script(Reply(429, b"later", {"Retry-After": retry_after}))
    began_s = time.monotonic()
    async with calling(script, deadline_s=4.0) as calls:
        with pytest.raises(ScorerFailedError, match="answers 429: later"):
            await post(calls)
    assert time.monotonic() - began_s < 3
    assert len(script.asked) == 1


@pytest.mark.parametrize("retry_after", ["soon", "-5", "1e9", ""])
async def test_a_retry_after_that_cannot_be_read_is_left_out(retry_after: str) -> None:
    script = Script(Reply(503, headers={"Retry-After": retry_after}), GOOD)
    async with calling(script) as calls:
        assert await post(calls) == {"fine": True}


async def test_the_deadline_holds_over_all_repeats() -> None:
    async def slow(_: Asked) -> Reply | Breakage:
        return Breakage.HANG

    async with calling(slow, deadline_s=0.1) as calls:
        with pytest.raises(DeadlinePassedError, match=r"critic is still running after 0\.1 s"):
            await post(calls)


async def test_nobody_there_is_a_failure_that_names_the_url() -> None:
    url = f"http://127.0.0.1:{free_port()}/score"
    calls = RemoteCalls(RemoteSettings("critic", url, None, 5.0, 4, 1, 0.01))
    with pytest.raises(ScorerFailedError, match=rf"{url}: ConnectError.*try 2"):
        await post(calls)
    await calls.close()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": {"b": 1, "b": 0}}'],
    ids=["empty", "cut", "bytes", "deep", "twice"],
)
async def test_what_is_no_json_is_a_failure(body: bytes) -> None:
    script = Script(Reply(body=body), GOOD)
    async with calling(script) as calls:
        with pytest.raises(ScorerFailedError, match="no JSON"):
            await post(calls)
    assert len(script.asked) == 1


async def test_an_answer_without_end_is_cut() -> None:
    async with calling(Script(Reply(body=b" " * (MAX_ANSWER_BYTES + 1)))) as calls:
        with pytest.raises(ScorerFailedError, match="more than"):
            await post(calls)


async def test_a_compressed_answer_is_not_unpacked() -> None:
    bomb = Reply(body=gzip.compress(b" " * 2**20), headers={"Content-Encoding": "gzip"})
    script = Script(bomb)
    async with calling(script) as calls:
        with pytest.raises(ScorerFailedError, match="Content-Encoding 'gzip'"):
            await post(calls)
    assert script.asked[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("answer", [Reply(400, b"no"), Reply(503, b"no"), Reply(body=b"no"), Breakage.RESET], ids=str)
async def test_no_error_shows_what_stands_in_the_query(answer: Reply | Breakage) -> None:
    script = Script(answer)
    async with LoopbackServer(script) as server:
        calls = RemoteCalls(RemoteSettings("critic", f"{server.url}/score?key=s3cret", None, 5.0, 4, 0, 0.01))
        with pytest.raises(ScorerFailedError, match="/score") as caught:
            await post(calls)
        await calls.close()
    assert "s3cret" not in str(caught.value)
    assert script.asked[0].path == "/score?key=s3cret"


@pytest.mark.parametrize(
    "url", ["http://ada:s3cret@judge/v1", "http://ada@judge/", "http://judge:99999/", "http://[::1/", "http:///v1"]
)
def test_a_url_that_cannot_be_called_or_holds_a_secret_is_refused_with_its_key(url: str) -> None:
    overrides = ["reward.scorers.tone.kind=http", f'reward.scorers.tone.url="{url}"']
    overrides.append('reward.scorers.tone.components.tone="How friendly"')
    with pytest.raises(ConfigError, match=r"reward\.scorers\.tone\.(http\.)?url") as caught:
        load_run_config(None, overrides, env={})
    assert "s3cret" not in str(caught.value)


async def test_the_token_of_the_environment_is_sent() -> None:
    script = Script(GOOD)
    async with calling(script, token="s3cret") as calls:
        await post(calls)
    assert script.asked[0].headers["authorization"] == "Bearer s3cret"


@pytest.mark.parametrize("environment", [{}, {"JUDGE_TOKEN": ""}, {"JUDGE_TOKEN": "a\nb"}], ids=repr)
def test_a_token_that_is_not_there_ends_the_start_with_the_key(environment: dict[str, str]) -> None:
    settings = RemoteSettings("critic", "http://x/", "JUDGE_TOKEN", 5.0, 4, 0, 0.1)
    with pytest.raises(ConfigError, match=r"reward\.scorers\.critic\.token_env: .*JUDGE_TOKEN"):
        RemoteCalls(settings, environment=environment)


async def test_an_id_that_is_no_header_is_left_out() -> None:
    script = Script(GOOD)
    async with calling(script) as calls:
        await calls.post(dict, trajectory_id="a\r\nX-Evil: 1")
    assert "x-request-id" not in script.asked[0].headers
    assert "x-evil" not in script.asked[0].headers


async def test_a_text_that_cannot_be_made_is_the_callers_error() -> None:
    def body() -> object:
        msg = "no such token"
        raise KeyError(msg)

    async with calling(Script(GOOD)) as calls:
        with pytest.raises(KeyError):
            await calls.post(body, trajectory_id="t")


async def test_a_slow_call_holds_up_no_other() -> None:
    first = True

    async def slow_once(_: Asked) -> Reply | Breakage:
        nonlocal first
        if first:
            first = False
            return Breakage.HANG
        return GOOD

    async with calling(slow_once, deadline_s=1.0) as calls:
        slow = asyncio.ensure_future(post(calls))
        await eventually(lambda: not first, what="the slow call to be taken")
        assert await asyncio.gather(*(post(calls) for _ in range(20))) == [{"fine": True}] * 20
        assert not slow.done()
        with pytest.raises(DeadlinePassedError):
            await slow
