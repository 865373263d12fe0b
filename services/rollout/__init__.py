"""Rollouts: prompts in, finished trajectories out. `python -m services.rollout --config RUN.toml` is one worker."""
