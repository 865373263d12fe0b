"""`sao doctor` on a real Valkey with wrong settings, an engine with wrong flags, a stalled trainer and dead edges."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sao.cli.main import app
from tests.support.processes import free_port
from tests.support.valkey import valkey

SECRETS = ("hush-redis", "hush-token", "hush-engine")


@contextmanager
def answering(answers: dict[str, tuple[int, str]], *, key: str = "") -> Iterator[str]:
    """A server that gives these; 401 to whoever has not the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, ""))
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                status, body = 401, ""
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def sao(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", *map(str, arguments)])


@pytest.fixture
def run_file(tmp_path: Path) -> Iterator[Path]:
    info = {"version": "0.4.9", "dtype": "float32", "enable_cache_report": False, "api_key": "hush-engine"}
    options = "--appendonly", "no", "--maxmemory-policy", "allkeys-lru", "--requirepass", "hush-redis"
    with (
        answering({"/server_info": (200, json.dumps(info))}, key="hush-engine") as engine,
        valkey(tmp_path, *options, password="hush-redis") as url,
    ):
        made = tmp_path / "run.toml"
        made.write_text(
            f"""
            [run]
            dir = "{tmp_path}"
            [redis]
            url = "{url.replace("//", "//:hush-redis@")}"
            [engine]
            urls = ["{engine}", "http://127.0.0.1:{free_port()}"]
            api_key = "hush-engine"
            [ingest]
            target = "127.0.0.1:{free_port()}"
            [auth]
            token = "hush-token"
            """
        )
        yield made


def test_what_is_wrong_is_told_each_with_what_to_do(run_file: Path) -> None:
    health = {"/healthz": (503, "stalled: no progress for 700 s"), "/metrics": (200, METRICS)}
    with answering(health) as trainer:
        told = sao(run_file, "--service", f"trainer={trainer}", "--timeout", 1, "--json")
    assert told.exit_code == 1, told.output
    found = {one["check"]: (one["status"], one["found"]) for one in json.loads(told.output)}
    assert found["store persistence"] == ("fail", "no append-only file")
    assert found["store eviction"] == ("fail", "allkeys-lru")
    assert found["store memory"] == ("fail", "no bound")
    assert found["edge rollout, ingest, reward, trainer, weights -> valkey"][0] == "ok"
    assert found["clock store"][0] == "ok"
    assert found["health trainer"] == ("fail", "stalled: no progress for 700 s")
    assert found["trainer lag"] == ("warn", "7 updates")
    assert found["edge rollout -> ingest"][0] == "fail"
    assert "no connection within" in found["edge rollout -> ingest"][1]
    assert sorted(found[name][0] for name in found if " -> engine " in name and name.startswith("edge ")) == [
        "fail",
        "ok",
    ]
    assert [found[name] for name in found if name.startswith("engine release")] == [("fail", "0.4.9")]
    assert [found[name][0] for name in found if name.startswith("engine flags")] == ["fail"]
    assert found["disk run folder"][0] in {"ok", "warn"}
    assert found["packages"][0] == "ok"
    assert not any(secret in told.output for secret in SECRETS)


METRICS = '# TYPE sao_trainer_lag_updates gauge\nsao_trainer_lag_updates{statistic="max"} 7.0\n'


def test_wrong_secrets_are_told_and_never_shown(run_file: Path) -> None:
    text = run_file.read_text().replace('"hush-engine"', '"other-engine"').replace(":hush-redis@", ":other-redis@")
    run_file.write_text(text)
    told = sao(run_file, "--as", "rollout", "--timeout", 1)
    assert told.exit_code == 1
    assert "fail token store: " in told.output
    assert "fail token engine http://127.0.0.1:" in told.output
    assert "give both sides the same engine.api_key" in told.output
    assert not any(secret in told.output for secret in (*SECRETS, "other-engine", "other-redis"))


def test_a_pod_whose_edges_stand_is_well(tmp_path: Path) -> None:
    options = "--maxmemory", "64mb", "--maxmemory-policy", "noeviction"
    with valkey(tmp_path, *options) as url:
        made = tmp_path / "run.toml"
        made.write_text(f'[run]\ndir = "{tmp_path}"\n[redis]\nurl = "{url}"\n[checkpoint]\nfree_space_mb = 1\n')
        told = sao(made, "--as", "reward")
        assert told.exit_code == 0, told.output
        assert "ok   edge reward -> valkey: 127.0.0.1:" in told.output
        assert ", 0 fail" in told.output
        assert sao("--run-dir", tmp_path, "--as", "reward", "--json").exit_code == 0


def test_a_collector_is_tried_where_traces_have_one(tmp_path: Path) -> None:
    made = tmp_path / "run.toml"
    options = "--maxmemory", "64mb", "--maxmemory-policy", "noeviction"
    with valkey(tmp_path, *options) as url, answering({}) as collector:
        for endpoint, status in ((collector, "ok  "), (f"http://127.0.0.1:{free_port()}", "fail")):
            made.write_text(
                f'[run]\ndir = "{tmp_path}"\n[redis]\nurl = "{url}"\n[checkpoint]\nfree_space_mb = 1\n'
                f'[traces]\nendpoint = "{endpoint}"\n'
            )
            told = sao(made, "--as", "reward")
            assert f"{status} edge reward -> collector" in told.output
            assert told.exit_code == (status == "fail"), told.output


@pytest.mark.parametrize("arguments", [[], ["nowhere.toml"], ["--run-dir", "nowhere"], ["a", "--run-dir", "b"]])
def test_wrong_arguments_end_with_2(arguments: list[str]) -> None:
    assert sao(*arguments).exit_code == 2


def test_a_service_that_nobody_knows_is_refused(run_file: Path) -> None:
    told = sao(run_file, "--service", "engine=http://e")
    assert (told.exit_code, "expected NAME=http://host:port" in told.output) == (2, True)
