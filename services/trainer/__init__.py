"""The trainer: scored trajectories in, one at a time; updates, checkpoints and weight versions out."""
