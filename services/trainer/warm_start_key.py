"""The cache name of a warm start: a hash of everything that shaped it. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from pathlib import Path

from sao.config.schema import RunConfig
from sao.tasks import load_task

_RECIPES = ("warm_start.py", "tiny_model.py")


def warm_start_key(config: RunConfig) -> str:
    """16 hex digits that change with the task's code, the model's shape, the seed, the settings or the recipe."""
    task = load_task(config.task.name)
    source = sys.modules[type(task).__module__].__file__
    if source is None:
        msg = f"task {config.task.name!r} has no source file: a warm start cannot be cached for it"
        raise ValueError(msg)
    folder = Path(__file__).parent
    tokenizer = importlib.import_module("sao.tasks.tiny_tokenizer").__file__
    files = [Path(source), *(folder / name for name in _RECIPES), Path(str(tokenizer))]
    shape = {
        "task": config.task.name,
        "seed": config.run.seed,
        "model": config.model.model_dump(mode="json"),
        "warm_start": config.warm_start.model_dump(mode="json"),
        "sources": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


def warm_start_path(config: RunConfig) -> Path:
    """Where the warm start of this run is cached, whether it exists yet or not."""
    return config.run.cache_dir.expanduser() / "warm-start" / warm_start_key(config)


def warm_start_cached(config: RunConfig) -> bool:
    """Whether the warm start is there, whole (its folder appears by rename, files complete)."""
    return (warm_start_path(config) / "config.json").exists()


def initial_model_path(config: RunConfig) -> Path:
    """The checkpoint directory of the initial policy: `model.path`, or the cached warm start."""
    return config.model.path.expanduser() if config.model.path is not None else warm_start_path(config)
