"""`python -m services.reward --config RUN.toml`."""

from sao.process import run_service
from services.reward.app import main

run_service("reward", main)
