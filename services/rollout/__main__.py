"""`python -m services.rollout --config RUN.toml`: one rollout worker."""

from sao.process import run_service
from services.rollout.app import main

run_service("worker", main)
