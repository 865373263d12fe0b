"""Containers are what the rendered manifests say, on folders of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.deploy import files
from tools.manifests.render import ROOT
from tools.network import namespaces
from tools.network.containers import Container, Mount, container, entry_script
from tools.network.hosts import Host, hosts

SECRETS = {"auth-token": "t", "redis-password": "p", "redis-url": "redis://:p@valkey:6379/0"}


def made(host_name: str, name: str) -> tuple[Host, Container]:
    objects = files.overlay("cpu")
    host = next(one for one in hosts(objects) if one.name == host_name)
    assert host.pod is not None
    named = {mount["name"] for one in host.pod.containers for mount in one["volumeMounts"]}
    return host, container(host, host.pod.container(name), SECRETS, {one: Path("/volumes") / one for one in named})


def test_a_workers_environment_is_its_manifests_and_its_images() -> None:
    host, worker = made("rollout-0", "worker")
    assert list(worker.argv) == ["python", "-m", "services.rollout", "--config", "/etc/sao/run.toml"]
    assert worker.env["SAO__ROLLOUT__WORKER_ID"] == host.name
    assert (worker.env["SAO__AUTH__TOKEN"], worker.env["SAO__REDIS__URL"]) == ("t", SECRETS["redis-url"])
    assert worker.env["PYTHONUNBUFFERED"] == "1"
    assert worker.env["PATH"].startswith(f"{ROOT}/.venv/bin:")
    assert worker.user == 10001
    assert Mount(Path("/volumes/spool"), "/spool") in worker.mounts


def test_an_engine_runs_this_checkouts_kit_and_reads_its_volumes_only() -> None:
    _, engine = made("rollout-0", "engine")
    assert engine.env["PATH"].startswith(f"{ROOT}/.venv-engine/bin:")
    assert engine.env["PYTHONPATH"] == f"{ROOT}/engine"
    assert not any(name.startswith("SAO__") for name in engine.env)
    assert {one.at for one in engine.mounts if one.read_only} == {"/data", "/versions"}


def test_the_store_finds_its_server_and_its_password() -> None:
    _, store = made("valkey-0", "valkey")
    assert store.argv[:2] == ["sh", "-c"]
    assert store.env["REDIS_PASSWORD"] == "p"
    folders = [Path(one) / "valkey-server" for one in store.env["PATH"].split(":")]
    assert any(one.is_file() for one in folders)


def test_a_secret_that_nobody_gave_is_an_error() -> None:
    host, _ = made("ingest-0", "ingest")
    assert host.pod is not None
    with pytest.raises(KeyError, match="redis-url"):
        container(
            host, host.pod.container("ingest"), {}, dict.fromkeys(("run-file", "tmp", "data", "versions"), Path())
        )


def test_volumes_come_before_the_checkout_that_may_lie_in_one_of_them() -> None:
    one = Container("a", ["x"], {"HOME": "/tmp"}, [Mount(Path("/w"), "/tmp"), Mount(Path("/r"), "/etc/sao", True)], 7)
    script = entry_script(one, "a-0", Path("/pods/root"), [(Path("/pods/resolv.conf"), "resolv.conf")])
    lines = script.splitlines()
    last_volume = max(at for at, line in enumerate(lines) if "mount --bind" in line)
    checkout = next(at for at, line in enumerate(lines) if f"mount --rbind {ROOT} " in line)
    assert last_volume < checkout
    assert "mount -o remount,bind,ro /pods/root/etc/sao" in lines
    assert "mount -o remount,bind,ro /pods/root/tmp" not in lines
    assert lines[-1].startswith('exec env -i HOME="$HOME" chroot /pods/root setpriv --reuid 7 --regid 7 ')
    assert "rm -f /pods/root/etc/resolv.conf && cp /pods/resolv.conf /pods/root/etc/resolv.conf" in lines


def test_what_is_missing_is_told_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    told = namespaces.lacking()
    assert told == (
        "ip, iptables, iptables-restore, dnsmasq not found; on Debian: "
        "apt-get install --no-install-recommends iproute2 iptables dnsmasq-base"
    )
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "only root" in namespaces.lacking()
