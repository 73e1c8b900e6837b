"""A Prometheus of a test, with the repository's configuration, that scrapes often."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

import yaml  # type: ignore[import-untyped]

from allfold_cluster.environment import free_port
from allfold_cluster.processes import Child, stop_all
from tests.support.processes.services import Services
from tests.support.waiting import wait_until
from tools.metrics_page import ALERTS

CONFIGURATION = ALERTS.with_name("prometheus.yml")
ALERT_SECONDS = 60.0
_OFTEN = "500ms"
_SOON = "1s"
# Thresholds and windows that a test would have to wait for.
_SHORTER = {"> 30": "> 1", "> 15": "> 2", "[5m]": "[10s]", "[10m]": "[10s]"}


class Prometheus:
    """Scrapes the services of a test. Ends when it is left.

    Args:
        folder: for its files.
        services: that run already.
    """

    def __init__(self, folder: Path, services: Services) -> None:
        self._port = free_port()
        self._folder = folder
        (folder / "token").write_text(services.token)
        (folder / "alerts.yml").write_text(_soon(ALERTS.read_text()))
        configured = _configuration(services, folder / "token")
        (folder / "prometheus.yml").write_text(configured)

    def __enter__(self) -> Self:
        log = self._folder / "log"
        with log.open("wb") as output:
            self._child = Child(
                "prometheus",
                [
                    "prometheus",
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                env=dict(os.environ),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._is_ready, f"Prometheus is ready: {log.read_text()}")
        return self

    def __exit__(self, *_: object) -> None:
        stop_all([self._child])

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now; fails where Prometheus refuses it."""
        asked = urllib.parse.urlencode({"query": expression})
        return list(self._get(f"/api/v1/query?{asked}")["result"])

    def value(self, expression: str) -> float | None:
        """The value of an expression that has one series; ``None`` while it has none."""
        found = self.query(expression)
        assert len(found) < 2, (expression, found)
        return float(found[0]["value"][1]) if found else None

    def targets(self) -> dict[str, str]:
        """The health of each target, by its job and node."""
        active = self._get("/api/v1/targets")["activeTargets"]
        names = [each["labels"].get("node", each["labels"]["job"]) for each in active]
        return {name: each["health"] for name, each in zip(names, active, strict=True)}

    def firing(self) -> list[dict[str, str]]:
        """The labels of the alerts that fire."""
        alerts = self._get("/api/v1/alerts")["alerts"]
        return [dict(each["labels"]) for each in alerts if each["state"] == "firing"]

    def await_alert(self, name: str, **labels: str) -> None:
        """Wait until an alert with these labels fires."""
        wanted = {"alertname": name, **labels}

        def fires() -> bool:
            return any(wanted.items() <= each.items() for each in self.firing())

        wait_until(fires, f"the alert {wanted} fires", ALERT_SECONDS)

    def _is_ready(self) -> bool:
        assert not self._child.ended, (self._folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
                return True
        except urllib.error.URLError:
            return False

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self._url + path, timeout=30) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return dict(body["data"])

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._port}"


def _configuration(services: Services, token: Path) -> str:
    """The repository's, with the addresses of this test."""
    made = yaml.safe_load(CONFIGURATION.read_text())
    made["global"] = {"scrape_interval": _OFTEN, "evaluation_interval": _OFTEN}
    orchestrator, agents = made["scrape_configs"]
    orchestrator["static_configs"][0]["targets"] = [services.listen]
    (found,) = agents["http_sd_configs"]
    found["url"] = found["url"].replace("http://orchestrator:7400", services.orchestrator_url)
    found["refresh_interval"] = _SOON
    for each in (orchestrator, agents, found):
        each["authorization"]["credentials_file"] = str(token)
    return str(yaml.safe_dump(made))


def _soon(rules: str) -> str:
    """The repository's rules, which fire at once."""
    made = yaml.safe_load(rules)
    for rule in (rule for group in made["groups"] for rule in group["rules"]):
        for threshold, shorter in _SHORTER.items():
            rule["expr"] = rule["expr"].replace(threshold, shorter)
        if "for" in rule:
            rule["for"] = _SOON
    return str(yaml.safe_dump(made))
