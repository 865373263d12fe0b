"""Keeps `concurrency` episodes going under leases, and their trajectories flowing to ingest.

- A lease is held from its grant until its trajectory is durable, renewed in the background all the while; an
  episode whose lease is lost is cancelled, for somebody else may be playing it.
- No lease is taken while no engine is in rotation: its time would run out unused.
- A failed turn costs an attempt: the episode starts anew under the same lease, `ATTEMPTS` times at most.
- No lease is taken before what an earlier process spooled was offered once, nor while the spool is full: what is
  finished must reach ingest before more is begun.
- When asked to stop it takes no more leases, and gives what is in flight `drain_s` to be finished and published. What
  is finished by then and not published lies in the spool; the other leases run out. To be cancelled cuts that short.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from sao.endings import end
from sao.telemetry.health import Health
from sao.telemetry.logs import get_logger
from sao.v1 import ingest_pb2 as pb
from services.rollout import metrics
from services.rollout.engines.base import EngineError
from services.rollout.episode import EpisodeRunner, UnplayableError
from services.rollout.ingest_client import retry_after_s
from services.rollout.publisher import Publisher, PublishResult, again
from services.rollout.repeats import Repeats
from services.rollout.rotation import Rotation

if TYPE_CHECKING:
    from services.rollout.ingest_client import Stub

log = get_logger(__name__)

ATTEMPTS = 3
_FIRST_PAUSE_S = 0.25
_MOST_LEASES = 256
_ROTATION_WAIT_S = 0.5
_STORE_RETRY_S = 0.5
_SPOOL_RETRY_S = 0.1
_LEAST_PAUSE_S = 0.02


@dataclass
class _Held:
    lease: pb.PromptLease
    task: asyncio.Task[None] | None = None
    publishing: bool = False


class Worker:
    """One worker process's loop."""

    def __init__(
        self,
        worker_id: str,
        *,
        stub: Stub,
        runner: EpisodeRunner,
        rotation: Rotation,
        publisher: Publisher,
        health: Health,
        concurrency: int,
        renew_every_s: float,
        call_timeout_s: float,
        drain_s: float,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._worker_id = worker_id
        self._stub = stub
        self._runner = runner
        self._rotation = rotation
        self._publisher = publisher
        self._health = health
        self._concurrency = concurrency
        self._renew_every_s = renew_every_s
        self._call_timeout_s = call_timeout_s
        self._drain_s = drain_s
        self._metadata = metadata
        self._held: dict[str, _Held] = {}
        self._freed = asyncio.Event()
        self._failure: BaseException | None = None
        self._repeats = Repeats()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`. Raises what the last row of publisher.py's table says."""
        renewal = asyncio.create_task(self._keep_renewing())
        try:
            while not stop.is_set() and self._failure is None:
                if len(self._held) >= self._concurrency:
                    await self._wait(stop, None)
                elif why := self._publisher.hold:
                    self._rest(why)
                    await self._wait(stop, _SPOOL_RETRY_S)
                elif await self._rotation.serving(timeout_s=_ROTATION_WAIT_S):
                    await self._wait(stop, await self._admit())
                else:
                    self._rest("no engine in rotation")
            await self._drain()
        finally:
            await self._leave()
            await end([renewal])
            if renewal.done() and not renewal.cancelled():
                renewal.result()
        if self._failure is not None:
            raise self._failure

    async def _wait(self, stop: asyncio.Event, pause_s: float | None) -> None:
        """Until a slot is free or, when one is already, until `pause_s` is over; `stop` ends either."""
        if pause_s == 0:
            return
        waits = [asyncio.create_task(stop.wait())]
        if pause_s is None:
            waits.append(asyncio.create_task(self._freed.wait()))
        await asyncio.wait(waits, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._freed.clear()

    async def _admit(self) -> float:
        """Fill the free slots as far as ingest lets us; seconds until it is worth asking again."""
        wanted = min(self._concurrency - len(self._held), _MOST_LEASES)
        request = pb.LeasePromptsRequest(worker_id=self._worker_id, max_leases=wanted)
        try:
            response = await self._stub.LeasePrompts(request, timeout=self._call_timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if not again(error):
                raise
            log.warning("no leases", error=error.details())
            self._rest("ingest does not answer")
            return retry_after_s(error) or _STORE_RETRY_S
        metrics.LEASES.labels("granted").inc(len(response.leases))
        for lease in response.leases:
            held = _Held(lease)
            self._held[lease.lease_id] = held
            held.task = asyncio.create_task(self._keep(held))
        metrics.EPISODES_IN_FLIGHT.set(len(self._held))
        if response.leases:
            self._health.working("episodes")
        else:
            self._rest(pb.AdmissionState.Name(response.admission))
        return max(response.retry_after_ms / 1000, _LEAST_PAUSE_S) if len(self._held) < self._concurrency else 0.0

    def _rest(self, why: str) -> None:
        if not self._held:
            self._health.idle(why)

    async def _keep(self, held: _Held) -> None:
        """Play and publish one lease, and give its slot back whatever happens."""
        try:
            await self._play(held)
        except grpc.aio.AioRpcError as error:
            self._failure = error
        except Exception as error:
            log.exception("episode failed", lease=held.lease.lease_id, ordinal=held.lease.ordinal)
            self._failure = error
        finally:
            self._held.pop(held.lease.lease_id, None)
            metrics.EPISODES_IN_FLIGHT.set(len(self._held))
            self._freed.set()

    async def _play(self, held: _Held) -> None:
        lease = held.lease
        for number in range(ATTEMPTS):
            try:
                request = await self._runner.play(lease, lease.attempt + number)
            except EngineError as error:
                metrics.ATTEMPTS_FAILED.labels(error.kind).inc()
                log.warning("attempt failed", lease=lease.lease_id, ordinal=lease.ordinal, error=str(error))
                if number + 1 < ATTEMPTS:
                    await asyncio.sleep(_FIRST_PAUSE_S * 4**number)
                continue
            except UnplayableError:
                metrics.ATTEMPTS_FAILED.labels("unplayable").inc()
                log.exception("prompt can't be played", lease=lease.lease_id, ordinal=lease.ordinal)
                return
            self._repeats.see(request.trajectory)
            held.publishing = True
            result = await self._publisher.publish(request)
            if result is not PublishResult.DEAD:
                self._health.progress()
            return
        log.error("episode given up", lease=lease.lease_id, ordinal=lease.ordinal, attempts=ATTEMPTS)

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._renew_every_s)
            asked = list(self._held)
            if not asked:
                continue
            request = pb.RenewLeasesRequest(worker_id=self._worker_id, lease_ids=asked)
            try:
                response = await self._stub.RenewLeases(request, timeout=self._call_timeout_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                log.warning("leases not renewed", error=error.details(), leases=len(asked))
                continue
            self._lose(set(asked) - {lease.lease_id for lease in response.renewed})

    def _lose(self, lease_ids: set[str]) -> None:
        for lease_id in lease_ids:
            held = self._held.get(lease_id)
            # A published trajectory ends its lease, and publishing one whose lease ran out harms nobody.
            if held is None or held.publishing or held.task is None:
                continue
            metrics.LEASES.labels("lost").inc()
            log.warning("lease lost, episode cancelled", lease=lease_id, ordinal=held.lease.ordinal)
            held.task.cancel()

    async def _drain(self) -> None:
        """Let what is in flight be finished and published, for so long; not after something that ends the worker."""
        tasks = self._tasks()
        log.info("draining", episodes=len(tasks), drain_s=self._drain_s)
        deadline = time.monotonic() + self._drain_s
        while tasks and self._failure is None and (left_s := deadline - time.monotonic()) > 0:
            _, tasks = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def _leave(self) -> None:
        """Give up what is in flight; what is finished and not published goes to the spool."""
        tasks = self._tasks()
        await end(tasks)
        metrics.LEASES.labels("abandoned").inc(len(tasks))
        log.info("drained", abandoned=len(tasks))

    def _tasks(self) -> set[asyncio.Task[None]]:
        return {held.task for held in self._held.values() if held.task is not None}
