"""The units of userspace mode's proxies: valid, and with nothing that a proxy has no use for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import jinja2
import pytest

TEMPLATES = Path(__file__).parents[2] / "roles/prepare/templates"
EXPOSURE = 15  # tenths: what systemd-analyze security may find at most


@pytest.mark.parametrize("unit", ["akp-userspace.service", "akp-userspace-udp.service"])
def test_a_proxy_runs_without_root_and_sandboxed(unit: str, tmp_path: Path) -> None:
    loader = jinja2.FileSystemLoader(TEMPLATES)
    text = jinja2.Environment(loader=loader).get_template(f"{unit}.j2").render(kube_proxy_nginx_user="www-data")
    file = tmp_path / unit
    file.write_text(text)
    settings = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    assert settings["User"] in ("haproxy", "www-data")
    assert settings["CapabilityBoundingSet"] == settings["AmbientCapabilities"] == ""
    checked = subprocess.run(["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True)
    assert checked.stderr == ""
    analyse = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", str(file)]
    judged = subprocess.run(analyse, capture_output=True, text=True)
    assert judged.returncode == 0, judged.stdout + judged.stderr
