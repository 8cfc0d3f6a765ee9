"""The kinds of objects we use: where the API has them and what they are decoded into."""

from __future__ import annotations

from typing import Any, Generic, TypeVar
from urllib.parse import quote

import msgspec

from stretto.kubernetes.model import ElasticJob, Lease, ListMeta, Node, Pod, Thing

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T]):
    metadata: ListMeta
    items: list[T] | None = None


class Kind(Generic[T]):
    """One resource of the API and the struct its objects are decoded into."""

    def __init__(self, group: str, version: str, plural: str, struct: type[T], *, namespaced: bool = True) -> None:
        self.group = group
        self.version = version
        self.plural = plural
        self.struct = struct
        self.namespaced = namespaced
        self.root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        self.one: msgspec.json.Decoder[T] = msgspec.json.Decoder(struct)
        self.many: msgspec.json.Decoder[Page[T]] = msgspec.json.Decoder(Page[struct])  # type: ignore[valid-type]

    def __repr__(self) -> str:
        return f"Kind({self.plural}.{self.group or 'core'}/{self.version})"

    def path(self, namespace: str = "", name: str = "", sub: str = "") -> str:
        """Where it is; without a namespace, all of them."""
        path = f"{self.root}/namespaces/{namespace}/{self.plural}" if namespace else f"{self.root}/{self.plural}"
        if name:
            path = f"{path}/{quote(name, safe='')}"
        return f"{path}/{sub}" if sub else path

    def address(self, name: str, namespace: str, sub: str = "") -> str:
        """Where one object is. An empty name would mean all of them, which no caller of this wants."""
        if not name or (self.namespaced and not namespace):
            raise ValueError(
                f"an object of {self.plural} needs a name" + (" and a namespace" if self.namespaced else "")
            )
        return self.path(namespace if self.namespaced else "", name, sub)


PODS = Kind("", "v1", "pods", Pod)
NODES = Kind("", "v1", "nodes", Node, namespaced=False)
ELASTIC_JOBS = Kind("stretto.dev", "v1alpha1", "elasticjobs", ElasticJob)
LEASES = Kind("coordination.k8s.io", "v1", "leases", Lease)
SECRETS: Kind[dict[str, Any]] = Kind("", "v1", "secrets", dict)
CONFIG_MAPS: Kind[dict[str, Any]] = Kind("", "v1", "configmaps", dict)
SERVICES = Kind("", "v1", "services", Thing)
NAMESPACES: Kind[dict[str, Any]] = Kind("", "v1", "namespaces", dict, namespaced=False)
EVENTS: Kind[dict[str, Any]] = Kind("", "v1", "events", dict)
DEPLOYMENTS = Kind("apps", "v1", "deployments", Thing)
HPAS = Kind("autoscaling", "v2", "horizontalpodautoscalers", Thing)
HPAS_BEFORE_1_23 = Kind("autoscaling", "v2beta2", "horizontalpodautoscalers", Thing)
PRIORITY_CLASSES: Kind[dict[str, Any]] = Kind("scheduling.k8s.io", "v1", "priorityclasses", dict, namespaced=False)
CUSTOM_RESOURCES: Kind[dict[str, Any]] = Kind(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", dict, namespaced=False
)
