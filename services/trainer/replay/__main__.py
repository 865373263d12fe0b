"""`python -m services.trainer.replay RUN UPDATE...`."""

import sys

from sao.telemetry import logs

logs.configure("replay", "-")
try:
    from services.trainer.replay.app import main
except ImportError as error:
    # As in an image of another service; the interpreter's own exit status would mean a divergence.
    sys.stderr.write(f"cannot replay: {error}: install the trainer's requirements\n")
    sys.exit(2)
sys.exit(main())
