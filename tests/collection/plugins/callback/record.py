"""Writes every result of a run to a file, a line of JSON each, for tests to look at."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: record
type: notification
short_description: results as lines of JSON
description: Writes results to the file in AKP_RECORD.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "record"

    def _record(self, outcome: str, result: Any) -> None:
        line = {
            "outcome": outcome,
            "host": result._host.get_name(),
            "action": result._task.action,
            "task": result._task.get_name(),
            "result": result._result,
        }
        with Path(os.environ["AKP_RECORD"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def v2_runner_on_ok(self, result: Any) -> None:
        self._record("ok", result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._record("ignored" if ignore_errors else "failed", result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._record("unreachable", result)

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._record("skipped", result)
