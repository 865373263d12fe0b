"""The CPU images built for real, and overlay `cpu` run from them in containers: `python -m tools.images_check`."""
