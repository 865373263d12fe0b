"""Build both environments: `python3.11 tools/setup.py`. Standard library only, no root, no system package.

.venv         the project and its services, from requirements/dev.lock
.venv-engine  a real SGLang for CPUs, from engine/requirements.lock (its pins and DeepSpeed's exclude each other)

The CPU build of torch is asked for by name, because on Linux a plain `torch` is gigabytes of CUDA. An environment
whose stamp fits the locks is left alone. Where pip's own index has no CPU build, SAO_TORCH_INDEX names one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TELL_EVERY_S = 15.0
BAR = 24
_PACKAGE = re.compile(r"^\s*(Collecting|Processing|Requirement already satisfied:|Using cached|Obtaining)\s")


class StepFailedError(RuntimeError):
    """A step of the set-up failed; the message names its log."""


@dataclass
class Environment:
    """One virtual environment and how far it has come."""

    name: str
    folder: Path
    lock: Path
    sources: tuple[Path, ...]
    """Files beside the lock that its contents follow from."""
    finish: Callable[[Environment], None]
    """What comes after the locked packages."""
    step: str = "waiting"
    packages: int = 0
    """Packages that pip has looked at in this step."""
    done: bool = False
    error: Exception | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        """All that pip said."""
        return ROOT / "build" / f"setup-{self.name}.log"

    @property
    def stamp(self) -> Path:
        """Written last; says what the environment was built from."""
        return self.folder / "sao-stamp.json"

    def pins(self) -> list[str]:
        """The lock's lines."""
        return [line for line in self.lock.read_text().splitlines() if line and not line.startswith("#")]

    def fingerprint(self) -> dict[str, str]:
        """What a finished environment's stamp has to say."""
        digest = hashlib.sha256()
        for path in (self.lock, Path(__file__), *self.sources):
            digest.update(path.read_bytes())
        return {"sources": digest.hexdigest(), "folder": str(self.folder), "python": sys.version.split()[0]}

    def is_right(self) -> bool:
        """Whether nothing has to be done."""
        try:
            return bool(json.loads(self.stamp.read_text()) == self.fingerprint())
        except (OSError, ValueError):
            return False


def build(env: Environment) -> None:
    """Everything for one environment; StepFailedError when a step fails."""
    env.log.parent.mkdir(exist_ok=True)
    env.log.write_text("")
    old = env.folder / "sao-stamp.json"
    moved = old.exists() and json.loads(old.read_text()).get("folder") != str(env.folder)
    old.unlink(missing_ok=True)
    env.step = "creating the environment"
    # A moved environment has its old place in every script, and cannot be mended.
    venv.create(env.folder, with_pip=True, clear=moved, symlinks=True)
    pins = env.pins()
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    install_torch(env, torch)
    from_source = [pin for pin in pins if pin.startswith("deepspeed==")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as rest:
        rest.write("\n".join(pin for pin in pins if pin != torch and pin not in from_source))
        rest.flush()
        pip(env, "installing packages", "-r", rest.name)
    for pin in from_source:
        # Its set-up looks for torch and setuptools, so it builds in this environment; no operator is compiled.
        pip(env, f"building {pin}", "--no-build-isolation", "--use-pep517", pin)
    env.finish(env)
    env.step = "checking torch"
    cuda = run(env, [str(env.python), "-c", "import torch; print(torch.version.cuda)"]).strip().splitlines()[-1]
    if cuda != "None":
        msg = f"{env.folder.name} has a torch for CUDA {cuda}, expected the CPU build: remove the folder and run again"
        raise StepFailedError(msg)
    env.stamp.write_text(json.dumps(env.fingerprint()))
    env.step = f"done: {torch}, torch.version.cuda is None"


def install_torch(env: Environment, pin: str) -> None:
    """The CPU build, from pip's own index or else from PyTorch's."""
    try:
        pip(env, f"installing {pin}", pin)
    except StepFailedError:
        index = os.environ.get("SAO_TORCH_INDEX", TORCH_INDEX)
        pip(env, f"installing {pin} from {index}", "--index-url", index, pin)


def pip(env: Environment, step: str, *arguments: str) -> None:
    """One `pip install`; never with dependencies, the lock has all of them."""
    env.step, env.packages = step, 0
    run(env, [str(env.python), "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", *arguments])


def run(env: Environment, argv: Sequence[str]) -> str:
    """Run a command into the log, counting packages; its output. StepFailedError when it fails."""
    settings = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1", "PIP_NO_INPUT": "1"}
    output = []
    with env.log.open("a") as log:
        log.write(f"\n$ {' '.join(argv)}\n")
        process = subprocess.Popen(  # noqa: S603  # our own interpreter
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=settings, cwd=ROOT
        )
        for line in process.stdout or ():
            log.write(line)
            output.append(line)
            if _PACKAGE.match(line) and "Using cached" not in line:
                env.packages += 1
            if line.startswith("Installing collected packages") and env.step == "installing packages":
                env.step = "unpacking packages"
        if process.wait() != 0:
            log.flush()
            msg = f"{env.step} failed ({env.log}):\n{''.join(output[-12:])}"
            raise StepFailedError(msg)
    return "".join(output)


def finish_project(env: Environment) -> None:
    """Install `sao` itself, editable."""
    pip(env, "installing sao", "--no-build-isolation", "-e", str(ROOT))


def finish_engine(env: Environment) -> None:
    """Install the engine kit from a copy: a build leaves nothing in the tree."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "engine"
        shutil.copytree(ROOT / "engine", copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
        pip(env, "installing sglang-cpuref", "--no-build-isolation", "--force-reinstall", str(copy))
    env.step = "checking the kit"
    run(env, [str(env.python), "-m", "sglang_cpuref.serve", "--help"])


def environments() -> list[Environment]:
    """Both of them."""
    kit = sorted((ROOT / "engine" / "sglang_cpuref").glob("*.py"))
    return [
        Environment(
            "project", ROOT / ".venv", ROOT / "requirements/dev.lock", (ROOT / "pyproject.toml",), finish_project
        ),
        Environment(
            "engine",
            ROOT / ".venv-engine",
            ROOT / "engine/requirements.lock",
            (ROOT / "engine/pyproject.toml", *kit),
            finish_engine,
        ),
    ]


def watch(env: Environment) -> None:
    """Build and keep the outcome for the main thread."""
    try:
        build(env)
    except (StepFailedError, OSError, subprocess.SubprocessError) as error:
        env.error = error
        env.step = "failed"
    finally:
        env.done = True


def shown(env: Environment, start: float) -> str:
    """One environment's line."""
    elapsed = int(time.monotonic() - start)
    total = len(env.pins()) if env.step == "installing packages" else 0
    bar = ""
    if total:
        filled = min(BAR, BAR * env.packages // total)
        bar = f" [{'#' * filled}{'.' * (BAR - filled)}] {min(env.packages, total)}/{total}"
    return f"{elapsed // 60}:{elapsed % 60:02d} {env.name:<8}{env.step}{bar}"


def report(envs: Sequence[Environment], start: float) -> None:
    """Print progress until all are done: in place on a terminal, else a line at each step and now and then."""
    live = sys.stdout.isatty()
    told: dict[str, tuple[str, float]] = {}
    drawn = 0
    while True:
        over = all(env.done for env in envs)
        if live:
            sys.stdout.write(f"\x1b[{drawn}F" if drawn else "")
            sys.stdout.writelines(f"\x1b[2K{shown(env, start)}\n" for env in envs)
            drawn = len(envs)
        for env in [] if live else envs:
            step, at = told.get(env.name, ("", 0.0))
            if env.step != step or (time.monotonic() - at > TELL_EVERY_S and not env.done):
                sys.stdout.write(shown(env, start) + "\n")
                told[env.name] = (env.step, time.monotonic())
        sys.stdout.flush()
        if over:
            return
        time.sleep(0.2)


@contextmanager
def alone() -> Iterator[None]:
    """Wait for another set-up in this folder to end."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "setup.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Build what is not right yet; 0 when both environments are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["project", "engine"], help="build one environment")
    only = parser.parse_args().only
    if sys.version_info[:2] != (3, 11):
        sys.stderr.write(f"Python 3.11 is needed (the locks hold its wheels), this is {sys.version.split()[0]}\n")
        return 1
    start = time.monotonic()
    with alone():
        wanted = [env for env in environments() if only in {None, env.name}]
        todo = [env for env in wanted if not env.is_right()]
        if not todo:
            sys.stdout.write("environments are as the locks say\n")
            return 0
        sys.stdout.write(f"building {' and '.join(env.folder.name for env in todo)}: some minutes, about 2.8 GB each\n")
        threads = [threading.Thread(target=watch, args=(env,)) for env in todo]
        for thread in threads:
            thread.start()
        report(todo, start)
        for thread in threads:
            thread.join()
    for env in todo:
        if env.error is not None:
            sys.stderr.write(f"\n{env.name}: {env.error}\n")
    if any(env.error for env in todo):
        return 1
    sys.stdout.write(f"ready after {time.monotonic() - start:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
