"""The fields of a job file, their defaults and the rules between them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from stretto.core.request import POWERS_OF_TWO, JobRequest
from stretto.core.snapshot import GPU
from stretto.spec.units import Cpu, Duration, Expect, Gpu, Memory

MOST_WORKERS = 100_000
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")
_MOST_LABELS, _LONGEST_LABEL = 64, 255
_MOST_HYPERPARAMETERS, _LONGEST_VALUE = 32, 64
_MOST_VARIABLES, _LONGEST_TEXT = 1000, 100_000
"""Of what a process is started with: Linux takes no argument and no variable of more than 128 KiB."""
_MOST_NAMES = 256
_MOST_ADDRESSES = 16
_HTTP_PATH = re.compile(r"/[A-Za-z0-9._~!$&'()*+,;=:@%/?-]{0,254}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a name; use up to 63 lower-case letters, digits, '-' and '.'")
    if value.isdecimal():
        raise ValueError(f"{value!r} is a number, as jobs have anyway; put a letter into the name")
    return value


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("a text may not contain the character NUL")
    return value


def _startable(value: str) -> str:
    """A text that a process can be given."""
    if len(value.encode(errors="replace")) > _LONGEST_TEXT:
        raise ValueError(f"is longer than {_LONGEST_TEXT} bytes; put it into a file")
    return _no_nul(value)


def _command(value: Any) -> Any:
    """A line for the shell, or a program with its arguments; both are kept as they are."""
    if isinstance(value, str) and value.strip():
        return _startable(value)
    if isinstance(value, list | tuple) and value and all(isinstance(part, str | int | float) for part in value):
        return tuple(_startable(str(part)) for part in value)
    raise ValueError("is not a command; write a line for the shell, or a list of the program and its arguments")


def _host(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError(f"{value!r} is not an address; write 127.0.0.1, 0.0.0.0, or one of this machine") from None


def _http_path(value: str) -> str:
    if not _HTTP_PATH.fullmatch(value):
        raise ValueError(f"{value!r} is not the path of a web address; write /healthz, say")
    return value


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _variables(value: Any) -> Any:
    """Names as the shell has them; numbers become text, everything else must be written as text."""
    if not isinstance(value, dict):
        raise ValueError("is not a set of variables; write NAME: value, one to a line")
    checked: dict[str, str] = {}
    for name, text in value.items():
        if not isinstance(text, str | int | float) or isinstance(text, bool):
            raise ValueError(f"the value of {name} is not text; put it in quotes")
        checked[name] = str(text)
    check_variables(checked)
    return checked


def check_variables(variables: Mapping[str, str]) -> None:
    """Raises `ValueError` with what keeps a process from getting them."""
    if len(variables) > _MOST_VARIABLES:
        raise ValueError(f"there are {len(variables)} variables; at most {_MOST_VARIABLES} are taken")
    for name, text in variables.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise ValueError(f"{_short(name)} is not the name of a variable; use letters, digits and '_'")
        try:
            _startable(name + text)
        except ValueError as error:
            raise ValueError(f"the value of {_short(name)}: {error}") from None


def _short(name: Any) -> str:
    text = repr(name)
    return text if len(text) <= 60 else text[:57] + "..."


def _scalars(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("is not a set of values; write name: value, one to a line")
    for name, item in value.items():
        if not isinstance(name, str) or not isinstance(item, str | int | float | bool):
            raise ValueError(f"{name!r} is not a plain value; use numbers, texts, true or false")
        if isinstance(item, float) and item - item != 0:
            raise ValueError(f"{name!r} is not a finite number")
    return value


def _labels(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("is not a set of labels; write key: value, one to a line")
    if len(value) > _MOST_LABELS:
        raise ValueError(f"has {len(value)} labels; at most {_MOST_LABELS} are kept")
    checked: dict[str, str] = {}
    for key, text in value.items():
        if not isinstance(key, str) or not _LABEL.fullmatch(key):
            raise ValueError(f"{key!r} is not a label; use up to 63 letters, digits, '-', '_', '.' and '/'")
        if not isinstance(text, str | int | float | bool) or len(str(text)) > _LONGEST_LABEL:
            raise ValueError(f"the value of {key} is not a text of at most {_LONGEST_LABEL} characters")
        checked[key] = _no_nul(str(text).lower() if isinstance(text, bool) else str(text))
    return checked


def _address(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
        raise ValueError(f"{value!r} is not a web address; it must begin with https:// or http://")
    return value


def _steps(value: Any) -> Any:
    if value == "pow2":
        return POWERS_OF_TWO
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_WORKERS:
        raise ValueError(f"{value!r} is not a step; write a whole number of workers, or pow2 for 1, 2, 4, 8, …")
    return value


Name = Annotated[str, AfterValidator(_name), Field(max_length=63)]
Text = Annotated[str, AfterValidator(_no_nul)]
_TEXTS = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
Names = Annotated[tuple[Text, ...], Field(max_length=_MOST_NAMES), BeforeValidator(_one_or_more), _TEXTS]
Addresses = Annotated[
    tuple[Annotated[str, AfterValidator(_address)], ...],
    Field(max_length=_MOST_ADDRESSES),
    BeforeValidator(_one_or_more),
    _TEXTS,
]
Host = Annotated[str, AfterValidator(_host)]
HttpPath = Annotated[str, AfterValidator(_http_path)]
Workers = Annotated[int, Field(ge=1, le=MOST_WORKERS, strict=True)]
Command = Annotated[
    str | tuple[str, ...],
    BeforeValidator(_command),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]
Variables = Annotated[
    dict[str, str],
    BeforeValidator(_variables),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}),
]
Labels = Annotated[
    dict[str, str],
    BeforeValidator(_labels),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}),
]
Scalars = Annotated[
    dict[str, Any],
    BeforeValidator(_scalars),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}),
]


class Conflicts(ValueError):
    """Fields that are right one by one but not together: (field, what is wrong)."""

    def __init__(self, found: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{field} {text}" for field, text in found))
        self.found = found


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Sizes(_Strict):
    """Between how many workers, or replicas, the job may run."""

    min: Workers = Field(default=1, description="The fewest workers it makes sense with.")
    max: Workers = Field(description="The most workers it can use.")
    step: Annotated[
        int,
        BeforeValidator(_steps),
        PlainSerializer(lambda step: "pow2" if step == POWERS_OF_TWO else step),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "pow2"}]}),
    ] = Field(default=1, description="Sizes go up in steps of so many workers; pow2: 1, 2, 4, 8, …")

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; exchange them")
        return self


class Elastic(Sizes):
    """Between how many workers the job may run."""

    explore: bool = Field(
        default=True, description="Other sizes are tried with what is free, to find the fastest. false: never."
    )


class Resources(_Strict):
    """What every worker gets."""

    gpu: Gpu | None = Field(default=None, description="GPUs; one unless gpu_memory is given. 0: none.")
    gpu_memory: Memory | None = Field(default=None, description="Memory it needs on each of its GPUs.")
    gpu_type: Names = Field(default=(), description="Device types it can use; any if empty.")
    cpu: Cpu | None = Field(default=None, description="CPU cores.")
    memory: Memory | None = Field(default=None, description="Memory.")
    disk: Memory | None = Field(
        default=None,
        description="What the whole job's folder may hold, with its logs and checkpoints; 100Gi if not given.",
    )

    @model_validator(mode="after")
    def _one_share(self) -> Resources:
        if self.gpu == 0 and (self.gpu_memory or self.gpu_type):
            raise ValueError("gpu is 0, so gpu_memory and gpu_type mean nothing; leave them out or ask for a GPU")
        return self

    @property
    def width_milli(self) -> int:
        """Milli-GPU; 0 for a share by memory alone."""
        if self.gpu is not None:
            return self.gpu
        return 0 if self.gpu_memory else GPU

    @property
    def worker_gpu_memory_mib(self) -> int:
        """GPU memory over all devices of a worker."""
        return (self.gpu_memory or 0) * max(1, -(-self.width_milli // GPU))


class Role(_Strict):
    """Processes that run beside the workers for as long as the job does."""

    count: Workers = 1
    run: Command | None = Field(default=None, description="Their command; the job's own if not given.")
    resources: Resources = Resources(gpu=0)


class Target(_Strict):
    """The load at which a service gets another replica. Exactly one of the two."""

    requests: float | None = Field(
        default=None, gt=0, le=1e9, allow_inf_nan=False, description="Requests/s per replica."
    )
    cpu: float | None = Field(default=None, gt=0, le=100, allow_inf_nan=False, description="CPU use in percent.")

    @model_validator(mode="after")
    def _one(self) -> Target:
        if (self.requests is None) == (self.cpu is None):
            raise ValueError("give exactly one target: requests (per second and replica) or cpu (percent)")
        return self


class Service(_Strict):
    """A job that serves requests and is scaled by load."""

    port: int = Field(ge=1, le=65535, strict=True, description="Where clients reach it.")
    host: Host = Field(default="127.0.0.1", description="The address that clients reach it at; 0.0.0.0: any.")
    replicas: Sizes = Field(default=Sizes(min=1, max=1), description="Between how many replicas it may run.")
    target: Target = Target(cpu=80)
    health: HttpPath | None = Field(
        default=None, description="A path that answers 2xx or 3xx when a replica can serve; otherwise it need listen."
    )
    hold: Duration = Field(default=30.0, description="So long the load must have been smaller before replicas end.")


class Checkpoint(_Strict):
    """Where and how often state is saved."""

    dir: Text | None = Field(default=None, min_length=1, description="The job's own folder if not given.")
    every: Duration = 60.0
    keep: int = Field(default=3, ge=1, le=1000, strict=True, description="How many are kept.")


class Stop(_Strict):
    """When and how the job is ended."""

    after: Duration | None = Field(default=None, description="End it after so much run time.")
    grace: Duration = Field(default=30.0, description="Time between the polite and the hard stop.")


class JobFile(_Strict):
    """A job file. Only `run` is needed."""

    name: Name | None = Field(default=None, description="Also its class: jobs of one name share their estimates.")
    queue: Name = "default"
    priority: int | None = Field(
        default=None, ge=0, le=100, strict=True, description="Larger is more urgent; 50, services 80."
    )
    kind: Literal["training", "service"] | None = Field(
        default=None, description="service when there is a service section."
    )
    run: Command = Field(
        description="A line for the shell, or a list of the program and its arguments. Also called `command`."
    )
    setup: Command | None = Field(default=None, description="Run once per node before the first worker.")
    workdir: Text = Field(default=".", min_length=1)
    env: Variables = {}
    image: Text | None = Field(default=None, min_length=1, description="Container image, where there are containers.")

    workers: Workers | None = Field(
        default=None,
        description="How many workers it asks for: all it gets when it, or the policy, is not elastic. "
        "If not given: elastic.max, or 1 without an elastic section.",
    )
    elastic: Elastic | None = Field(default=None, description="Between how many workers it may run.")
    level: Literal["elastic", "restart", "rigid"] | None = Field(
        default=None, description="Resizes in process, by restart, or never. elastic when there is an elastic section."
    )
    preemptible: bool | None = Field(
        default=None,
        strict=True,
        description="Whether more urgent jobs may stop it; yes unless it is rigid. No: it keeps its minimum.",
    )
    resources: Resources = Resources()
    roles: dict[Name, Role] = Field(
        default={}, description="Fixed roles beside the workers: parameter servers, a master."
    )
    service: Service | None = None

    deadline: Duration | None = Field(default=None, description="Should be done so long after submission.")
    expect: Expect | None = Field(
        default=None,
        description="How long it will run at the size it asks for, or its steps: a hint, used until more is known.",
    )
    after: Names = Field(default=(), description="Starts once the jobs of these names have ended.")
    stop: Stop = Stop()
    retries: int = Field(default=3, ge=0, le=1000, strict=True, description="Restarts after a crash of its own.")
    checkpoint: Checkpoint = Checkpoint()
    consistency: Literal["default", "bitwise"] = "default"
    hyperparameters: Scalars = Field(default={}, description="What its length depends on: epochs, batch size, model …")
    labels: Labels = Field(default={}, description="Words to find it by: key: value.")
    notify: Addresses = Field(default=(), description="Web addresses that are told about its events.")

    @model_validator(mode="before")
    @classmethod
    def _command_is_run(cls, data: Any) -> Any:
        if isinstance(data, dict) and "command" in data and "run" not in data:
            return {"run" if key == "command" else key: value for key, value in data.items()}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> JobFile:
        found = [*self._service_rules(), *self._size_rules()]
        if found:
            raise Conflicts(found)
        return self

    def _service_rules(self) -> Iterator[tuple[str, str]]:
        if self.kind == "service" and self.service is None:
            yield "kind", "a service needs a section of its own; add service: {port: 8000}"
        if self.service is None:
            return
        if self.kind == "training":
            yield "kind", "is training, but there is a service section; leave out one of the two"
        for field in ("workers", "elastic", "level", "deadline", "expect", "preemptible"):
            if getattr(self, field) is not None:
                plain = ("deadline", "expect", "preemptible")
                better = "" if field in plain else " (a service has service.replicas)"
                yield field, f"does not go with a service; leave it out{better}"

    def _size_rules(self) -> Iterator[tuple[str, str]]:
        sizes = self.elastic
        if sizes and self.workers and not sizes.min <= self.workers <= sizes.max:
            yield "workers", f"{self.workers} is not within elastic min {sizes.min} and max {sizes.max}"
        if sizes and sizes.min < sizes.max and self.level == "rigid":
            yield "level", "is rigid, but elastic gives a range; use workers for a fixed size, or another level"
        if self.consistency == "bitwise" and self.level == "restart":
            yield "consistency", "bitwise needs level elastic or rigid; what restarts is not under our control"

    @property
    def is_service(self) -> bool:
        return self.service is not None

    @property
    def _sizes(self) -> Sizes | None:
        return self.service.replicas if self.service else self.elastic

    @property
    def asks_for(self) -> int:
        """How many workers it gets where nobody is resized: an elastic job that says nothing could use its maximum."""
        return self.workers or (self._sizes.max if self._sizes else 1)

    def request(self, default_name: str = "job") -> JobRequest:
        """The same in the units of the core."""
        sizes = self._sizes
        low, high = (sizes.min, sizes.max) if sizes else (self.asks_for, self.asks_for)
        has_range = not self.service and sizes is not None
        level = self.level or ("elastic" if has_range else "rigid")
        return JobRequest(
            name=self.name or default_name,
            klass=self.name or (self.run if isinstance(self.run, str) else " ".join(self.run)),
            queue=self.queue,
            priority=(80 if self.service else 50) if self.priority is None else self.priority,
            requested=self.asks_for,
            min_workers=low,
            max_workers=high,
            step=sizes.step if sizes else 1,
            explore=self.elastic is not None and self.elastic.explore and low < high,
            width_milli=self.resources.width_milli,
            cpu_milli=self.resources.cpu or 0,
            memory_mib=self.resources.memory or 0,
            gpu_memory_mib=self.resources.worker_gpu_memory_mib,
            fixed_milli=sum(role.count * role.resources.width_milli for role in self.roles.values()),
            pools=self.resources.gpu_type,
            deadline_s=float("inf") if self.deadline is None else self.deadline,
            level=level,
            is_service=self.is_service,
            hyperparameters=_remembered(self.hyperparameters),
            expect_s=self.expect.seconds if self.expect else 0.0,
            expect_steps=self.expect.steps if self.expect else 0,
            preemptible=self.is_service or (level != "rigid" if self.preemptible is None else self.preemptible),
        )


def _remembered(hyperparameters: Mapping[str, Any]) -> tuple[tuple[str, float | str], ...]:
    """What is kept of them with every run of the class: numbers, and texts of a bounded length."""
    kept = sorted(hyperparameters.items())[:_MOST_HYPERPARAMETERS]
    return tuple((name[:_LONGEST_VALUE], _number_or_text(value)) for name, value in kept)


def _number_or_text(value: str | float) -> float | str:
    if isinstance(value, str):
        return value[:_LONGEST_VALUE]
    try:
        return float(value)
    except OverflowError:
        return "beyond all numbers"
