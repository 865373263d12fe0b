"""One network in one DeepSpeed engine, ZeRO stage 0 to 3, with gradients that accumulate one trajectory at a time.

DeepSpeed averages gradients over ranks and cannot be told a divisor before the step, so (docs/algorithm.md):
- `managed_gradient_accumulation` is off: the caller's `step` is the boundary, whatever came before it;
- losses go in as sums at loss scale 1; just before the step the scale becomes denominator / ranks, which the
  optimiser divides by, clipping included; afterwards it is 1 again (else the next loss would be multiplied);
- stage 0 has no loss scale: there the gradients are summed over ranks and divided here, and DeepSpeed only steps.

Weights and moments are reached through DeepSpeed's per-parameter accessors, whole and by name. Where it has none
(dropping a gradient, local copies) its own overflow path is followed.
"""
# ruff: noqa: SLF001 - the gradient buffers and flat partitions have no public names in DeepSpeed 0.19.8

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, distributed, nn

from services.trainer.backends.base import BackendError
from services.trainer.backends.role import (
    MOMENTS,
    OptimizerOptions,
    RoleState,
    TensorSnapshot,
    ensure_moments,
    new_adamw,
)

_LARGEST_BUCKET = 500_000_000
PERSISTENCE_THRESHOLD = 100_000
"""Elements below which ZeRO-3 keeps a parameter whole on every rank between uses (DeepSpeed's default)."""


def zero_config(module: nn.Module, stage: int, dtype: torch.dtype, gradient_clip: float) -> dict[str, Any]:
    """DeepSpeed's configuration of one engine; its bucket buffer no larger than the model."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    return {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": gradient_clip if stage > 0 else 0.0,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": min(numel, _LARGEST_BUCKET),
            "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True},
        "steps_per_print": 2**62,
    }


class ZeroRole:
    """A module, its client AdamW and the DeepSpeed engine around both."""

    def __init__(self, module: nn.Module, options: OptimizerOptions, stage: int, dtype: torch.dtype) -> None:
        if stage == 3:
            _differentiate_from_embeddings(module)
        optimizer = new_adamw(module, options)
        config = zero_config(module, stage, dtype, options.gradient_clip)
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self._stage = stage
        self._clip = options.gradient_clip
        self._adamw = optimizer if stage == 0 else self._engine.optimizer.optimizer
        if stage == 0:
            self._engine.enable_backward_allreduce = False  # `step` sums over the ranks, below
        self._snapshot: TensorSnapshot | None = None
        self.begin()

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._engine.module
        return module

    def __call__(self, *inputs: Tensor) -> Any:  # noqa: ANN401 - whatever the module's forward gives
        return self._engine(*inputs)

    def backward(self, loss_sum: Tensor) -> None:
        self._engine.backward(loss_sum, scale_wrt_gas=False)

    def begin(self) -> None:
        optimizer = self._engine.optimizer
        if self._stage == 0:
            self._engine.zero_grad()
            return
        optimizer.zero_grad(set_to_none=True)
        if self._stage == 3:
            optimizer.averaged_gradients = {}
        else:
            optimizer._release_preflattened_grad_buffers()
            optimizer.averaged_gradients.clear()
            optimizer.all_grad_tensors.clear()
            optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        optimizer.override_loss_scale(1.0)

    def step(self, denominator: float) -> float:
        if self._stage == 0:
            return self._step_unpartitioned(denominator)
        optimizer = self._engine.optimizer
        optimizer.override_loss_scale(denominator / distributed.get_world_size())
        self._engine.step()
        optimizer.override_loss_scale(1.0)
        # An overflowing step leaves the weights alone and reports infinity.
        return float(self._engine.get_global_grad_norm())

    def _step_unpartitioned(self, denominator: float) -> float:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if distributed.get_world_size() > 1:
                distributed.all_reduce(parameter.grad)
            parameter.grad.div_(denominator)
        norm = float(nn.utils.clip_grad_norm_(trained, self._clip))
        if math.isfinite(norm):
            self._engine.step()
        else:
            self._engine.zero_grad()
        return norm

    def set_lr(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr

    def snapshot(self) -> None:
        self._snapshot = TensorSnapshot(self._adamw, self._stepped_tensors())

    def restore(self) -> None:
        if self._snapshot is None:
            msg = "restore without a snapshot: call snapshot first"
            raise BackendError(msg)
        self._snapshot.restore()
        self._publish_stepped_tensors()

    def module_state(self) -> dict[str, Tensor]:
        tensors = {}
        for name, parameter in self.module.named_parameters():
            with self._gathered(parameter):
                tensors[name] = parameter.detach().cpu().clone()
        return tensors

    def state(self) -> RoleState:
        self._ensure_moments()
        weights = self.module_state()
        moments: dict[str, dict[str, Tensor]] = {key: {} for key in MOMENTS}
        for name, parameter in self._trained():
            if self._stage == 0:
                for key in MOMENTS:
                    moments[key][name] = self._adamw.state[parameter][key].detach().cpu().clone()
                continue
            weights[name] = safe_get_full_fp32_param(parameter).detach().cpu().clone()
            for key in MOMENTS:
                moments[key][name] = safe_get_full_optimizer_state(parameter, key).detach().cpu().clone()
        step = self._adamw.state[self._stepped_tensors()[0]]["step"]
        return RoleState(weights, moments, int(step))

    @torch.no_grad()
    def load_state(self, state: RoleState) -> None:
        self.begin()
        self._ensure_moments()
        for name, parameter in self.module.named_parameters():
            with self._gathered(parameter, modifier_rank=0):
                parameter.copy_(state.weights[name])
        for name, parameter in self._trained():
            if self._stage > 0:
                self._set_master(parameter, state.weights[name])
            for key in MOMENTS:
                self._set_moment(parameter, key, state.moments[key][name])
        for tensor in self._stepped_tensors():
            self._adamw.state[tensor]["step"].fill_(state.step)
        self._publish_stepped_tensors()

    def shapes(self) -> dict[str, tuple[torch.Size, bool]]:
        return {
            name: (getattr(parameter, "ds_shape", parameter.shape), parameter.requires_grad)
            for name, parameter in self.module.named_parameters()
        }

    def close(self) -> None:
        self._engine.destroy()

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def _stepped_tensors(self) -> list[Tensor]:
        """What AdamW steps on this rank: the parameters themselves, or flat float32 partitions of them."""
        if self._stage == 0:
            return [parameter for _, parameter in self._trained()]
        if self._stage == 3:
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return list(self._engine.optimizer.single_partition_of_fp32_groups)

    def _ensure_moments(self) -> None:
        for tensor in self._stepped_tensors():
            ensure_moments(self._adamw, tensor)
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _publish_stepped_tensors(self) -> None:
        """Copy the stepped partitions into the module's parameters, as the end of DeepSpeed's step does."""
        optimizer = self._engine.optimizer
        if self._stage in (1, 2):
            optimizer.update_lp_params()
        elif self._stage == 3:
            for group in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def _set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        if self._stage == 3:
            safe_set_local_fp32_param(parameter, _local_part(parameter, value))
        else:
            safe_set_full_fp32_param(parameter, value.to(parameter.device))

    def _set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        if self._stage == 0:
            self._adamw.state[parameter][key].copy_(value)
        elif self._stage == 3:
            safe_set_local_optimizer_state(parameter, _local_part(parameter, value), key)
        else:
            safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)

    @contextmanager
    def _gathered(self, parameter: nn.Parameter, modifier_rank: int | None = None) -> Iterator[None]:
        if self._stage < 3:
            yield
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=modifier_rank):
            yield


def _differentiate_from_embeddings(module: nn.Module) -> None:
    """Let every layer's input require a gradient, also above a frozen embedding.

    ZeRO-3 of DeepSpeed 0.19.8 partitions a module's parameters again before their gradients are taken where none of
    its inputs requires one (found: "size of tensor a (0) must match" with embeddings, attention and norms frozen).
    """
    for submodule in module.modules():
        if isinstance(submodule, nn.Embedding):
            submodule.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())


def _local_part(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """The share of this rank in a whole tensor, padded as ZeRO-3 pads its partitions (the full setter does not pad)."""
    partition: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    flat = value.flatten().to(partition.device)
    padding = partition.numel() * distributed.get_world_size() - flat.numel()
    return nn.functional.pad(flat, (0, padding)).narrow(
        0, partition.numel() * distributed.get_rank(), partition.numel()
    )
