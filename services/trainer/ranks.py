"""One algorithm on any number of data-parallel ranks: rank 0 decides, the others repeat its calls.

Every call of the backend is collective. `Ranks` runs on rank 0 and announces each call as JSON plus safetensors
bytes (no pickle) before making it; `follow` makes the same calls on the other ranks. On one rank nothing is sent.
A micro-step hands each rank one trajectory; ranks without one accumulate a dummy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch import distributed as dist

from services.trainer.backends.base import TrainingBackend
from services.trainer.core.update import TrajectoryStats, TrajectoryTensors, Update, UpdateStats


class Call(Enum):
    BEGIN = "begin"
    ACCUMULATE = "accumulate"
    FINISH = "finish"
    EVALUATE = "evaluate"
    POLICY_STATE = "policy_state"
    SAVE = "save"
    LOAD = "load"
    HEARTBEAT = "heartbeat"
    """Nothing; keeps the followers' collective from timing out while the trainer starves."""
    STOP = "stop"


class _Performer:
    """Makes one announced call on this rank."""

    def __init__(self, backend: TrainingBackend, update: Update) -> None:
        self.backend = backend
        self.update = update

    def perform(self, call: Call, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
        match call:
            case Call.BEGIN:
                self.backend.set_lr(arguments["policy_lr"], arguments["critic_lr"])
                self.update.begin(critic_only=arguments["critic_only"])
            case Call.ACCUMULATE:
                self.update.accumulate(_share(tensors, self.backend.rank))
            case Call.FINISH:
                return _gathered(self.update.finish(), self.backend)
            case Call.EVALUATE:
                return [self._logprobs(ids) for ids in arguments["sequences"]]
            case Call.POLICY_STATE:
                return self.backend.policy_state()
            case Call.SAVE:
                self.backend.save(Path(arguments["directory"]))
                self.backend.sum_over_ranks([0.0])  # rank 0 seals the directory: not before every rank has written
            case Call.LOAD:
                self.backend.load(Path(arguments["directory"]))
            case Call.HEARTBEAT | Call.STOP:
                pass
        return None

    def _logprobs(self, ids: Sequence[int]) -> list[float]:
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.backend.device)
        values: list[float] = self.backend.policy_evaluate(tokens).logp_T[1:].float().cpu().tolist()
        return values


class Ranks:
    """The algorithm as rank 0 drives it."""

    def __init__(self, backend: TrainingBackend, update: Update) -> None:
        self._performer = _Performer(backend, update)
        self._backend = backend

    @property
    def count(self) -> int:
        """Data-parallel ranks: the most trajectories of one micro-step."""
        return self._backend.world_size

    def begin(self, *, policy_lr: float, critic_lr: float, critic_only: bool) -> None:
        """Start an update with these learning rates."""
        self._call(Call.BEGIN, {"policy_lr": policy_lr, "critic_lr": critic_lr, "critic_only": critic_only})

    def accumulate(self, trajectories: Sequence[TrajectoryTensors]) -> None:
        """One micro-step: at least one trajectory, at most one for each rank."""
        tensors: dict[str, Tensor] = {}
        for rank, trajectory in enumerate(trajectories):
            tensors[f"{rank}.tokens"] = trajectory.tokens_T
            tensors[f"{rank}.mask"] = trajectory.action_mask_T
            tensors[f"{rank}.logp"] = trajectory.logp_rollout_T
            tensors[f"{rank}.lag"] = trajectory.lag_T
            if trajectory.routes_TLK is not None:
                tensors[f"{rank}.routes"] = trajectory.routes_TLK
            advantage = math.nan if trajectory.advantage is None else trajectory.advantage
            numbers = [trajectory.reward, advantage, float(trajectory.copies)]
            tensors[f"{rank}.numbers"] = torch.tensor(numbers, dtype=torch.float64)
        self._call(Call.ACCUMULATE, tensors=tensors)

    def finish(self) -> UpdateStats:
        """The optimiser steps; trajectories in the order of accumulation, metrics of rank 0's share."""
        stats: UpdateStats = self._call(Call.FINISH)
        return stats

    def recall(self, values: Sequence[float], reward: float) -> None:
        """A trajectory of an earlier life, for rank 0's metrics; nothing is sent."""
        self._performer.update.recall(values, reward)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The policy's log-prob of ids[i+1] given ids[:i+1], float32."""
        values: list[list[float]] = self._call(Call.EVALUATE, {"sequences": [list(ids) for ids in sequences]})
        return values

    def policy_state(self) -> dict[str, Tensor]:
        """The policy's tensors by module name, on the CPU."""
        state: dict[str, Tensor] = self._call(Call.POLICY_STATE)
        return state

    def save(self, directory: Path) -> None:
        """Write the backend's state; every rank must see this directory."""
        self._call(Call.SAVE, {"directory": str(directory)})

    def load(self, directory: Path) -> None:
        """Continue from what `save` wrote."""
        self._call(Call.LOAD, {"directory": str(directory)})

    def heartbeat(self) -> None:
        """Tell the followers that nothing is to be done yet."""
        if self.count > 1:
            self._call(Call.HEARTBEAT)

    def stop(self) -> None:
        """Let the followers return."""
        self._call(Call.STOP)

    def _call(
        self, call: Call, arguments: Mapping[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> Any:  # noqa: ANN401
        if self.count > 1:
            _broadcast(json.dumps([call.value, arguments or {}]).encode(), self._backend.device)
            _broadcast(save(dict(tensors or {})), self._backend.device)
        return self._performer.perform(call, arguments or {}, tensors or {})


def follow(backend: TrainingBackend, update: Update) -> None:
    """Ranks above 0: repeat rank 0's calls until it stops."""
    performer = _Performer(backend, update)
    while True:
        name, arguments = json.loads(_broadcast(None, backend.device))
        tensors = load(_broadcast(None, backend.device))
        call = Call(name)
        performer.perform(call, arguments, tensors)
        if call is Call.STOP:
            return


def _share(tensors: Mapping[str, Tensor], rank: int) -> TrajectoryTensors:
    if f"{rank}.tokens" not in tensors:
        return TrajectoryTensors.dummy()
    reward, advantage, copies = tensors[f"{rank}.numbers"].tolist()
    return TrajectoryTensors(
        tokens_T=tensors[f"{rank}.tokens"],
        action_mask_T=tensors[f"{rank}.mask"],
        logp_rollout_T=tensors[f"{rank}.logp"],
        lag_T=tensors[f"{rank}.lag"],
        reward=reward,
        advantage=None if math.isnan(advantage) else advantage,
        copies=int(copies),
        routes_TLK=tensors.get(f"{rank}.routes"),
    )


def _broadcast(payload: bytes | None, device: torch.device) -> bytes:
    """From rank 0, which passes bytes, to all, who pass None; the bytes on every rank."""
    size = torch.tensor([len(payload) if payload is not None else 0], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    if payload is None:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    else:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    dist.broadcast(data, src=0)
    return bytes(data.cpu().numpy())


def _gathered(stats: UpdateStats, backend: TrainingBackend) -> UpdateStats:
    """The same stats with every rank's trajectories, in the order of accumulation: micro-step by micro-step."""
    if backend.world_size == 1:
        return stats
    flat = torch.cat([torch.zeros(0, dtype=torch.float64), *(_flattened(t) for t in stats.trajectories)])
    sizes = [torch.zeros(1, dtype=torch.int64, device=backend.device) for _ in range(backend.world_size)]
    dist.all_gather(sizes, torch.tensor([len(flat)], dtype=torch.int64, device=backend.device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.float64)
    padded[: len(flat)] = flat
    parts = [torch.zeros(longest, dtype=torch.float64, device=backend.device) for _ in sizes]
    dist.all_gather(parts, padded.to(backend.device))
    shares = [_unflattened(part[: int(size)].cpu()) for part, size in zip(parts, sizes, strict=True)]
    ordered = [share[step] for step in range(len(shares[0])) for share in shares if step < len(share)]
    return replace(stats, trajectories=ordered)


_FIELDS = ("values_A", "advantages_A", "returns_A", "ratios_A", "weights_A")


def _flattened(stats: TrajectoryStats) -> Tensor:
    columns = [getattr(stats, name).double() for name in _FIELDS]
    head = torch.tensor([stats.reward, stats.lag, *map(len, columns)], dtype=torch.float64)
    return torch.cat([head, *columns])


def _unflattened(flat: Tensor) -> list[TrajectoryStats]:
    found: list[TrajectoryStats] = []
    while len(flat):
        reward, lag, *sizes = flat[: 2 + len(_FIELDS)].tolist()
        rest = flat[2 + len(_FIELDS) :]
        columns = []
        for size in map(int, sizes):
            columns.append(rest[:size].float())
            rest = rest[size:]
        found.append(TrajectoryStats(reward, int(lag), *columns))
        flat = rest
    return found
