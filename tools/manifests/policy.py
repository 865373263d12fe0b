"""checkov over rendered manifests, each suppression with its reason in deploy/k8s/checkov.toml."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools.manifests.render import K8S, Object, checked_as

SUPPRESSIONS = K8S / "checkov.toml"
_TIMEOUT_S = 600


class CheckovError(RuntimeError):
    """checkov itself failed, or read less than it was given."""


@dataclass(frozen=True)
class Suppression:
    """One check that is not followed, where, and why."""

    check: str
    objects: str
    reason: str


@dataclass(frozen=True, order=True)
class Violation:
    """One check that one object fails."""

    source: str
    """The overlay or whatever the caller named its objects."""
    check: str
    resource: str
    name: str

    def __str__(self) -> str:
        return f"{self.resource}: {self.check} {self.name}"


def suppressions() -> list[Suppression]:
    """The file's entries; ValueError when one has no reason."""
    entries = [Suppression(**one) for one in tomllib.loads(SUPPRESSIONS.read_text())["suppress"]]
    for one in entries:
        if len(one.reason.split()) < 4:
            msg = f"{SUPPRESSIONS}: {one.check} has no reason that explains anything: {one.reason!r}"
            raise ValueError(msg)
    return entries


def violations(rendered: Mapping[str, Sequence[Object]]) -> list[Violation]:
    """Every failed check in one run of checkov over all of these, by the name they are given under."""
    with tempfile.TemporaryDirectory() as folder:
        for source, objects in rendered.items():
            shown = [part for one in objects for part in checked_as(one)]
            (Path(folder) / f"{source}.yaml").write_text(yaml.safe_dump_all(shown))
        return _run(Path(folder), set(rendered))


def unexplained(
    found: Sequence[Violation], explained: Sequence[Suppression]
) -> tuple[list[Violation], list[Suppression]]:
    """Violations that no suppression covers, and suppressions that cover none."""
    open_, used = [], set()
    for violation in found:
        covers = [
            one
            for one in explained
            if one.check == violation.check and fnmatch.fnmatch(violation.resource, one.objects)
        ]
        used.update(covers)
        if not covers:
            open_.append(violation)
    return open_, [one for one in explained if one not in used]


def _run(folder: Path, sources: set[str]) -> list[Violation]:
    binary = Path(sys.executable).with_name("checkov")
    command = [str(binary), "--directory", str(folder), "--framework", "kubernetes", "--output", "json"]
    command += ["--compact", "--skip-download", "--soft-fail"]
    done = subprocess.run(  # noqa: S603
        command,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        env=os.environ | {"LOG_LEVEL": "ERROR", "BC_SKIP_MAPPING": "TRUE"},
    )
    try:
        report = json.loads(done.stdout)
        results = report["results"]
    except (ValueError, KeyError, TypeError) as error:
        msg = f"checkov ended with {done.returncode} and no report: {done.stderr.strip()[-500:]}"
        raise CheckovError(msg) from error
    read = {Path(one["file_path"]).stem for kind in ("passed_checks", "failed_checks") for one in results[kind]}
    if report["summary"]["parsing_errors"] or read != sources:
        msg = f"checkov read {sorted(read)}, expected {sorted(sources)}: {results.get('parsing_errors')}"
        raise CheckovError(msg)
    return sorted(
        Violation(Path(one["file_path"]).stem, one["check_id"], one["resource"], one["check_name"])
        for one in results["failed_checks"]
    )
