"""From pydantic's JSON Schema to the structural schemas that Kubernetes demands of its resources.

Kubernetes wants one type per field, no references, no `null`, and the keywords of OpenAPI 3.0. A choice of types
becomes the nearest thing it has: a number or a text is `x-kubernetes-int-or-string`, a text or a list of texts is the
list. Unknown fields are not forbidden but pruned. Names become camel case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stretto.kubernetes.fields import camel

Schema = dict[str, Any]
ANYTHING: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_KEPT = (
    "description", "enum", "format", "maxItems", "maxLength", "maximum", "minItems", "minLength", "minimum", "pattern",
    "required", "type",
)  # fmt: skip


def structural(schema: Mapping[str, Any]) -> Schema:
    """The same, as a structural schema."""
    return _converted(schema, schema.get("$defs", {}))


def _converted(node: Mapping[str, Any], defs: Mapping[str, Any]) -> Schema:
    node = _one_type(_resolved(node, defs), defs)
    made: Schema = {key: node[key] for key in _KEPT if key in node}
    if "required" in made:
        made["required"] = [camel(name) for name in made["required"]]
    if "exclusiveMinimum" in node:
        made |= {"minimum": node["exclusiveMinimum"], "exclusiveMinimum": True}
    if "x-kubernetes-int-or-string" in node:
        made["x-kubernetes-int-or-string"] = True
    if "properties" in node:
        made["properties"] = {camel(name): _converted(field, defs) for name, field in node["properties"].items()}
    elif made.get("type") == "object":
        made |= _map(node.get("additionalProperties"), defs)
    if "items" in node:
        made["items"] = _converted(node["items"], defs)
    default = _default(node.get("default"), made)
    return made if default in (None, {}, []) else {**made, "default": default}


def _resolved(node: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any]:
    """References followed; what is said beside one comes first."""
    while "$ref" in node:
        beside = {key: value for key, value in node.items() if key != "$ref"}
        node = {**defs[str(node["$ref"]).rsplit("/", 1)[1]], **beside}
    return node


def _one_type(node: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any]:
    """A choice of types as one schema."""
    if "anyOf" not in node:
        return node
    choices = {_type(choice): choice for choice in _choices(node, defs)}
    rest = {key: value for key, value in node.items() if key != "anyOf"}
    if len(choices) == 1:
        return {**next(iter(choices.values())), **rest}
    if choices.keys() == {"string", "array"}:
        return {**choices["array"], **rest}
    number = choices.get("integer") or choices.get("number")
    if number is None or len(choices) != 2 or "string" not in choices:
        raise ValueError(f"no structural schema says {sorted(choices)}")
    text = choices["string"]
    pattern = {"pattern": f"^{text['const']}$"} if "const" in text else {}
    both = {**text, **number, **pattern, **rest, "x-kubernetes-int-or-string": True}
    return {key: value for key, value in both.items() if key != "type"}


def _choices(node: Mapping[str, Any], defs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for choice in node["anyOf"]:
        found = _resolved(choice, defs)
        if "anyOf" in found:
            yield from _choices(found, defs)
        elif found.get("type") != "null":
            yield found


def _type(choice: Mapping[str, Any]) -> str:
    return "string" if isinstance(choice.get("const"), str) else str(choice["type"])


def _map(values: Any, defs: Mapping[str, Any]) -> Schema:
    """What a map holds: one type, or anything where several are possible."""
    if isinstance(values, Mapping) and isinstance(values.get("type"), str):
        return {"additionalProperties": _converted(values, defs)}
    return {"x-kubernetes-preserve-unknown-fields": True}


def _default(value: Any, schema: Schema) -> Any:
    """Without nulls, and with the names and numbers of the schema."""
    if isinstance(value, Mapping):
        fields = schema.get("properties", {})
        return {
            camel(name): _default(item, fields.get(camel(name), {}))
            for name, item in value.items()
            if item not in (None, {}, [])
        }
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
