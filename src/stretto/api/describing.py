"""The OpenAPI document: true to what is sent, because it is made of the very types that are encoded and decoded."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

import stretto
from stretto.api import bodies
from stretto.api.answers import SHAPES
from stretto.api.problems import MEDIA_TYPE
from stretto.spec import schema as job_file_schema

_REF = "#/components/schemas/{name}"


def answers(shape: str, status: int = 200, text: str = "As asked for.") -> dict[int | str, dict[str, Any]]:
    """`responses=` of an endpoint that answers with this shape; every error is a problem."""
    return {status: {"description": text, "content": {"application/json": {"schema": _ref(shape)}}}, **ERRORS}


def text_answer(media_type: str, text: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": text, "content": {media_type: {"schema": {"type": "string"}}}}, **ERRORS}


def takes(shape: str) -> dict[str, Any]:
    """`openapi_extra=` of an endpoint with a JSON body of this shape."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _ref(shape)}}}}


def may_take(shape: str) -> dict[str, Any]:
    """The same where the body may be left out."""
    return {"requestBody": {"content": {"application/json": {"schema": _ref(shape)}}}}


def _ref(shape: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=shape)}


ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "What went wrong.", "content": {MEDIA_TYPE: {"schema": _ref("Problem")}}}
}

SUBMIT: dict[str, Any] = {
    "parameters": [
        {
            "name": "cwd",
            "in": "query",
            "description": "The folder that it is submitted from, absolute; where the body does not say so.",
            "schema": {"type": "string"},
        },
        {
            "name": "dry_run",
            "in": "query",
            "description": "Only say what would become of it.",
            "schema": {"type": "boolean", "default": False},
        },
        {
            "name": "Idempotency-Key",
            "in": "header",
            "description": "The same key gives the same job again.",
            "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
        },
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"anyOf": [_ref("JobFile"), _ref("Submission")]}},
            "application/yaml": {"schema": _ref("JobFile")},
        },
    },
    "security": [{"token": []}],
}


def describe(app: FastAPI) -> None:
    """Make `/v1/openapi.json` when it is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(title="Stretto", version=stretto.__version__, routes=app.routes)
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas |= _schemas()
    return made


def _schemas() -> dict[str, Any]:
    asked = (
        bodies.Scale, bodies.Migrate, bodies.Suspend, bodies.Drain, bodies.SetPolicy, bodies.TokenRequest,
    )  # fmt: skip
    named = {**SHAPES, **{body.__name__: body for body in asked}}
    roots, schemas = msgspec.json.schema_components(list(named.values()), ref_template=_REF)
    for name, root in zip(named, roots, strict=True):
        if root != _ref(name):
            assert name not in schemas, f"two shapes are called {name}"
            schemas[name] = root
    file = job_file_schema()
    definitions = file.pop("$defs", {})
    file.pop("$schema", None)
    assert not schemas.keys() & definitions.keys()
    schemas |= {"JobFile": file, **definitions}
    schemas["Submission"] = {
        "type": "object",
        "description": "A job file with the surroundings it was submitted from.",
        "properties": {
            "job": {"anyOf": [_ref("JobFile"), {"type": "string", "description": "The job file's text, in YAML."}]},
            "cwd": {"type": "string"},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "required": ["job"],
        "additionalProperties": False,
    }
    return dict(_with_refs(schemas))


def _with_refs(value: Any) -> Any:
    """Pydantic's references, as this document has them."""
    if isinstance(value, dict):
        return {
            key: one.replace("#/$defs/", "#/components/schemas/") if key == "$ref" else _with_refs(one)
            for key, one in value.items()
        }
    return [_with_refs(one) for one in value] if isinstance(value, (list, tuple)) else value
