"""`make compose-check`: docker-compose.yml and the Dockerfiles.

compose      `docker compose config`, for each profile with .env.example, where there is such a binary:
             `docker compose`, docker-compose on the PATH, or the file that $SAO_DOCKER_COMPOSE names
structure    tools/manifests/compose.py
hadolint     every Dockerfile, each ignore explained on the line before it

Exit status 0: nothing found; 1: something was.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.manifests import compose

BINARY_VARIABLE = "SAO_DOCKER_COMPOSE"
_TIMEOUT_S = 60
_SECRETS = {"SAO_AUTH_TOKEN": "a", "SAO_REDIS_PASSWORD": "b"}


def main() -> int:
    """The exit status."""
    command = compose_command()
    if command is None:
        sys.stdout.write(f"compose: skipped, no docker compose here ({BINARY_VARIABLE} may name one)\n")
    found = [*(_compose(command) if command else ()), *compose.findings(), *_hadolint()]
    sys.stdout.writelines(f"  {text}\n" for text in found)
    sys.stdout.write(f"{compose.FILE.name}, {len(_dockerfiles())} Dockerfiles: {len(found)} findings\n")
    return 1 if found else 0


def compose_command() -> list[str] | None:
    """What runs compose here, if anything does; FileNotFoundError when the variable names no file."""
    said = os.environ.get(BINARY_VARIABLE)
    if said:
        if not Path(said).is_file():
            msg = f"{BINARY_VARIABLE}={said} is no file"
            raise FileNotFoundError(msg)
        return [said]
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and _run([*command, "version"]).returncode == 0:
            return command
    return None


def _compose(command: Sequence[str]) -> Iterator[str]:
    for profile in compose.PROFILES:
        variables = compose.example(profile) | _SECRETS
        with tempfile.NamedTemporaryFile("w", suffix=".env") as file:
            file.writelines(f"{name}={value}\n" for name, value in variables.items())
            file.flush()
            done = _run([*command, "--file", str(compose.FILE), "--env-file", file.name, "config", "--quiet"])
        if done.returncode != 0:
            yield f"profile {profile}: {done.stderr.strip()}"
        else:
            sys.stdout.write(f"compose: profile {profile} is valid\n")
    done = _run([*command, "--file", str(compose.FILE), "--env-file", os.devnull, "config", "--quiet"])
    if done.returncode == 0:
        yield "it starts without the secrets of .env"


def _hadolint() -> Iterator[str]:
    for path in _dockerfiles():
        yield from compose.unexplained_ignores(path)
        done = _run([str(Path(sys.executable).with_name("hadolint")), "--no-color", str(path)])
        if done.returncode != 0:
            yield from (done.stdout + done.stderr).splitlines()


def _dockerfiles() -> list[Path]:
    return sorted(compose.DOCKERFILES.glob("*.Dockerfile"))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SAO_", "COMPOSE_"))}
    return subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment
    )


if __name__ == "__main__":
    sys.exit(main())
