"""docker-compose.yml, .env.example and the Dockerfiles, read as data, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tools.manifests.consistency import GRACE_BEYOND_DRAIN_S, over_preset, setting
from tools.manifests.render import ROOT

FILE = ROOT / "docker-compose.yml"
EXAMPLE = ROOT / ".env.example"
DOCKERFILES = ROOT / "deploy" / "docker"
PROFILES = ("cpu", "gpu")
ROOT_FOR_A_MOMENT = "volume-owner"
"""Gives fresh volumes to the services' user and ends."""
USERS = {ROOT_FOR_A_MOMENT: "0", "prometheus": "65534:65534"}
"""Whose user is not the services': Prometheus's image owns its folder as nobody."""

Services = Mapping[str, Mapping[str, Any]]


def services(text: str | None = None) -> Services:
    """By name, merge keys resolved; of docker-compose.yml unless another text is given."""
    found: Services = yaml.safe_load(FILE.read_text() if text is None else text)["services"]
    return found


def of_profile(every: Services, profile: str) -> Services:
    """Those that a profile starts."""
    return {name: one for name, one in every.items() if profile in one.get("profiles", PROFILES)}


def example(profile: str) -> dict[str, str]:
    """.env.example with one of its blocks chosen: variables by name."""
    lines = EXAMPLE.read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.lstrip("# ") == f"COMPOSE_PROFILES={profile}")
    block = []
    for line in lines[start:]:
        if not line.strip():
            break
        block.append(line.removeprefix("# "))
    plain = [line for line in lines if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in [*plain, *block])


def findings(text: str | None = None) -> list[str]:
    """Everything wrong with a compose file; empty when nothing is."""
    raw = FILE.read_text() if text is None else text
    every = services(raw)
    found = [*_variables(raw)]
    for name, one in every.items():
        found += [f"{name}: {problem}" for problem in _of_service(name, one)]
    for profile in PROFILES:
        found += [f"profile {profile}: {problem}" for problem in _of_profile(every, profile)]
    return found


def _variables(raw: str) -> Iterator[str]:
    """Every variable is in .env.example, where a user would look for it."""
    known = set(re.findall(r"^(?:# )?([A-Z_]+)=", EXAMPLE.read_text(), re.MULTILINE))
    for name in sorted(set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", raw)) - known):
        yield f"${{{name}}} is not in {EXAMPLE.name}"


def _of_service(name: str, one: Mapping[str, Any]) -> Iterator[str]:
    if one.get("user") != USERS.get(name, "10001:10001"):
        yield f"runs as {one.get('user')}"
    if one.get("read_only") is not True:
        yield "its root is writable"
    if one.get("cap_drop") != ["ALL"] or one.get("privileged"):
        yield "keeps capabilities"
    if one.get("security_opt") != ["no-new-privileges:true"]:
        yield "may gain privileges"
    for port in one.get("ports", []):
        if not str(port).startswith("127.0.0.1:"):
            yield f"port {port} is open to the network"
    image = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", one.get("image", ""))
    if not re.search(r":[0-9v][\w.-]*$|@sha256:", image):
        yield f"image {image!r} is not pinned"
    if "build" in one and not (ROOT / one["build"]["dockerfile"]).is_file():
        yield f"{one['build']['dockerfile']} is not there"
    for key, value in one.get("environment", {}).items():
        if re.search(r"TOKEN|PASSWORD|AUTH|URL$", key) and "${" not in str(value):
            yield f"{key} has its value in the file"


def _of_profile(every: Services, profile: str) -> Iterator[str]:
    there = of_profile(every, profile)
    for name, one in there.items():
        for needed, how in one.get("depends_on", {}).items():
            if needed not in there and how.get("required", True):
                yield f"{name} waits for {needed}, which it does not start"
    engines = [one for name, one in there.items() if "engine" in {name, *_aliases(one)}]
    if len(engines) != 1:
        yield f"{len(engines)} services answer to the name engine, expected one"
    chosen = example(profile)
    config = over_preset((ROOT / chosen["SAO_RUN_FILE"]).read_text())
    memory = chosen.get("SAO_STORE_MEMORY", "512mb")
    if memory != f"{config.get('redis', {}).get('maxmemory_mb', 512)}mb":
        yield f"the store has {memory}, redis.maxmemory_mb is {config.get('redis', {}).get('maxmemory_mb', 512)}"
    unset = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", there["rollout"].get("stop_grace_period", "10s"))
    grace, drain = chosen.get("SAO_ROLLOUT_GRACE", unset), setting(config, "rollout.drain_s")
    if int(grace.removesuffix("s")) < drain + GRACE_BEYOND_DRAIN_S:
        yield f"rollout has {grace} to stop, expected rollout.drain_s {drain:g} and {GRACE_BEYOND_DRAIN_S} s"
    for needed in {"ingest", "engine", "engine-cpu"} & there.keys():
        if needed not in there["rollout"]["depends_on"]:
            yield f"rollout may stop after {needed}, which its last episodes need"
    if profile == "gpu":
        yield from _gpus(there, config)


def _gpus(there: Services, config: Mapping[str, Any]) -> Iterator[str]:
    taken: list[str] = []
    for name, wanted in (("trainer", config["trainer"]["ranks"]), ("engine", config["hardware"]["engine_gpus"])):
        (device,) = there[name]["deploy"]["resources"]["reservations"]["devices"]
        if len(device["device_ids"]) != wanted:
            yield f"{name} has {len(device['device_ids'])} GPUs, the run file says {wanted}"
        taken += device["device_ids"]
    if len(taken) != len(set(taken)):
        yield f"GPUs {taken}: one is given twice"
    flags = there["engine"]["command"]
    for flag, value in (
        ("tp-size", config["hardware"]["engine_gpus"]),
        ("dtype", config["engine"]["dtype"]),
        ("max-running-requests", config["engine"]["max_running_requests"]),
        ("max-total-tokens", config["engine"]["max_total_tokens"]),
        ("model-path", config["model"]["path"]),
    ):
        if f"--{flag}={value}" not in flags:
            yield f"engine: no --{flag}={value}, which the run file says"


def _aliases(one: Mapping[str, Any]) -> list[str]:
    networks = one.get("networks", {})
    return [alias for network in networks.values() for alias in network.get("aliases", [])]


def unexplained_ignores(dockerfile: Path) -> list[str]:
    """The hadolint ignores whose line before is no comment that says why."""
    lines = dockerfile.read_text().splitlines()
    return [
        f"{dockerfile.name}:{at + 1}: {line} has no reason on the line before"
        for at, line in enumerate(lines)
        if line.startswith("# hadolint ignore=") and not re.match(r"# (?!hadolint)\S+ \S+ \S+", lines[at - 1])
    ]
