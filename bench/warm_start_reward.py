"""Mean reward of a warm start at temperature 1, without an engine: `python bench/warm_start_reward.py CHECKPOINT`.

Whole batches are re-evaluated for every token (no cache), which is enough for a few hundred short episodes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from sao.ids import uuid7
from sao.tasks import load_task
from sao.tasks.base import Episode
from sao.tasks.prompt_files import load_prompts, prompt_for
from sao.tokenizer import FileTokenizer
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb


class Rollout:
    """One episode under way."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.ids = list(episode.prompt_token_ids)
        self.action: list[int] = []
        self.segments: list[pb.Segment] = []
        self.done = False

    def feed(self, token: int, max_new_tokens: int, max_turns: int) -> None:
        """One sampled token; ends the turn where it is a stop token or the turn is full."""
        self.ids.append(token)
        self.action.append(token)
        if token not in self.episode.stop_token_ids and len(self.action) < max_new_tokens:
            return
        observation = self.episode.observe(self.action)
        self.segments.append(pb.Segment(kind=pb.SEGMENT_KIND_ACTION, token_ids=self.action))
        if observation.token_ids:
            self.segments.append(pb.Segment(kind=pb.SEGMENT_KIND_OBSERVATION, token_ids=observation.token_ids))
        self.ids += observation.token_ids
        self.action = []
        actions = sum(segment.kind == pb.SEGMENT_KIND_ACTION for segment in self.segments)
        self.done = observation.done or actions >= max_turns

    def trajectory(self, task: str) -> Trajectory:
        """What a worker would have recorded, without log-probs."""
        payload = json.dumps(dict(self.episode.task_payload))
        return Trajectory(
            pb.Trajectory(
                id=uuid7(),
                task=task,
                prompt_token_ids=self.episode.prompt_token_ids,
                segments=self.segments,
                finish_reason=pb.FINISH_REASON_STOP,
                task_payload_json=payload,
            )
        )


@torch.no_grad()
def mean_reward(checkpoint: Path, task_name: str, episodes: int, seed: int = 0) -> float:
    """Reward of `episodes` sampled episodes under the task's default preference."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    task, tokenizer = load_task(task_name), FileTokenizer(checkpoint / "tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    prompts = load_prompts(task.prompts_path)
    rollouts = [Rollout(task.episode(prompt_for(prompts, i, seed), tokenizer)) for i in range(episodes)]
    while active := [rollout for rollout in rollouts if not rollout.done]:
        longest = max(len(rollout.ids) for rollout in active)
        ids = torch.tensor([rollout.ids + [0] * (longest - len(rollout.ids)) for rollout in active])
        logits = model(input_ids=ids, use_cache=False).logits
        last = logits[torch.arange(len(active)), [len(rollout.ids) - 1 for rollout in active]]
        tokens = torch.multinomial(last.float().softmax(-1), 1, generator=generator)[:, 0].tolist()
        for rollout, token in zip(active, tokens, strict=True):
            rollout.feed(token, max_new_tokens=24, max_turns=4)
    preference = task.default_preference
    rewards = [preference.value(task.score(rollout.trajectory(task.name), tokenizer)) for rollout in rollouts]
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--task", default="calculator")
    parser.add_argument("--episodes", type=int, default=256)
    arguments = parser.parse_args()
    print(f"mean reward {mean_reward(arguments.checkpoint, arguments.task, arguments.episodes):.3f}")
