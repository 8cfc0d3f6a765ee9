"""The definition of ElasticJob: structural, generated from the job file's model, and of one mind with it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from stretto.errors import SpecError
from stretto.kubernetes.elastic_job import elastic_job, job_file
from stretto.kubernetes.fields import AS_IN_JOB_FILE, NOT_ON_KUBERNETES, camel
from stretto.kubernetes.schema import cel_patch, crd, spec_schema
from stretto.kubernetes.structural import structural
from stretto.spec import load
from stretto.spec.model import JobFile

KEYWORDS = {
    "additionalProperties", "default", "description", "enum", "exclusiveMinimum", "format", "items", "maxItems",
    "maxLength", "maximum", "minItems", "minLength", "minimum", "pattern", "properties", "required", "type",
    "x-kubernetes-int-or-string", "x-kubernetes-list-map-keys", "x-kubernetes-list-type",
    "x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations",
}  # fmt: skip


def object_schema(cel: bool) -> dict[str, Any]:
    found: dict[str, Any] = crd(cel)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if inner in schema:
            yield from nodes(schema[inner], f"{path}.{inner}")


def defaulted(value: Any, schema: dict[str, Any]) -> Any:
    """As the API server does it."""
    if isinstance(value, dict):
        fields = schema.get("properties", {})
        absent = {name: copy.deepcopy(field["default"]) for name, field in fields.items() if "default" in field}
        return {name: defaulted(item, fields.get(name, {})) for name, item in {**absent, **value}.items()}
    return value


def accepts(spec: dict[str, Any]) -> bool:
    return jsonschema_rs.Draft202012Validator(_plain(spec_schema())).is_valid(spec)


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """What a structural schema means, in JSON Schema."""
    made = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if made.pop("exclusiveMinimum", False):
        made["exclusiveMinimum"] = made.pop("minimum")
    if "properties" in made:
        made["properties"] = {name: _plain(field) for name, field in made["properties"].items()}
        made.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    for inner in ("items", "additionalProperties"):
        if isinstance(made.get(inner), dict):
            made[inner] = _plain(made[inner])
    return made


@pytest.mark.parametrize("cel", [False, True])
def test_it_is_structural(cel: bool) -> None:
    for path, node in nodes(object_schema(cel)):
        assert node.keys() <= KEYWORDS, path
        assert ("type" in node) != bool(node.get("x-kubernetes-int-or-string")), path
        assert isinstance(node.get("type", ""), str), path
        assert "properties" not in node or "additionalProperties" not in node, path
        assert set(node.get("required", [])) <= node.get("properties", {}).keys(), path
        assert None not in (node.get("default", 0), node.get("enum", [0])), path


def test_every_field_of_spec_and_status_is_explained() -> None:
    of_ours = (".spec", ".status")
    inside = re.compile(r"\.(template|conditions)\.|\.(items|additionalProperties)$")
    for path, node in nodes(object_schema(False)):
        if path.startswith(of_ours) and not inside.search(path):
            assert node.get("description"), path


def test_all_fields_of_the_job_file_are_here_or_named_as_not() -> None:
    elsewhere = {"name", "labels", "kind", "run", "workers", "elastic"}
    assert set(AS_IN_JOB_FILE) | elsewhere | NOT_ON_KUBERNETES.keys() == set(JobFile.model_fields)
    ours = {"workers", "run", "command", "suspend", "template"}
    assert spec_schema()["properties"].keys() == {camel(name) for name in AS_IN_JOB_FILE} | ours


def test_names_columns_and_subresources() -> None:
    definition = crd(False)
    assert definition["metadata"]["name"] == "elasticjobs.stretto.dev"
    assert definition["spec"]["names"]["shortNames"] == ["ej"]
    assert definition["spec"]["names"]["categories"] == ["all"]
    (version,) = definition["spec"]["versions"]
    columns = [column["name"].upper() for column in version["additionalPrinterColumns"]]
    assert columns == ["PHASE", "WORKERS", "STEP", "WAITING-FOR", "AGE"]
    assert version["subresources"]["status"] == {}
    fields = object_schema(False)["properties"]
    paths = [*version["subresources"]["scale"].values()]
    paths += [column["jsonPath"] for column in version["additionalPrinterColumns"][:-1]]
    for path in paths:
        _, section, *rest = path.split(".")
        node = fields[section]
        for part in rest:
            node = node["properties"][part]
        assert node["type"] in ("integer", "string"), path


def test_the_defaults_are_the_job_files() -> None:
    bare = {"image": "x", "run": "y"}
    filled = defaulted(bare, spec_schema())
    assert filled == {
        **bare,
        "queue": "default",
        "retries": 3,
        "consistency": "default",
        "suspend": False,
        "stop": {"grace": 30},
        "checkpoint": {"every": 60, "keep": 3},
        "workers": {"min": 1, "max": 1, "step": 1, "explore": True},
    }
    assert accepts(filled)


SPECS: list[dict[str, Any]] = [
    {},
    {"workers": {"max": 8}},
    {"workers": {"min": 2, "max": 8, "step": "pow2", "requested": 4}, "level": "restart"},
    {"resources": {"gpu": 0, "cpu": 2, "memory": "4Gi"}, "deadline": 90, "stop": {"after": "1h30m"}},
    {"service": {"port": 80}},
    {"service": {"port": 80, "replicas": {"max": 3}, "target": {"requests": 0.5}, "health": "/x", "hold": "5m"}},
    {"run": None, "command": ["python", "x"], "env": {"A": "1"}, "workdir": "/x", "hyperparameters": {"a": True}},
    {"template": {"spec": {"containers": [{"name": "worker"}], "anything": [1]}}, "checkpoint": {"dir": "x"}},
]


@pytest.mark.parametrize("spec", SPECS)
def test_defaults_of_the_server_change_nothing(spec: dict[str, Any]) -> None:
    """An object means the same before and after the API server filled it in."""
    given = {name: value for name, value in {"image": "x", "run": "y", **spec}.items() if value is not None}
    assert accepts(given)
    filled = defaulted(given, spec_schema())
    assert accepts(filled)
    about = {"metadata": {"name": "a"}}
    assert job_file({**about, "spec": filled}) == job_file({**about, "spec": given})


BAD: list[dict[str, Any]] = [
    {"workers": {"min": 0, "max": 3}},
    {"workers": {"min": 1}},
    {"workers": {"max": 100_001}},
    {"workers": {"max": 3, "step": "pow3"}},
    {"workers": {"max": 3, "step": 0}},
    {"workers": 3},
    {"resources": {"gpu": 0.5}},
    {"resources": {"gpu": 2000}},
    {"resources": {"cpu": "x"}},
    {"resources": {"memory": "4"}},
    {"stop": {"grace": "soon"}},
    {"stop": {"grace": 0}},
    {"level": "stretchy"},
    {"priority": 101},
    {"priority": -1},
    {"queue": "Team A"},
    {"env": {"A": []}},
    {"workdir": "a"},
    {"service": {}},
    {"service": {"port": 0}},
    {"service": {"port": 80, "target": {"cpu": 0}}},
    {"service": {"port": 80, "health": "x"}},
    {"run": ["a"]},
    {"run": None, "command": "a"},
    {"run": None, "command": []},
    {"suspend": "no"},
    {"template": 3},
    {"image": ""},
    {"retries": 1.5},
    {"unknown": 1},
]


@pytest.mark.parametrize("spec", BAD)
def test_schema_and_model_refuse_the_same(spec: dict[str, Any]) -> None:
    given = {name: value for name, value in {"image": "x", "run": "y", **spec}.items() if value is not None}
    assert not accepts(given)
    with pytest.raises(SpecError):
        job_file({"metadata": {"name": "a"}, "spec": given})


@pytest.mark.parametrize("expect", ["2h", 0.5, "5000 steps"])
def test_what_we_write_the_schema_accepts(expect: str | float) -> None:
    full = load(
        {
            "name": "mnist", "queue": "team-a", "priority": 60, "run": "python train.py", "setup": ["pip", "install"],
            "workdir": "/x", "env": {"LR": "1"}, "image": "y", "workers": 4, "elastic": {"max": 8, "step": "pow2"},
            "level": "restart", "resources": {"gpu": 2, "gpu_memory": "4Gi", "gpu_type": "a", "cpu": 0.5},
            "deadline": "1.5h", "expect": expect, "after": "b", "stop": {"after": 0.5, "grace": "1ms"}, "retries": 0,
            "checkpoint": {"dir": "c", "every": "5m", "keep": 2}, "hyperparameters": {"a": 1.5}, "labels": {"k": "v"},
        }
    )  # fmt: skip
    made = elastic_job(full)
    assert accepts(made["spec"])
    assert job_file(made).expect == full.expect


# Rules in CEL: no server here has them, so only their shape is looked at.


def test_the_definition_without_rules_has_none() -> None:
    assert "x-kubernetes-validations" not in str(crd(False))


def test_rules_speak_of_fields_that_exist() -> None:
    count = 0
    for path, node in nodes(object_schema(True)):
        for rule in node.get("x-kubernetes-validations", []):
            count += 1
            assert rule["message"]
            assert rule["rule"].count("(") == rule["rule"].count(")")
            for chain in re.findall(r"(?:self|oldSelf)((?:\.[A-Za-z]+)+)", rule["rule"]):
                at = node
                for part in chain.split(".")[1:]:
                    at = at["properties"][part]
                assert "template" not in chain or f"has(self{chain})" in rule["rule"], path
    assert count > 10


def test_the_patch_makes_one_definition_of_the_other() -> None:
    patched = crd(False)
    for change in cel_patch():
        *parents, last = change["path"].strip("/").split("/")
        at: Any = patched
        for part in parents:
            at = at[int(part)] if isinstance(at, list) else at[part]
        assert last not in at
        at[last] = change["value"]
    assert patched == crd(True)


def test_a_choice_that_no_structural_schema_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="no structural schema"):
        structural({"anyOf": [{"type": "boolean"}, {"type": "array"}]})
