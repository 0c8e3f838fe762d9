"""The Ray Serve application, on a local Ray."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from arms import run_program
from deployment import DEPLOY
from running_program import free_port

from coordinator.command.config import shipped_model

pytest.importorskip("ray.serve", reason="needs the Python package ray[serve]")
FOLDER = DEPLOY / "ray"
SECONDS = 240


def python(*arguments: str) -> str:
    """Output of a program that finds the application."""
    environment = {**os.environ, "PYTHONPATH": str(FOLDER), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False,
        env=environment, timeout=SECONDS, cwd=DEPLOY.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.timeout(SECONDS + 30)
def test_a_local_ray() -> None:
    port = free_port()
    program = Path(__file__).parent / "ray_program.py"
    found = json.loads(python(str(program), str(port), str(shipped_model())).splitlines()[-1])
    alone = run_program("-p", "In the beginning", "-n", "8", "--json")
    assert found["text"] == found["streamed"] == json.loads(alone.stdout)["text"]
    assert found["type"] == "text/event-stream; charset=utf-8" and found["last"] == "[DONE]"
    assert found["pieces"] > 4
    assert found["refused"] == [400, "nope"]
    assert found["running"] == 1 and found["cancelled"] == 1
    assert "is_left" not in found


def test_the_file_for_a_cluster() -> None:
    """By Ray's own schema, and by the builder that it names."""
    program = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
import application
given = yaml.safe_load(open(sys.argv[1]))
checked = ServeDeploySchema(**given)
(found,) = checked.applications
application.build(found.args)
print(found.import_path)
"""
    assert python("-c", program, str(FOLDER / "serve.yaml")) == "deploy.ray.application:build\n"
    assert (DEPLOY.parent / "deploy/ray/application.py").exists()
    (named,) = yaml.safe_load((FOLDER / "serve.yaml").read_text())["applications"]
    assert set(named["args"]) >= {"model", "memory"}


def test_arguments_that_are_wrong() -> None:
    program = """
import application
for arguments in {}, {"model": "m"}, {"model": "m", "memory": "1G", "more": "1"}:
    try:
        application.build(arguments)
    except ValueError as error:
        print(error)
"""
    lines = python("-c", program).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("expected model=FILE memory=SIZE and of ") for line in lines)
