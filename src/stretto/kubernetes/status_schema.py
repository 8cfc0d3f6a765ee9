"""What the controller tells of a job in `status`, as a structural schema."""

from __future__ import annotations

from stretto.kubernetes.structural import ANYTHING, Schema


def status_schema() -> Schema:
    return _object(
        "What the controller tells of it.",
        phase=_text("In one word: Pending, Running, Succeeded, Failed, Suspended, Invalid …"),
        reason=_text("Why it has this phase or this size, as one word for programs."),
        message=_text("The same as a sentence, with the numbers that decided."),
        waitingFor=_text("What it waits for; empty when it runs as large as it can be."),
        conditions=_conditions(),
        workers=_whole("Worker pods it has been given."),
        size=_text("Workers it has been given, and between which numbers: 3/1..8."),
        ready=_whole("Workers that are members of the current generation."),
        selector=_text("Which pods are its workers, as a label selector."),
        step=_whole("Committed steps."),
        totalSteps=_whole("Steps it will have done at the end, where that is known."),
        resizes=_whole("How often it was resized."),
        preemptions=_whole("How often it had to give all its workers back."),
        migrations=_whole("How often a worker moved to another node."),
        restarts=_whole("How often it was started again after a crash of its own."),
        failures=_whole("Crashes of its own since it last made progress."),
        lostSeconds=_whole("Seconds of its work that were lost: stopped for more urgent jobs, or by faults."),
        lastCheckpoint=_object("The latest complete checkpoint.", step=_whole("Its step."), time=_time("When.")),
        startTime=_time("When its first worker started."),
        completionTime=_time("When it ended."),
        notBefore=_time("It is not started again before this time."),
        observedGeneration=_whole("The generation of the object that this is about."),
        number=_whole("Its number among all jobs of the cluster."),
        coordinator=_object(
            "The journal of its generations. Only the leading controller writes it, and only over its own term.",
            term=_whole("Counts the coordinators it has had; a lower one is refused."),
            journal=_text("The coordinator's own notation."),
        ),
        accounts={**ANYTHING, "description": "Worker-seconds, waiting time and the like, for `stretto show`."},
    )


def _object(description: str, **fields: Schema) -> Schema:
    return {"type": "object", "description": description, "properties": fields}


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _whole(description: str) -> Schema:
    return {"type": "integer", "format": "int64", "minimum": 0, "description": description}


def _time(description: str) -> Schema:
    return {"type": "string", "format": "date-time", "description": description}


def _conditions() -> Schema:
    """As every Kubernetes object has them."""
    return {
        "type": "array",
        "description": "Its conditions, one of each type.",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            **_object(
                "One condition.",
                type={"type": "string", "maxLength": 316},
                status={"type": "string", "enum": ["True", "False", "Unknown"]},
                reason={"type": "string", "maxLength": 1024},
                message={"type": "string", "maxLength": 32768},
                lastTransitionTime={"type": "string", "format": "date-time"},
                observedGeneration={"type": "integer", "format": "int64", "minimum": 0},
            ),
            "required": ["type", "status", "reason", "message", "lastTransitionTime"],
        },
    }
