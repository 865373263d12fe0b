"""`make k8s-check`: every overlay rendered, and judged by everything that knows something about it.

kubernetes   Kubernetes' own schemas, unknown fields refused, for each version of tools/manifests/schemas.py
custom       the definitions of custom resources, found at $SAO_CRDS or in ../shared/crds
checkov      its policies; deploy/k8s/checkov.toml explains each that is not followed
edges        NetworkPolicies against the table of docs/architecture.md
consistency  what the parts say about each other (tools/manifests/consistency.py)
run file     `sao check` of the run file that the pods read

`--mutate` breaks the manifests in every way of tools/manifests/mutations.py instead, and fails when one goes unnoticed.
Exit status 0: nothing found; 1: something was; 2: it could not be checked.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.manifests import consistency, edges, mutations, policy, schemas
from tools.manifests.render import OVERLAYS, ROOT, Object, RenderError, checked_as, loader, render_overlay, render_with

SAO = ROOT / ".venv" / "bin" / "python"
_SAO_TIMEOUT_S = 120

Rendered = Mapping[str, Sequence[Object]]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutate", action="store_true", help="show that each known mistake is noticed")
    mutate: bool = parser.parse_args(argv).mutate
    try:
        rendered: dict[str, list[Object]] = {name: render_overlay(name) for name in OVERLAYS}
        own = {
            "gpu+managed-redis": render_with("gpu", ["managed-redis"]),
            "gpu-multi+traces": render_with("gpu-multi", ["traces"]),
        }
        folder, reason = schemas.crds_folder()
        if folder is None:
            sys.stdout.write(f"custom resources are not checked: {reason}\n")
        if mutate:
            return _mutate(rendered, folder)
        return _check(rendered | own, folder)
    except (FileNotFoundError, RenderError, policy.CheckovError, ValueError) as error:
        sys.stderr.write(f"k8s-check: {error}\n")
        return 2


def _check(rendered: Rendered, folder: Path | None) -> int:
    failures = 0
    for name, objects in rendered.items():
        found = [*_of_one(name, objects, folder), *_run_file(objects)]
        failures += len(found)
        sys.stdout.write(f"{name}: {len(objects)} objects, {len(found)} findings\n")
        sys.stdout.writelines(f"  {text}\n" for text in found)
    beside = loader()
    found = [text for version in schemas.VERSIONS for text in _kubernetes(beside, version)]
    found += consistency.exposures(beside)
    failures += len(found)
    sys.stdout.write(f"loader.yaml: {len(found)} findings\n")
    sys.stdout.writelines(f"  {text}\n" for text in found)
    explained = policy.suppressions()
    open_, unused = policy.unexplained(policy.violations({**rendered, "loader": beside}), explained)
    sys.stdout.write(f"checkov: {len(open_)} unexplained violations, {len(explained)} explained suppressions\n")
    sys.stdout.writelines(f"  {one.source}: {one}\n" for one in open_)
    sys.stdout.writelines(f"  {one.check} for {one.objects}: suppressed, and nothing violates it\n" for one in unused)
    return 1 if failures or open_ or unused else 0


def _of_one(name: str, objects: Sequence[Object], folder: Path | None) -> Iterator[str]:
    """Everything but checkov, which takes seconds to start."""
    yield from (text for version in schemas.VERSIONS for text in _kubernetes(objects, version))
    if folder is not None:
        yield from schemas.custom_errors(objects, folder)
    if "managed-redis" not in name:  # its store is outside of what labels can say
        yield from edges.differences(objects, name)
    yield from consistency.findings(objects)


def _kubernetes(objects: Sequence[Object], version: str) -> list[str]:
    return schemas.kubernetes_errors([part for one in objects for part in checked_as(one)], version)


def _run_file(objects: Sequence[Object]) -> Iterator[str]:
    """What `sao check` refuses."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(consistency.run_file(objects))
        command = [str(SAO), "-c", "from sao.cli.main import run; run()", "check", str(path)]
        done = subprocess.run(  # noqa: S603
            command, cwd=ROOT, capture_output=True, text=True, timeout=_SAO_TIMEOUT_S, check=False
        )
    if done.returncode != 0:
        yield f"sao check of its run file ends with {done.returncode}: {done.stderr.strip()}"


def _mutate(rendered: Rendered, folder: Path | None) -> int:
    broken: dict[str, list[Object]] = {}
    for index, mutation in enumerate(mutations.MUTATIONS):
        objects = copy.deepcopy(list(rendered[mutation.overlay]))
        mutation.break_(objects)
        broken[f"mutation-{index:02}"] = objects
    wanted = {
        name: objects
        for (name, objects), mutation in zip(broken.items(), mutations.MUTATIONS, strict=True)
        if mutation.caught_by == "checkov"
    }
    open_, _ = policy.unexplained(policy.violations(wanted), policy.suppressions())
    missed = skipped = 0
    for (name, objects), mutation in zip(broken.items(), mutations.MUTATIONS, strict=True):
        by_checkov = [str(one) for one in open_ if one.source == name]
        found = _caught(mutation, objects, folder, by_checkov)
        verdict = "skipped" if found is None else "caught" if found else "MISSED"
        missed += verdict == "MISSED"
        skipped += verdict == "skipped"
        because = (found or [""])[0][:110]
        sys.stdout.write(f"{verdict:<8}{mutation.caught_by:<12}{mutation.overlay:<11}{mutation.name:<46}{because}\n")
    sys.stdout.write(f"{len(mutations.MUTATIONS)} mutations, {missed} missed, {skipped} skipped\n")
    return 1 if missed else 0


def _caught(
    mutation: mutations.Mutation, objects: Sequence[Object], folder: Path | None, by_checkov: Sequence[str]
) -> list[str] | None:
    """What the responsible check says; none when it cannot run here."""
    match mutation.caught_by:
        case "kubernetes":
            return [text for version in schemas.VERSIONS for text in _kubernetes(objects, version)]
        case "custom":
            return None if folder is None else schemas.custom_errors(objects, folder)
        case "checkov":
            return list(by_checkov)
        case "edges":
            return edges.differences(objects, mutation.overlay)
        case "consistency":
            return consistency.findings(objects)


if __name__ == "__main__":
    sys.exit(main())
