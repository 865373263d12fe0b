"""The command that starts the store, run on a real Valkey: password, bound, append-only file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from tests.support.processes import free_port, server
from tests.support.valkey import BINARY
from tests.unit.deploy import files
from tools.manifests import compose
from tools.manifests.render import pods

PASSWORD = "s3cret"


def kubernetes_script() -> str:
    (pod,) = (one for one in pods(files.overlay("cpu")) if one.name == "valkey")
    script: str = pod.container("valkey")["args"][2]
    return script


def compose_script() -> str:
    script: str = compose.services()["valkey"]["command"][2]
    return script.replace("$$", "$")


@pytest.mark.parametrize("script", [kubernetes_script, compose_script], ids=["kubernetes", "compose"])
def test_it_takes_the_password_from_standard_input_and_keeps_everything(
    script: Callable[[], str], tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(BINARY)
    env = {"MAXMEMORY": "7mb", "REDIS_PASSWORD": PASSWORD, "REDISCLI_AUTH": PASSWORD}
    env["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    port = free_port()
    text = script().replace("--dir /stream", f"--dir {tmp_path} --port {port} --bind 127.0.0.1")
    client = redis.Redis(port=port, password=PASSWORD, protocol=2, socket_timeout=1.0)

    def answers() -> bool:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False

    with server(["sh", "-c", text], log=tmp_path / "log", ready=answers, timeout_s=15, env=env):
        for name, value in {"maxmemory": str(7 * 2**20), "maxmemory-policy": "noeviction", "appendonly": "yes"}.items():
            assert client.config_get(name) == {name: value}
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port, protocol=2).ping()
    client.close()
