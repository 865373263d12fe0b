"""A task of your own in one file: see docs/tasks.md."""
