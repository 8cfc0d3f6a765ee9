"""`--on kubernetes` where there is no cluster: what is printed without one, and what is wrong said in a line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stretto.cli import main

FILE = "name: mnist\nrun: python train.py\nelastic: {max: 4}\nenv: {A: b}\n"


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No server, no kubeconfig."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "STRETTO_SERVER", "STRETTO_ON", "STRETTO_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STRETTO_HOME", str(tmp_path / "server"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(FILE)
    return path


def test_a_dry_run_prints_the_object(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", str(file), "--on", "kubernetes", "--image", "train:1", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("apiVersion: stretto.dev/v1alpha1\nkind: ElasticJob\n")
    assert yaml.safe_load(out)["metadata"] == {"name": "mnist"}
    words = ["--name", "other", "--namespace", "vision", "--env", "C=d", "--set", "elastic.max=6", "--json"]
    assert main(["submit", str(file), "--on", "kubernetes:far", "--image", "train:1", "--dry-run", *words]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["metadata"]["namespace"] == "vision"
    assert made["spec"]["workers"] == {"min": 1, "max": 6}
    assert made["spec"]["env"] == {"A": "b", "C": "d"}, "and nothing else of this machine"


def test_a_template_is_built_on(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text("spec: {tolerations: [{operator: Exists}], containers: [{name: worker, image: mine:1}]}\n")
    words = ["--on", "kubernetes", "--dry-run", "--json"]
    assert main(["submit", str(file), "--template", str(template), *words]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["template"]["spec"]["tolerations"] == [{"operator": "Exists"}]
    for text in ("[1, 2]", "kind: Pod", "a: [b"):
        template.write_text(text)
        assert main(["submit", str(file), "--template", str(template), *words]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {template}: ")


def test_the_environment_may_say_where(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRETTO_ON", "kubernetes")
    assert main(["submit", str(file), "--image", "train:1", "--dry-run"]) == 0
    assert "kind: ElasticJob" in capsys.readouterr().out
    for words in (["--on", "server"], ["--server", "http://127.0.0.1:1"]):
        assert main(["ps", *words]) == 8
        assert "server" in capsys.readouterr().err
    assert main(["forecast"]) == 8, "what has no meaning there is asked of a server"
    assert "no server is known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ps --on kubernetes", "no Kubernetes cluster is configured here"),
        ("submit - --on kubernetes --image a", "no Kubernetes cluster is configured here"),
        ("run train.py --on kubernetes --image a", "no Kubernetes cluster is configured here"),
        ("submit - --on kubernetes --dry-run", "standard input: job mnist: image: is missing"),
        ("submit - --on kubernetes --dry-run --image a --set notify=http://x", "notify: nobody is told"),
        ("submit - --on kubernetes --dry-run --image a --name Big", "'Big' is not a name on Kubernetes"),
        ("submit - --on kubernetes --dry-run --image a --set wrokers=2", "wrokers: unknown field"),
        ("submit - --on kubernetes --image a --env NOT_SET_ANYWHERE", "no variable 'NOT_SET_ANYWHERE'"),
        ("submit - --on nomad", "nothing called 'nomad'"),
        ("submit - --on kubernetes:", "nothing called 'kubernetes:'"),
        ("submit - --image a", "--image means nothing to a server"),
        ("submit - --name a", "--name means nothing to a server"),
        ("run train.py --image a", "--image means nothing to a server"),
        ("ps --namespace a", "--namespace means nothing to a server"),
        ("ps -A", "--namespace means nothing to a server"),
        ("show a --on kubernetes --server http://a", "both a server and Kubernetes"),
        ("migrate a --to b --on kubernetes", "--on"),
    ],
)
def test_bad_input(words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(FILE))
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert said in err


def test_a_server_is_asked_without_loading_kubernetes() -> None:
    code = (
        "import sys; from stretto.cli import main\n"
        "for verb in ('ps', 'show a', 'logs a', 'cancel a', 'why a', 'submit /dev/null'): main(verb.split())\n"
        "print(*(name for name in sys.modules if name.startswith(('stretto.kubernetes', 'msgspec', 'asyncio'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""
