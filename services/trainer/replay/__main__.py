"""`python -m services.trainer.replay RUN UPDATE...`."""

import sys

from sao.telemetry import logs
from services.trainer.replay.app import main

logs.configure("replay", "-")
sys.exit(main())
