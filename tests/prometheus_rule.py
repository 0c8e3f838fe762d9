"""Prints deploy/kubernetes/base/prometheus-rule.yaml: the files of deploy/rules as one object.

python tests/prometheus_rule.py > deploy/kubernetes/base/prometheus-rule.yaml
"""

from pathlib import Path

RULES = Path(__file__).parent.parent / "deploy" / "rules"
FILES = ("recording.rules.yml", "alerts.rules.yml")
HEAD = """# Printed by tests/prometheus_rule.py from deploy/rules: change them there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: moe-coord
  labels:
    app.kubernetes.io/name: moe-coord
spec:
  groups:
"""


def document() -> str:
    """The whole file."""
    text = HEAD
    for name in FILES:
        groups = (RULES / name).read_text().partition("groups:\n")[2]
        text += "".join(f"  {line}" if line.strip() else line for line in groups.splitlines(True))
    return text


if __name__ == "__main__":
    print(document(), end="")
