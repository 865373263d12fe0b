"""The prompt files that come with sao (made by `python -m sao.tasks.make_prompts`), and how to read any."""

from sao.tasks.prompt_files import PromptFileError, load_prompts, prompt_for

__all__ = ["PromptFileError", "load_prompts", "prompt_for"]
