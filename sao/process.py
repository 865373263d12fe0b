"""The edge of every service process: arguments, configuration, logs, signals, exit status.

| exit | because |
|---|---|
| 0 | `main` returned: its work is over, or SIGTERM or SIGINT asked it to stop |
| 1 | an exception escaped, logged with its traceback; or a second signal cut the orderly stop short |
| 2 | a setting is wrong; its key is on stderr |
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from sao.config import ConfigError, RunConfig, load_run_config
from sao.telemetry import logs, metrics

Main = Callable[[RunConfig, asyncio.Event], Awaitable[None]]
"""A service: runs until its work is over or the event is set, then puts everything in order and returns."""


def run_service(service: str, main: Main) -> NoReturn:
    """Run `main` with the configuration that `--config PATH` names, and end the process with the status above.

    The first SIGTERM or SIGINT sets the event; a second one cancels `main`.
    """
    parser = argparse.ArgumentParser(prog=service, allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, metavar="RUN.toml", help="the effective run file")
    path: Path = parser.parse_args().config
    try:
        config = load_run_config(path)
        logs.configure(service, config.run.name)
        asyncio.run(_until_stopped(main, config))
    except ConfigError as error:
        sys.stderr.write(f"{service}: configuration error: {error}\n")
        sys.exit(2)
    except asyncio.CancelledError:
        logs.get_logger(__name__).error("stopped in the middle of work")
        sys.exit(1)
    except Exception:  # noqa: BLE001 - the process's edge
        logs.get_logger(__name__).exception("service failed")
        sys.exit(1)
    sys.exit(0)


async def _until_stopped(main: Main, config: RunConfig) -> None:
    log = logs.get_logger(__name__)
    stop = asyncio.Event()
    task = asyncio.ensure_future(main(config, stop))

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("second signal, giving up the orderly stop", signal=number.name)
            task.cancel()
            return
        log.info("stopping", signal=number.name)
        stop.set()

    loop = asyncio.get_running_loop()
    metrics.TASKS.set_function(lambda: len(asyncio.all_tasks(loop)))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    log.info("started")
    await task
    log.info("ended")
