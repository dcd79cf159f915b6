from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests import ROOT
from tests.k8s.chart import rendered

Object = dict[str, Any]

SCHEMAS = Path(os.environ.get("SWIFTBATCH_SCHEMAS", ROOT.parent / "shared" / "schemas"))
CORE = ("v1", "apps/v1", "batch/v1", "networking.k8s.io/v1", "policy/v1")
RAY = "ray.io/v1"
VERSIONS = tuple(f"1.{number}.0" for number in (31, 34, 35, 36, 37))  # the chart's oldest, and the newest four
OPERATOR = ("monitoring.coreos.com/v1", "monitoring.coreos.com/v1alpha1")
# their definitions are not at hand: the contents of the objects that we have
NAMES = {"type": "object", "additionalProperties": {"type": "string"}}
MONITORS: dict[str, Any] = {
    "PodMonitor": {
        "selector": {"matchLabels": NAMES},
        "podMetricsEndpoints": [{"port": {"type": "string"}, "interval": {}, "authorization": {"credentials": NAMES}}],
    },
    "PrometheusRule": {
        "groups": [
            {
                "name": {"type": "string"},
                "rules": [{"alert": {"type": "string"}, "expr": {}, "for": {}, "labels": NAMES, "annotations": NAMES}],
            }
        ]
    },
    "ScrapeConfig": {
        "httpSDConfigs": [{"url": {"type": "string"}, "refreshInterval": {}, "authorization": {"credentials": NAMES}}],
        "scrapeInterval": {},
    },
}


@functools.cache
def render(overlay: str) -> list[Object]:
    return rendered(overlay, "createNamespace=true")


def one(objects: list[Object], kind: str, name: str | None = None) -> Object:
    (found,) = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    return found


def ray_containers(objects: list[Object]) -> list[Object]:
    spec = one(objects, "RayCluster")["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [group["template"]["spec"]["containers"][0] for group in groups]


def pods(objects: list[Object]) -> dict[str, Object]:
    return {where: template for each in objects for where, template in _templates(each, each["kind"])}


def _templates(value: Any, where: str) -> Iterator[tuple[str, Object]]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _templates(item, f"{where}/{number}")
    elif isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield where, value
        for name, item in value.items():
            yield from _templates(item, f"{where}/{name}")


def settings(objects: list[Object]) -> dict[str, str]:
    return dict(one(objects, "ConfigMap", "swiftbatch-settings")["data"])


def commands(objects: list[Object]) -> dict[str, list[str]]:
    """Return the `swiftbatch` arguments of all commands, shell-expanded, by place."""
    found = {}
    for each in objects:
        if each["kind"] == "ConfigMap":
            continue
        for where, text in _texts(each, f"{each['kind']}/{each['metadata']['name']}"):
            if command := re.search(r"(?:^| )swiftbatch ([a-z].*)", text):
                words = re.sub(r"\$(\w+)", lambda name: settings(objects)[name[1]], command[1])
                found[where] = words.partition(" '||' ")[0].split()
    return found


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        yield where, " ".join(value)
    else:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, item in items:
            yield from _texts(item, f"{where}/{name}")


def validate(each: Object, version: str = VERSIONS[-1]) -> None:
    """Check an object's fields as Kubernetes of a version does; skip KubeRay's without their schemas."""
    if each["apiVersion"] in CORE:
        kubernetes_validate.validate(each, version, strict=True)
        return
    schema = _ray_schema(each["kind"]) if each["apiVersion"] == RAY else _closed_form(MONITORS[each["kind"]])
    assert each["apiVersion"] in (RAY, *OPERATOR)
    content = each if each["apiVersion"] == RAY else each["spec"]
    jsonschema.Draft202012Validator(schema).validate(content)


def validate_pods(objects: list[Object], version: str = VERSIONS[-1]) -> None:
    """Check the fields of all pods, KubeRay's too."""
    for template in pods(objects).values():
        named = {**template, "metadata": {"name": "pod", **template["metadata"]}}
        validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": named}, version)


@functools.cache
def _ray_schema(kind: str) -> Any:
    path = SCHEMAS / f"{kind}-v1.json"
    if not path.exists():
        pytest.skip(f"no schema of {kind}: SWIFTBATCH_SCHEMAS names the folder with KubeRay's")
    return _strict(json.loads(path.read_text(encoding="utf-8")))


def _strict(schema: Any) -> Any:
    """Make a schema as strict as the API server's."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    strict = {name: _strict(value) for name, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    if schema.get("nullable") is True:
        strict["type"] = [schema["type"], "null"]
    return strict


def _closed_form(form: Any) -> Any:
    """Make a JSON schema from an example, with all its fields and no others."""
    if isinstance(form, list):
        return {"type": "array", "minItems": 1, "items": _closed_form(form[0])}
    if not form or "type" in form:
        return form
    properties = {name: _closed_form(value) for name, value in form.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}
