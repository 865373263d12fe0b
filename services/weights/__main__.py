"""`python -m services.weights --config RUN.toml`."""

from sao.process import run_service
from services.weights.app import main

run_service("weights", main)
