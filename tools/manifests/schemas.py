"""Objects against their schemas: Kubernetes' own by kubernetes-validate, custom resources by their definitions.

Runs in .venv-deploy, which has both libraries.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tools.manifests.render import ROOT, Object

VERSIONS = ("1.32", "1.36")
CRDS_VARIABLE = "SAO_CRDS"
BESIDE = ROOT.parent / "shared" / "crds"
OF_KUBERNETES = frozenset({"", "apps", "policy", "networking.k8s.io", "rbac.authorization.k8s.io", "batch"})
"""API groups that kubernetes-validate knows."""


def group_of(one: Object) -> str:
    """The API group of an object; empty for the core."""
    group, slash, _ = str(one["apiVersion"]).partition("/")
    return group if slash else ""


def is_custom(one: Object) -> bool:
    """Whether a CustomResourceDefinition describes it."""
    return group_of(one) not in OF_KUBERNETES


def kubernetes_errors(objects: Sequence[Object], version: str) -> list[str]:
    """What Kubernetes of this version would refuse, unknown fields among it."""
    found = []
    for one in objects:
        if is_custom(one):
            continue
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            found.append(f"{label(one)}: {error.message} (Kubernetes {version})")
    return found


def crds_folder() -> tuple[Path | None, str]:
    """Where definitions lie, or none and the reason; FileNotFoundError when SAO_CRDS names no folder."""
    said = os.environ.get(CRDS_VARIABLE)
    if said:
        folder = Path(said)
        if not folder.is_dir():
            msg = f"{CRDS_VARIABLE}={said} is no folder; expected one of CustomResourceDefinitions as *.yaml"
            raise FileNotFoundError(msg)
        return folder, ""
    if BESIDE.is_dir():
        return BESIDE, ""
    return None, f"{CRDS_VARIABLE} is not set and {BESIDE.relative_to(ROOT.parent)} is not beside the repository"


def custom_errors(objects: Sequence[Object], folder: Path) -> list[str]:
    """What a definition in `folder` refuses, unknown fields among it; also a kind that none defines."""
    schemas, found = definitions(folder), []
    for one in objects:
        if not is_custom(one):
            continue
        schema = schemas.get((one["apiVersion"], one["kind"]))
        if schema is None:
            found.append(f"{label(one)}: no definition of {one['apiVersion']} {one['kind']} in {folder}")
            continue
        for error in jsonschema.Draft7Validator(schema).iter_errors(one):
            where = ".".join(str(part) for part in error.absolute_path) or "it"
            found.append(f"{label(one)}: {where}: {error.message}")
    return found


@cache
def definitions(folder: Path) -> dict[tuple[str, str], Any]:
    """Schema by (apiVersion, kind), unknown fields refused wherever the definition does not preserve them."""
    found: dict[tuple[str, str], Any] = {}
    for path in sorted(folder.glob("*.yaml")):
        for one in yaml.load_all(path.read_text(), Loader=_LOADER):
            if not one or one.get("kind") != "CustomResourceDefinition":
                continue
            spec = one["spec"]
            for version in spec["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def strict(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """The schema in JSON Schema's words: unknown fields refused, int-or-string as the union that it is."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items() if key != "format"}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    open_ended = made.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in made
    if isinstance(made.get("properties"), dict) and not open_ended and made.get("type") == "object":
        made["additionalProperties"] = False
    return made


def label(one: Object) -> str:
    """Kind and name."""
    return f"{one.get('kind')} {one.get('metadata', {}).get('name')}"


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
