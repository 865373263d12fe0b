"""What a build takes from the machine, and how each Dockerfile gets its torch."""

from __future__ import annotations

import os
import shutil

import pytest

from tools.images import machine
from tools.images.build import torch_arguments, torch_pin
from tools.images.machine import CannotCheckError
from tools.manifests.compose import DOCKERFILES

LISTED = """\
:env:.cert='/ca/env.pem'
:env:.index-url='https://own.example/simple'
global.cert='/ca/file.pem'
global.extra-index-url='file:///pypi/simple https://more.example/simple'
global.find-links='\\n/wheels\\n/gone'
install.constraint='/etc/constraints.txt'
freeze.user='true'
"""


def test_pip_s_settings_are_one_table_in_which_the_environment_wins() -> None:
    settings = machine.pip_settings(LISTED)
    assert settings["cert"] == "/ca/env.pem"
    assert settings["index-url"] == "https://own.example/simple"
    assert settings["constraint"] == "/etc/constraints.txt"
    assert "user" not in settings


def test_a_build_gets_them_as_a_file_and_every_path_that_they_name() -> None:
    settings = machine.pip_settings(LISTED)
    assert machine.pip_conf(settings) == (
        "[global]\n"
        "cert = /ca/env.pem\n"
        "constraint = /etc/constraints.txt\n"
        "extra-index-url = file:///pypi/simple https://more.example/simple\n"
        "find-links = /wheels /gone\n"
        "index-url = https://own.example/simple\n"
    )
    there = {"/ca/env.pem", "/etc/constraints.txt", "/wheels", "/pypi"}
    assert machine.mounts(settings, there.__contains__) == sorted(there)
    assert machine.mounts({"index-url": "file:///simple"}, lambda _path: True) == [], "never the whole machine"


def test_what_is_not_here_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotCheckError, match="sudo"):
        machine.require()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    here = {*machine.PROGRAMS, "kubectl"}
    monkeypatch.setattr(shutil, "which", lambda name, **_options: name if name in here else None)
    machine.require()
    here.remove("runc")
    with pytest.raises(CannotCheckError, match=r"^runc missing: on Debian, apt-get install buildah podman runc"):
        machine.require()
    here |= {"runc"}
    here.remove("kubectl")
    with pytest.raises(CannotCheckError, match="kubectl"):
        machine.require()


def test_both_images_with_torch_get_the_build_that_their_lock_pins() -> None:
    for name, asked in (("engine-cpu", {"TORCH_INDEX"}), ("trainer", {"TORCH_INDEX", "TORCH"})):
        file = DOCKERFILES / f"{name}.Dockerfile"
        pin = torch_pin(file)
        assert pin.startswith("torch==")
        assert pin.endswith("+cpu")
        arguments = torch_arguments(file, pin, "https://own.example/simple")
        assert arguments.keys() == asked
        assert arguments["TORCH_INDEX"] == "https://own.example/simple"
        assert arguments.get("TORCH", pin) == pin
        assert "TORCH" in asked or pin in file.read_text()
