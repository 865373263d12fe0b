"""`python -m services.rollout.ingest --config RUN.toml`: the ingest."""

from sao.process import run_service
from services.rollout.ingest.app import main

run_service("ingest", main)
