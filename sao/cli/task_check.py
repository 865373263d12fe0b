"""What only the task can tell of a run file: whether it exists, its prompts, and the components it computes."""

from __future__ import annotations

from sao.config import ConfigError, RunConfig
from sao.tasks import TaskLoadError, load_task


def refuse_unusable_task(config: RunConfig) -> str | None:
    """ConfigError when the run file and its task do not fit.

    A task of the user's own that cannot be imported here is no error, it may be elsewhere: the answer then says why.
    """
    prompts = config.task.prompts
    if prompts is not None and not prompts.is_file():
        raise ConfigError(key="task.prompts", message=f"no such file: {prompts}")
    try:
        task = load_task(config.task.name)
    except TaskLoadError as error:
        if ":" in config.task.name:
            return str(error)
        raise ConfigError(key="task.name", message=str(error)) from error
    for name, scorer in config.reward.scorers.items():
        if twice := sorted(task.components & scorer.components.keys()):
            message = f"{twice} computed by task {task.name} already; rename them"
            raise ConfigError(key=f"reward.scorers.{name}.components", message=message)
    known = task.components | config.reward.more_components
    if config.preference is not None and (unknown := sorted(config.preference.components - known)):
        message = f"reads {unknown}, task {task.name} and the run's scorers compute {sorted(known)}"
        raise ConfigError(key="preference", message=message)
    return None
