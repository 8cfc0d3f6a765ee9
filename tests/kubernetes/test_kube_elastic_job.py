"""ElasticJob objects: what they mean as a job file and as a pod; what is refused, and in whose words; and back."""

from __future__ import annotations

import copy
import string
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.core.request import POWERS_OF_TWO
from stretto.errors import Problem, SpecError
from stretto.kubernetes.elastic_job import elastic_job, job_class, job_file, pod_requests, read, worker_template
from stretto.kubernetes.fields import camel, snake
from stretto.spec import JobFile, load

GPU = "nvidia.com/gpu"


def object_with(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "stretto.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "mnist", "namespace": "lab"},
        "spec": {"image": "train:1", "run": "python train.py", **spec},
    }


def pod_of(*containers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"spec": {"containers": list(containers), **more}}


def asks(**resources: Any) -> dict[str, Any]:
    return {"requests": {GPU if name == "gpu" else name: value for name, value in resources.items()}}


def trainer(obj: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = worker_template(obj)["spec"]["containers"][0]
    return found


def problems(obj: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        job_file(obj)
    assert all(problem.field and problem.text for problem in caught.value.problems)
    assert all(f"{problem.field}: {problem.text}" in str(caught.value) for problem in caught.value.problems)
    return {problem.field: problem.text for problem in caught.value.problems}


# What an object means


def test_image_and_command_are_enough() -> None:
    file = job_file(object_with())
    assert (file.name, file.image, file.run) == ("mnist", "train:1", "python train.py")
    request = file.request()
    assert (request.min_workers, request.max_workers, request.level) == (1, 1, "rigid")
    assert request.width_milli == 1000


def test_everything_at_once() -> None:
    obj = object_with(
        queue="team-a",
        priority=60,
        setup="pip install x",
        workdir="/code",
        env={"LR": "1e-3"},
        workers={"min": 2, "max": 8, "step": "pow2", "requested": 4},
        level="restart",
        resources={"gpu": 2, "gpuMemory": "40Gi", "gpuType": ["a100", "h100"], "cpu": "1500m", "memory": "4Gi"},
        deadline="1h30m",
        expect="2h",
        after=["prepare"],
        stop={"after": 90, "grace": "10s"},
        retries=1,
        checkpoint={"dir": "/ckpt", "every": "5m", "keep": 2},
        hyperparameters={"batchSize": 256, "amp": True},
    )
    obj["metadata"]["labels"] = {"team": "vision", "stretto.dev/class": "resnet"}
    file = job_file(obj)
    request = file.request()
    assert (request.min_workers, request.max_workers, request.requested, request.step) == (2, 8, 4, POWERS_OF_TWO)
    assert (request.width_milli, request.cpu_milli, request.memory_mib) == (2000, 1500, 4096)
    assert (request.gpu_memory_mib, request.pools) == (2 * 40 * 1024, ("a100", "h100"))
    assert (request.deadline_s, request.level, request.priority) == (5400.0, "restart", 60)
    assert (request.expect_s, request.hyperparameters) == (7200.0, (("amp", 1.0), ("batchSize", 256.0)))
    assert (file.stop.after, file.stop.grace, file.after) == (90.0, 10.0, ("prepare",))
    assert (file.checkpoint.dir, file.checkpoint.every, file.checkpoint.keep) == ("/ckpt", 300.0, 2)
    assert file.hyperparameters == {"batchSize": 256, "amp": True}
    assert file.labels == {"team": "vision"}
    assert job_class(obj) == "resnet"


@pytest.mark.parametrize(
    ("workers", "level", "sizes", "becomes"),
    [
        ({"min": 1, "max": 8}, None, (1, 8), "elastic"),
        ({"max": 8}, None, (1, 8), "elastic"),
        ({"min": 3, "max": 3}, None, (3, 3), "rigid"),
        ({"min": 3, "max": 3}, "rigid", (3, 3), "rigid"),
        ({"min": 3, "max": 3}, "elastic", (3, 3), "elastic"),
        ({"min": 1, "max": 8}, "restart", (1, 8), "restart"),
    ],
)
def test_sizes_and_level(workers: dict[str, int], level: str | None, sizes: tuple[int, int], becomes: str) -> None:
    request = job_file(object_with(workers=workers, level=level)).request()
    assert (request.min_workers, request.max_workers) == sizes
    assert request.level == becomes


def test_what_was_asked_for_follows_a_maximum_that_was_scaled_down() -> None:
    request = job_file(object_with(workers={"min": 1, "max": 3, "requested": 6})).request()
    assert request.requested == 3


def test_null_is_absent() -> None:
    assert job_file(object_with(deadline=None, stop={"grace": None}, template=None)) == job_file(object_with())


def test_the_class_is_the_label_or_the_stem_or_the_name() -> None:
    assert job_class({"metadata": {"name": "a"}}) == "a"
    assert job_class({"metadata": {"name": "mnist-x7k2p", "generateName": "mnist-"}}) == "mnist"
    assert job_class({"metadata": {"name": "mnist-2", "labels": {"stretto.dev/class": "mnist"}}}) == "mnist"


def test_labels_that_a_job_file_cannot_have_are_no_problem() -> None:
    obj = object_with()
    obj["metadata"]["labels"] = {f"k{n}": "v" for n in range(200)} | {"a" * 64 + "/x": "v"}
    assert len(job_file(obj).labels) == 64


def test_reading_changes_nothing_of_the_object() -> None:
    obj = object_with(template=pod_of({"name": "worker", "resources": {"limits": {"cpu": 2}}}), env={"A": "1"})
    before = copy.deepcopy(obj)
    read(obj)
    assert obj == before


# The pod


def test_a_pod_out_of_nothing() -> None:
    template = worker_template(object_with(resources={"gpu": 1, "cpu": "500m", "memory": "4Gi"}, env={"A": "1"}))
    assert template["spec"] == {
        "containers": [
            {
                "name": "worker",
                "image": "train:1",
                "command": ["python", "train.py"],
                "env": [{"name": "A", "value": "1"}],
                "resources": {
                    "requests": {"cpu": "500m", "memory": "4Gi", GPU: "1"},
                    "limits": {"memory": "4Gi", GPU: "1"},
                },
            }
        ],
        "terminationGracePeriodSeconds": 30,
    }


def test_the_container_named_worker_trains_else_the_first() -> None:
    two = [{"name": "log", "image": "log:1"}, {"name": "worker"}]
    log, worker = worker_template(object_with(template=pod_of(*two)))["spec"]["containers"]
    assert log == {"name": "log", "image": "log:1"}
    assert worker["image"] == "train:1"
    first = worker_template(object_with(template=pod_of({"name": "main"}, {"name": "log", "image": "log:1"})))
    assert first["spec"]["containers"][0]["image"] == "train:1"


def test_the_template_is_kept() -> None:
    template = pod_of(
        {"name": "worker", "volumeMounts": [{"name": "data", "mountPath": "/data"}], "workingDir": "/code"},
        volumes=[{"name": "data", "emptyDir": {}}],
        tolerations=[{"key": "gpu", "operator": "Exists"}],
        terminationGracePeriodSeconds=5,
    )
    template["metadata"] = {"labels": {"team": "a"}, "annotations": {"note": "b"}}
    made = worker_template(object_with(template=template, stop={"grace": "40s"}))
    assert made["metadata"] == template["metadata"]
    assert made["spec"]["volumes"] == template["spec"]["volumes"]
    assert made["spec"]["tolerations"] == template["spec"]["tolerations"]
    assert made["spec"]["terminationGracePeriodSeconds"] == 5
    assert made["spec"]["containers"][0]["workingDir"] == "/code"


def test_grace_is_rounded_up_to_seconds() -> None:
    assert worker_template(object_with(stop={"grace": "1500ms"}))["spec"]["terminationGracePeriodSeconds"] == 2


def test_command_of_the_template() -> None:
    container = {"name": "worker", "image": "train:1", "command": ["python"], "args": ["t.py", "$(HOST)"]}
    obj = object_with(template=pod_of(container))
    del obj["spec"]["run"], obj["spec"]["image"]
    assert job_file(obj).run == ("python", "t.py", "$(HOST)")
    assert trainer(obj)["command"] == ["python"]
    assert trainer(obj)["args"] == ["t.py", "$(HOST)"]
    del container["command"]
    assert job_file(obj).run == ("train:1", "t.py", "$(HOST)")
    assert "command" not in trainer(obj)
    assert job_file(object_with(run=None)).run == ("train:1",)
    assert job_file(object_with(run=None, template=pod_of({"args": ["x"]}))).run == ("train:1", "x")


def test_dollars_reach_the_job_as_they_were_written() -> None:
    container = trainer(object_with(run=None, command=["echo", "$(A) $$"], env={"B": "$(A)"}))
    assert container["command"] == ["echo", "$$(A) $$$$"]
    assert container["env"] == [{"name": "B", "value": "$$(A)"}]


def test_variables_of_the_job_come_first() -> None:
    theirs = [{"name": "URL", "value": "http://$(HOST)"}, {"name": "POD", "valueFrom": {"fieldRef": {}}}]
    made = trainer(object_with(env={"HOST": "a"}, template=pod_of({"name": "worker", "env": theirs})))
    assert made["env"] == [{"name": "HOST", "value": "a"}, *theirs]


def test_resources_are_those_of_the_whole_pod() -> None:
    containers = [
        {"name": "worker", "resources": {"requests": {"cpu": 2, "memory": "1Gi"}, "limits": {GPU: 4}}},
        {"name": "log", "image": "log:1", "resources": {"limits": {"cpu": "100m", "memory": "10M"}}},
    ]
    init = [{"name": "fetch", "image": "f", "resources": asks(memory="8Gi", cpu="50m")}]
    obj = object_with(template=pod_of(*containers, initContainers=init, overhead={"cpu": "10m"}))
    file, template, requests = read(obj)
    assert requests == {"cpu": 2110, "memory": 8192, GPU: 4}
    assert (file.resources.cpu, file.resources.memory, file.resources.gpu) == (2110, 8192, 4000)
    assert template["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "2", "memory": "1Gi", GPU: "4"},
        "limits": {GPU: "4"},
    }


def test_a_container_that_states_resources_states_them_all() -> None:
    assert job_file(object_with(template=pod_of({"name": "worker", "resources": asks(cpu=1)}))).resources.gpu == 0
    assert job_file(object_with(template=pod_of({"name": "worker"}))).resources.gpu == 1000
    both = object_with(resources={"gpu": 2}, template=pod_of({"name": "worker", "resources": asks(cpu=1)}))
    assert job_file(both).resources.gpu == 2000
    assert job_file(both).resources.cpu == 1000


def test_the_same_said_twice_is_no_contradiction() -> None:
    container = {
        "name": "worker",
        "image": "train:1",
        "workingDir": "/code",
        "env": [{"name": "A", "value": "1"}],
        "resources": asks(cpu="0.5", memory="1Gi", gpu=1),
    }
    same = {"cpu": "500m", "memory": "1024Mi", "gpu": 1}
    assert job_file(object_with(resources=same, workdir="/code", env={"A": "1"}, template=pod_of(container)))


def test_another_name_for_gpus() -> None:
    obj = object_with(resources={"gpu": 2})
    made = worker_template(obj, gpu_resource="amd.com/gpu")["spec"]["containers"][0]["resources"]
    assert made == {"requests": {"amd.com/gpu": "2"}, "limits": {"amd.com/gpu": "2"}}
    assert job_file(obj, gpu_resource="amd.com/gpu").resources.gpu == 2000


def test_no_gpu() -> None:
    obj = object_with(resources={"gpu": 0})
    assert trainer(obj)["resources"] == {}
    assert job_file(obj).request().width_milli == 0


# Counting a pod as Kubernetes does


def test_containers_add_up_and_init_containers_do_not() -> None:
    assert pod_requests({"containers": [{"resources": asks(cpu="100m")}, {"resources": asks(cpu="0.2")}]}) == {
        "cpu": 300
    }
    init = [{"resources": asks(cpu="1", memory="1Gi")}, {"resources": asks(cpu="2")}]
    assert pod_requests({"containers": [{"resources": asks(cpu="1500m")}], "initContainers": init}) == {
        "cpu": 2000,
        "memory": 1024,
    }


def test_sidecars_run_beside_what_comes_after_them() -> None:
    side = {"restartPolicy": "Always", "resources": asks(cpu="1")}
    init = [{"resources": asks(cpu="4")}, side, {"resources": asks(cpu="3500m")}]
    assert pod_requests({"containers": [{"resources": asks(cpu="2")}], "initContainers": init}) == {"cpu": 4500}
    assert pod_requests({"containers": [{"resources": asks(cpu="5")}], "initContainers": init}) == {"cpu": 6000}


def test_limits_are_requests_where_there_are_no_requests() -> None:
    mixed = {"limits": {"cpu": "4", "memory": "1Gi"}, "requests": {"cpu": "1"}}
    assert pod_requests({"containers": [{"resources": mixed}]}) == {"cpu": 1000, "memory": 1024}


def test_resources_of_the_pod_as_a_whole_count_instead() -> None:
    containers = [{"resources": asks(cpu="1")}, {}]
    whole = {"requests": {"cpu": "3"}, "limits": {"memory": "2Gi"}}
    assert pod_requests({"containers": containers, "resources": whole}) == {"cpu": 3000, "memory": 2048}
    assert pod_requests({"containers": containers, "resources": {"limits": {"cpu": "9"}}}) == {"cpu": 1000}


def test_overhead_is_added() -> None:
    pod = {"containers": [{"resources": asks(cpu="1")}], "overhead": {"cpu": "250m", "memory": "120Mi"}}
    assert pod_requests(pod) == {"cpu": 1250, "memory": 120}


def test_nothing_asked_for_is_nothing() -> None:
    assert pod_requests({}) == {}
    assert pod_requests({"containers": [{"resources": None}, {"resources": {"requests": {"cpu": "0"}}}]}) == {}


@pytest.mark.parametrize(
    ("pod", "field"),
    [
        ({"containers": [{}, {"resources": asks(cpu="x")}]}, "containers[1].resources.requests[cpu]"),
        ({"initContainers": [{"resources": asks(memory="-1")}]}, "initContainers[0].resources.requests[memory]"),
        ({"overhead": {"cpu": []}}, "overhead[cpu]"),
        ({"containers": [{"resources": asks(gpu="0.5")}]}, f"containers[0].resources.requests[{GPU}]"),
        ({"containers": "x"}, "containers"),
        ({"tolerations": 3}, "tolerations"),
    ],
)
def test_a_pod_that_cannot_be_counted(pod: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        pod_requests(pod)
    assert [problem.field for problem in caught.value.problems] == [field]


# What is refused

_BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"workers": {"min": 5, "max": 3}}, "spec.workers.min", "5 is above max 3; exchange them"),
    ({"workers": {"min": 2}}, "spec.workers.max", "is missing"),
    ({"workers": {"min": 0, "max": 3}}, "spec.workers.min", "at least 1"),
    ({"workers": {"max": 10**9}}, "spec.workers.max", "at most 100000"),
    ({"workers": {"max": "4"}}, "spec.workers.max", "not a whole number"),
    ({"workers": {"max": True}}, "spec.workers.max", "not a whole number"),
    ({"workers": 4}, "spec.workers", "not a section"),
    ({"workers": {"max": 4, "step": "pow3"}}, "spec.workers.step", "pow2"),
    ({"workers": {"max": 4, "requested": 0}}, "spec.workers.requested", "below min 1"),
    ({"workers": {"max": 4, "requested": "x"}}, "spec.workers.requested", "not a whole number"),
    ({"workers": {"max": 4}, "level": "rigid"}, "spec.level", "is rigid, but workers go from 1 to 4"),
    ({"level": "stretchy"}, "spec.level", "is not one of"),
    ({"level": "restart", "consistency": "bitwise"}, "spec.consistency", "bitwise needs level"),
    ({"priority": 101}, "spec.priority", "at most 100"),
    ({"queue": "Team A"}, "spec.queue", "is not a name"),
    ({"resources": {"gpu": 0.25}}, "spec.resources.gpu", "the device plugin of the nodes offers"),
    ({"resources": {"gpu": "250m"}}, "spec.resources.gpu", "is a share of a GPU"),
    ({"resources": {"gpu": 1.5}}, "spec.resources.gpu", "cannot be given"),
    ({"resources": {"gpuMemory": "4Gi"}}, "spec.resources.gpuMemory", "say how many GPUs"),
    ({"resources": {"gpu": 0, "gpuMemory": "4Gi"}}, "spec.resources", "gpuMemory and gpuType mean nothing"),
    ({"resources": {"memory": "4"}}, "spec.resources.memory", "with its unit"),
    ({"resources": {"cpu": "fast"}}, "spec.resources.cpu", "CPU cores"),
    ({"resources": {"gpu_type": ["a"]}}, "spec.resources.gpu_type", "did you mean 'gpuType'?"),
    ({"resources": {"mem": "4Gi"}}, "spec.resources.mem", "did you mean 'memory'?"),
    ({"resources": []}, "spec.resources", "not a section"),
    ({"memry": 1}, "spec.memry", "unknown field; known are"),
    ({"roles": {}}, "spec.roles", "unknown field"),
    ({"deadline": "soon"}, "spec.deadline", "length of time"),
    ({"stop": {"grace": -1}}, "spec.stop.grace", "out of range"),
    ({"stop": {"when": "1s"}}, "spec.stop.when", "unknown field"),
    ({"checkpoint": {"keep": 0}}, "spec.checkpoint.keep", "at least 1"),
    ({"retries": "x"}, "spec.retries", "not a whole number"),
    ({"consistency": "strict"}, "spec.consistency", "is not one of"),
    ({"env": {"A B": "1"}}, "spec.env", "is not the name of a variable"),
    ({"env": {"A": {}}}, "spec.env", "the value of A is not text"),
    ({"hyperparameters": {"a": [1]}}, "spec.hyperparameters", "is not a plain value"),
    ({"workdir": "code"}, "spec.workdir", "give a folder of the image"),
    ({"suspend": "yes"}, "spec.suspend", "not true or false"),
    ({"run": ["python"]}, "spec.run", "goes to command"),
    ({"run": " "}, "spec.run", "not a line for the shell"),
    ({"run": "a\0b"}, "spec.run", "NUL"),
    ({"command": ["python"]}, "spec.command", "run as well"),
    ({"run": None, "command": "python x"}, "spec.command", "is not a list of texts"),
    ({"run": None, "command": []}, "spec.command", "is not a list of texts"),
    ({"run": None, "command": ["a\0"]}, "spec.command", "NUL"),
    ({"image": None}, "spec.image", "is missing; give it, or spec.template.spec.containers[0].image"),
    ({"image": ""}, "spec.image", "at least 1"),
    ({"image": 7}, "spec.image", "is not text"),
    ({"run": None, "setup": "pip install x"}, "spec.setup", "needs a command"),
    ({"service": {}}, "spec.service.port", "is missing"),
    ({"service": {"port": 80, "host": "0.0.0.0"}}, "spec.service.host", "unknown field"),
    ({"service": {"port": 80, "hold": "2h"}}, "spec.service.hold", "1h at most"),
    ({"service": {"port": 80, "replicas": {"max": 4, "step": 2}}}, "spec.service.replicas.step", "unknown field"),
    ({"service": {"port": 80, "target": {"cpu": 5, "requests": 5}}}, "spec.service.target", "exactly one"),
    ({"service": {"port": 80}, "workers": {"max": 2}}, "spec.workers", "use spec.service.replicas"),
    ({"service": {"port": 80}, "level": "elastic"}, "spec.level", "does not go with a service"),
    ({"service": {"port": 80}, "deadline": "1h"}, "spec.deadline", "does not go with a service"),
]
_BAD_TEMPLATES: list[tuple[Any, str, str]] = [
    (3, "spec.template", "is not an object"),
    ({"spec": []}, "spec.template.spec", "is not an object"),
    ({"metadata": 1}, "spec.template.metadata", "is not an object"),
    ({"metadata": {"labels": {"a": 1}}}, "spec.template.metadata.labels[a]", "is not text"),
    ({"spec": {"containers": {}}}, "spec.template.spec.containers", "is not a list"),
    ({"spec": {"containers": ["worker"]}}, "spec.template.spec.containers[0]", "is not an object"),
    (pod_of({"image": "other:2"}), "spec.image", "spec.template.spec.containers[0].image is 'other:2'"),
    (pod_of({"command": ["x"]}), "spec.run", "spec.template.spec.containers[0].command as well"),
    (pod_of({"args": ["x"]}), "spec.run", "spec.template.spec.containers[0].args as well"),
    (pod_of({"command": "x"}), "spec.template.spec.containers[0].command", "not a list of texts"),
    (pod_of({"env": {}}), "spec.template.spec.containers[0].env", "is not a list"),
    (pod_of({"env": [{"name": "A", "value": "2"}]}), "spec.env.A", "another value"),
    (pod_of({"env": [{"name": "A", "valueFrom": {}}]}), "spec.env.A", "another value"),
    (pod_of({"workingDir": "/x"}), "spec.workdir", "is '/code', but"),
    (pod_of({"resources": asks(cpu=3)}), "spec.resources.cpu", "is 2, but"),
    (pod_of({"resources": {"limits": {"memory": "1Gi"}}}), "spec.resources.memory", "states 1Gi"),
    (pod_of({"resources": asks(gpu=2)}), "spec.resources.gpu", "is 1, but"),
    (pod_of({"resources": asks(cpu="x")}), "spec.template.spec.containers[0].resources.requests[cpu]", "quantity"),
    (pod_of({"resources": 1}), "spec.template.spec.containers[0].resources", "is not an object"),
    (pod_of({"resources": {"limits": []}}), "spec.template.spec.containers[0].resources.limits", "is not an object"),
    (
        pod_of({"resources": {"requests": {"a/b": 1}, "limits": {"a/b": 2}}}),
        "spec.template.spec.containers[0].resources.limits[a/b]",
        "no burst",
    ),
    (
        pod_of({"resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}),
        "spec.template.spec.containers[0].resources.requests[cpu]",
        "above the limit",
    ),
    (pod_of({}, {"resources": asks(memory="9Pi")}), "spec.template.spec", "more memory than any node has"),
    (pod_of({}, tolerations={}), "spec.template.spec.tolerations", "array"),
    (pod_of({}, nodeSelector={"a": 1}), "spec.template.spec.nodeSelector[...]", "str"),
    (pod_of({}, schedulerName="volcano"), "spec.template.spec.schedulerName", "placed by Stretto"),
    (pod_of({}, restartPolicy="Always"), "spec.template.spec.restartPolicy", "see retries"),
    (pod_of({}, nodeName="n1"), "spec.template.spec.nodeName", "use nodeSelector"),
]


@pytest.mark.parametrize(("spec", "field", "text"), _BAD)
def test_bad_fields(spec: dict[str, Any], field: str, text: str) -> None:
    found = problems(object_with(**spec))
    assert text in found.get(field, ""), found


@pytest.mark.parametrize(("template", "field", "text"), _BAD_TEMPLATES)
def test_bad_templates(template: Any, field: str, text: str) -> None:
    said = {"env": {"A": "1"}, "workdir": "/code", "resources": {"gpu": 1, "cpu": 2, "memory": "4Gi"}}
    found = problems(object_with(**said, template=template))
    assert text in found.get(field, ""), found


@pytest.mark.parametrize(
    ("name", "text"),
    [("", "missing"), (None, "missing"), ("UP", "is not a name"), ("12", "is a number"), ("a" * 64, "63"), (7, "text")],
)
def test_bad_names(name: Any, text: str) -> None:
    obj = object_with()
    obj["metadata"]["name"] = name
    assert text in problems(obj)["metadata.name"]


def test_a_service_has_a_name_that_dns_can_have() -> None:
    obj = object_with(service={"port": 80})
    obj["metadata"]["name"] = "v1.web"
    assert "cannot name a service" in problems(obj)["metadata.name"]


@pytest.mark.parametrize("spec", [None, [], "x", 3])
def test_no_spec(spec: Any) -> None:
    assert "spec" in problems({"metadata": {"name": "a"}, "spec": spec})


@pytest.mark.parametrize("field", ["kind", "apiVersion"])
def test_another_kind(field: str) -> None:
    assert "is not ours" in problems({**object_with(), field: "Job"})[field]


def test_gpu_types_without_gpus() -> None:
    obj = object_with(resources={"gpuType": ["a100"]}, template=pod_of({"resources": asks(cpu=1)}))
    assert "without a GPU" in problems(obj)["spec.resources.gpuType"]


def test_every_problem_is_told_at_once() -> None:
    obj = object_with(workers={"min": 5, "max": 3}, priority=-1, template=pod_of({"resources": asks(cpu="x")}))
    assert list(problems(obj)) == [
        "spec.template.spec.containers[0].resources.requests[cpu]",
        "spec.workers.min",
        "spec.priority",
    ]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = [
    "workers", "level", "priority", "queue", "resources", "deadline", "stop", "retries", "checkpoint", "consistency",
    "hyperparameters", "after", "suspend", "service", "image", "run", "command", "env", "workdir", "setup", "template",
]  # fmt: skip
_INNER = [
    "min", "max", "step", "requested", "gpu", "cpu", "memory", "gpuType", "gpuMemory", "after", "grace", "port",
    "replicas", "target", "health", "hold", "metadata", "spec", "containers", "resources", "requests", "limits", "env",
    "labels", "overhead", "initContainers", "name", "command", "args",
]  # fmt: skip
_LIKELY = st.recursive(
    _JSON,
    lambda inner: st.dictionaries(st.sampled_from(_INNER), inner, max_size=4) | st.lists(inner, max_size=2),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(_FIELDS), _LIKELY, max_size=4), _JSON)
def test_no_object_is_too_strange(spec: dict[str, Any], labels: Any) -> None:
    """It is read or refused with fields; nothing else happens."""
    obj = object_with(**spec)
    obj["metadata"]["labels"] = labels
    problems = []
    try:
        read(obj)
    except SpecError as error:
        problems = [*error.problems] or [Problem(0, "", "")]
    assert all(problem.field and problem.text for problem in problems)


# From a job file to an object


def test_a_job_file_as_an_object() -> None:
    file = load({"name": "mnist", "image": "train:1", "run": "python train.py", "elastic": {"max": 8}, "workers": 4})
    assert elastic_job(file, namespace="lab") == {
        "apiVersion": "stretto.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "mnist", "namespace": "lab"},
        "spec": {
            "image": "train:1",
            "resources": {"gpu": 1},
            "run": "python train.py",
            "workers": {"min": 1, "max": 8, "requested": 4},
        },
    }


def test_another_name_keeps_the_class() -> None:
    obj = elastic_job(load({"name": "mnist", "run": "x", "labels": {"team": "a"}}), "mnist-7", image="y")
    assert obj["metadata"] == {"name": "mnist-7", "labels": {"team": "a", "stretto.dev/class": "mnist"}}
    assert job_class(obj) == "mnist"
    assert job_file(obj).labels == {"team": "a"}


def test_the_image_of_the_file_goes_before_the_default() -> None:
    assert elastic_job(load({"run": "x", "image": "mine"}), "a", image="default")["spec"]["image"] == "mine"
    assert elastic_job(load({"run": "x"}), "a", image="default")["spec"]["image"] == "default"


def test_a_template_to_build_on() -> None:
    template = pod_of({"name": "worker", "image": "train:2"}, volumes=[{"name": "d", "emptyDir": {}}])
    obj = elastic_job(load({"run": "x", "resources": {"cpu": 2}}), "a", template=template, suspend=True)
    assert obj["spec"]["suspend"] is True
    assert worker_template(obj)["spec"]["volumes"] == [{"name": "d", "emptyDir": {}}]
    assert job_file(obj).image == "train:2"


_NOT_HERE: list[tuple[dict[str, Any], str]] = [
    ({"roles": {"ps": {"run": "y"}}}, "roles"),
    ({"notify": ["https://x.example"]}, "notify"),
    ({"workdir": "./code"}, "workdir"),
    ({"workdir": "~/code"}, "workdir"),
    ({"resources": {"gpu": 0.5}}, "resources.gpu"),
    ({"resources": {"gpu_memory": "4Gi"}}, "resources.gpu_memory"),
    ({"labels": {"a": "not a label value"}}, "labels.a"),
    ({"labels": {"a/b/c": "x"}}, "labels.a/b/c"),
    ({"labels": {"stretto.dev/class": "x"}}, "labels.stretto.dev/class"),
    ({"service": {"port": 80, "host": "192.0.2.1"}}, "service.host"),
    ({"service": {"port": 80, "replicas": {"max": 4, "step": 2}}}, "service.replicas.step"),
    ({"name": "a..b"}, "name"),
    ({"image": None}, "image"),
]


@pytest.mark.parametrize(("values", "field"), _NOT_HERE)
def test_what_makes_no_sense_on_kubernetes(values: dict[str, Any], field: str) -> None:
    given = {"name": "mnist", "run": "x", "image": "y", **values}
    file = load({key: value for key, value in given.items() if value is not None})
    with pytest.raises(SpecError) as caught:
        elastic_job(file)
    assert [problem.field for problem in caught.value.problems] == [field]
    assert "hint" in str(caught.value)


def test_a_job_without_a_name() -> None:
    with pytest.raises(SpecError, match="name: is missing"):
        elastic_job(load({"run": "x", "image": "y"}))


def test_all_of_it_is_told_at_once() -> None:
    file = load({"name": "a", "run": "x", "workdir": "b", "notify": "https://x.example"})
    with pytest.raises(SpecError) as caught:
        elastic_job(file)
    assert {problem.field for problem in caught.value.problems} == {"image", "workdir", "notify"}


# There and back

_WORD = st.text(string.ascii_lowercase, min_size=1, max_size=8)
_LINE = st.text(string.printable.replace("\0", ""), min_size=1, max_size=30).filter(str.strip)
_SECONDS = st.integers(1, 10**9).map(lambda milli: milli / 1000) | st.sampled_from(["1h30m", "500ms", 7, "0.25s"])


@st.composite
def _job_files(draw: st.DrawFn) -> JobFile:
    """Anything that both can say."""
    values: dict[str, Any] = {"name": draw(_WORD), "image": draw(_WORD)}
    values["run"] = draw(_LINE | st.lists(_LINE, min_size=1, max_size=3))
    optional: dict[str, st.SearchStrategy[Any]] = {
        "queue": _WORD,
        "priority": st.integers(0, 100),
        "setup": _LINE,
        "workdir": _WORD.map(lambda word: f"/{word}"),
        "env": st.dictionaries(st.sampled_from(["LR", "a_b", "camelCase"]), st.text(" $()x\n", max_size=6)),
        "after": st.lists(_WORD, max_size=2),
        "stop": st.fixed_dictionaries({}, optional={"after": _SECONDS, "grace": _SECONDS}),
        "retries": st.integers(0, 1000),
        "checkpoint": st.fixed_dictionaries({}, optional={"dir": _WORD, "every": _SECONDS, "keep": st.integers(1, 9)}),
        "hyperparameters": st.dictionaries(_WORD, st.integers() | st.booleans() | _WORD, max_size=2),
        "labels": st.dictionaries(_WORD, _WORD, max_size=2),
        "resources": _resources(),
    }
    for field, strategy in optional.items():
        if draw(st.booleans()):
            values[field] = draw(strategy)
    if draw(st.booleans()):
        values["service"] = draw(_services())
    else:
        values |= draw(_sized())
    return load(values)


def _resources() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"gpu": st.integers(1, 16)},
        optional={
            "cpu": st.integers(1, 64_000).map(lambda milli: f"{milli}m"),
            "memory": st.integers(1, 10**6).map(lambda mib: f"{mib}Mi"),
            "gpu_memory": st.just("40Gi"),
            "gpu_type": st.lists(_WORD, max_size=2),
        },
    )


@st.composite
def _sized(draw: st.DrawFn) -> dict[str, Any]:
    low, more = draw(st.integers(1, 50)), draw(st.integers(0, 50))
    values: dict[str, Any] = {}
    if draw(st.booleans()):
        values["elastic"] = {"min": low, "max": low + more, "step": draw(st.sampled_from([1, 2, "pow2"]))}
        if draw(st.booleans()):
            values["workers"] = draw(st.integers(low, low + more))
    elif draw(st.booleans()):
        values["workers"] = low
    level = draw(st.sampled_from([None, "elastic", "restart", "rigid"]))
    if level and not (level == "rigid" and more):
        values["level"] = level
    if level != "restart" and draw(st.booleans()):
        values["consistency"] = "bitwise"
    if draw(st.booleans()):
        values["deadline"] = draw(_SECONDS)
    return values


@st.composite
def _services(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.integers(1, 5))
    target = draw(st.sampled_from([{"cpu": 50}, {"requests": 12.5}]))
    hold = draw(st.sampled_from([1, "30s", "5m"]))
    replicas = {"min": low, "max": low + draw(st.integers(0, 5))}
    return {"port": draw(st.integers(1, 65535)), "replicas": replicas, "target": target, "hold": hold, "health": "/ok"}


@given(_job_files())
def test_a_job_file_survives_the_way_there_and_back(file: JobFile) -> None:
    back = job_file(elastic_job(file))
    assert back.request() == file.request()
    sizes = {"workers", "elastic", "level", "resources"}
    assert back.model_dump(exclude=sizes) == file.model_dump(exclude=sizes)
    assert back.resources == file.resources.model_copy(update={"gpu": file.resources.width_milli})


@given(_job_files())
def test_an_object_survives_as_well(file: JobFile) -> None:
    once = elastic_job(file)
    assert elastic_job(job_file(once)) == elastic_job(job_file(elastic_job(job_file(once))))
    assert worker_template(elastic_job(job_file(once))) == worker_template(once)


@given(st.from_regex(r"[a-z]{1,5}(_[a-z]{1,5}){0,3}", fullmatch=True))
def test_names_translate_both_ways(name: str) -> None:
    assert snake(camel(name)) == name
