"""`python -m services.trainer --config RUN.toml`."""

from services.trainer.app import main

main()
