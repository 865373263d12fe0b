"""The real backend: policy and critic in a DeepSpeed engine each, on one rank or several, on CPU or CUDA."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import deepspeed.comm
import deepspeed.ops
import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils import logger as deepspeed_logger
from torch import distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from sao.config.schema import RunConfig, TrainerSection
from services.trainer.backends.paired import PairedBackend, optimizer_options
from services.trainer.backends.zero import ZeroRole, zero_config
from services.trainer.models import CriticModule, PolicyModule


def choose_device(trainer: TrainerSection, local_rank: int = 0) -> torch.device:
    """`trainer.device`, `auto` being CUDA where there is one; ValueError when it is asked for and missing."""
    available = torch.cuda.is_available()
    if trainer.device == "cuda" and not available:
        msg = "trainer.device is cuda, but torch finds none: use auto or cpu"
        raise ValueError(msg)
    if trainer.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def choose_dtype(trainer: TrainerSection, device: torch.device) -> torch.dtype:
    """`trainer.dtype`, `auto` being bfloat16 on CUDA where a ZeRO stage keeps float32 masters, else float32.

    ValueError for bfloat16 at stage 0: at a learning rate of 1e-6 most steps round to nothing without masters.
    """
    if trainer.dtype == "bfloat16" and trainer.zero_stage == 0:
        msg = "trainer.dtype bfloat16 needs float32 master weights, which trainer.zero_stage 0 lacks: use stage 1"
        raise ValueError(msg)
    if trainer.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" and trainer.zero_stage > 0 else torch.float32
    return torch.bfloat16 if trainer.dtype == "bfloat16" else torch.float32


class DeepSpeedBackend(PairedBackend):
    """Policy, critic and, with a KL term, the reference, all from the checkpoint directory of the initial policy.

    Several ranks find each other by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them;
    one rank needs no port. A process holds one backend at a time.
    """

    def __init__(self, config: RunConfig, policy_dir: Path) -> None:
        trainer, critic = config.trainer, config.critic
        device = _prepare_process(trainer)
        dtype = choose_dtype(trainer, device)
        stage, chunk = trainer.zero_stage, trainer.logprob_chunk
        policy = PolicyModule.load(policy_dir, dtype, chunk, replay=trainer.routing_replay, frozen=trainer.frozen)
        super().__init__(
            policy=ZeroRole(policy, optimizer_options(trainer, trainer.policy_lr), stage, dtype),
            critic=ZeroRole(
                CriticModule.load(policy_dir, dtype, critic.frozen), optimizer_options(trainer, critic.lr), stage, dtype
            )
            if config.algorithm.has_critic
            else None,
            reference=_reference(PolicyModule.load(policy_dir, dtype, chunk), stage, dtype, device)
            if trainer.kl_coef > 0
            else None,
            device=device,
        )

    @property
    def rank(self) -> int:
        return distributed.get_rank()

    @property
    def world_size(self) -> int:
        return distributed.get_world_size()

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            distributed.all_reduce(total)
        return [float(value) for value in total]

    def close(self) -> None:
        for role in self._roles.values():
            if isinstance(role, ZeroRole):
                role.close()
        deepspeed.comm.destroy_process_group()


def _prepare_process(trainer: TrainerSection) -> torch.device:
    """Threads, environment, process group and the two things DeepSpeed would otherwise compile."""
    device = choose_device(trainer, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cpu":
        set_accelerator(CPU_Accelerator())  # else DeepSpeed takes a GPU that the run file did not ask for
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # two spinning threads beside a busy engine cost ten times what they bring
        # Else the first process group compiles a shared-memory extension for over a minute; gloo serves as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        torch.cuda.set_device(device)
    deepspeed_logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*all_gather_into_tensor.*")
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*reduce_scatter_tensor.*")
    _join_process_group(trainer.ranks, "nccl" if device.type == "cuda" else "gloo")
    return device


def _join_process_group(ranks: int, transport: str) -> None:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != ranks:
        msg = f"WORLD_SIZE is {started}, but trainer.ranks is {ranks}: start one process per rank"
        raise ValueError(msg)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed's engine reads it, also of a single process
    if not distributed.is_initialized():
        if ranks == 1:
            distributed.init_process_group(transport, store=HashStore(), rank=0, world_size=1)
        else:
            distributed.init_process_group(transport)
    deepspeed.init_distributed(transport, verbose=False)


def _reference(module: PolicyModule, stage: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The frozen initial policy; partitioned like the others where the stage partitions parameters."""
    module.requires_grad_(False)
    if stage < 3:
        return module.to(device)
    engine, *_ = deepspeed.initialize(model=module, config=zero_config(module, stage, dtype, 0.0))
    wrapped: nn.Module = engine
    return wrapped
