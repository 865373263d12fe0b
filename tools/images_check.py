"""`make images-check`: the CPU images built with buildah, and overlay `cpu` run from them with podman.

The stack learns through 50 updates in containers that are what the manifests say: another user than root, no
capabilities, no new privileges, a read-only root, limited memory, each as seen from inside. At the end every probe is
asked once more, and each container is told to end. Needs root, buildah, podman, runc and kubectl; where no registry can
be reached debootstrap as well. The result is bench/results/images.json.

Images and their layers stay in /var/tmp/sao-images-check (or $SAO_IMAGES_ROOT), so that a second check is quick.
Exit status 0: all is as it must be; 1: something is not; 2: it could not be checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.prove import RESULTS, commit, machine
from tools.images import judge
from tools.images.build import Built, build
from tools.images.engine import Engine, EngineError
from tools.images.machine import CannotCheckError, require
from tools.images.play import CannotPlayError, images_of, played
from tools.images.run import Stack, stack
from tools.manifests.render import Object, RenderError, render_overlay

OVERLAY = "cpu"
UPDATES = 50
ROOT_VARIABLE = "SAO_IMAGES_ROOT"
STORE = Path("/var/tmp/sao-images-check")  # noqa: S108 - root's own folder below it
RUN = Path("/run/sao-images-check")
_BEGAN = time.monotonic()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="remove images and layers of earlier checks first")
    parser.add_argument("--remove", action="store_true", help="remove images and layers afterwards")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    engine = Engine(Path(os.environ.get(ROOT_VARIABLE, STORE)), RUN)
    try:
        require()
        with _alone():
            if options.fresh:
                engine.forget()
            engine.prepare()
            failed = _check(engine, render_overlay(OVERLAY))
            if options.remove:
                engine.forget()
    except KeyboardInterrupt:
        sys.stderr.write("images-check: interrupted; nothing is left running\n")
        return 130
    except CannotCheckError as error:
        sys.stderr.write(f"images-check: {error}\n")
        return 2
    except (EngineError, RenderError, CannotPlayError) as error:
        sys.stderr.write(f"images-check: {error}\n")
        return 1
    return 1 if failed else 0


def _check(engine: Engine, objects: Sequence[Object]) -> list[str]:
    """What is not as it must be."""
    now = commit()
    built = build(engine, images_of(objects), _say)
    volumes = engine.root / "volumes"
    pods = played(objects, built.local, volumes)
    _say(f"starting {', '.join(pod.name for pod in pods)}")
    took: dict[str, float] = {}
    with stack(engine, pods, volumes, _say) as running:
        with _timed(took, "ready"):
            running.become_ready()
        _say("every container is ready")
        with _timed(took, "updates"):
            running.reach(UPDATES)
        running.look_for_the_last_time()
        with _timed(took, "end"):
            running.end()
    grace = {pod.name: float(pod.grace_s) for pod in pods}
    problems = judge.problems(running.containers, running.seen, UPDATES, grace)
    head = {"proof": "images", "commit": now, "machine": machine() | engine.versions()}
    found = head | _result(built, running, problems) | {"seconds": took}
    (RESULTS / "images.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.stdout.writelines(f"  {problem}\n" for problem in problems)
    _say(
        f"{'failed' if problems else 'passed'}: {len(built.local)} images, {len(running.containers)} containers, "
        f"{running.seen.updates} updates, {len(running.seen.versions)} versions served (bench/results/images.json)"
    )
    return problems


def _result(built: Built, running: Stack, problems: list[str]) -> dict[str, Any]:
    """What the result file says of it."""
    seen = running.seen
    return {
        "passed": not problems,
        "problems": problems,
        "images": {
            image: {"bytes": built.bytes[image], "build_s": built.seconds[image]} for image in sorted(built.local)
        },
        "stand_ins": built.stand_ins,
        "updates": seen.updates,
        "versions_served": seen.versions,
        "containers": {
            one.full_name: {
                "inside": dataclasses.asdict(seen.inside[one.full_name]) if one.full_name in seen.inside else None,
                **({} if one.init else _of_lasting(one.full_name, seen)),
            }
            for one in running.containers
        },
    }


def _of_lasting(name: str, seen: judge.Seen) -> dict[str, Any]:
    ended = seen.ended.get(name)
    return {
        "restarts": seen.restarts.get(name),
        "unwell": seen.unwell.get(name),
        "ended": dataclasses.asdict(ended) if ended else None,
    }


@contextmanager
def _alone() -> Iterator[None]:
    """Nobody else's check runs here; EngineError when one does."""
    path = RUN.with_suffix(".lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            msg = f"another check is running ({path} is locked)"
            raise EngineError(msg) from error
        yield


@contextmanager
def _timed(took: dict[str, float], what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    took[what] = round(time.monotonic() - began, 1)


def _say(text: str) -> None:
    sys.stdout.write(f"{time.monotonic() - _BEGAN:6.0f} s  {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
