"""Imports MMEngine once, before a test can be blamed for what that leaves behind."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _mmengine() -> None:
    pytest.importorskip("mmengine")
    pytest.importorskip("cv2")  # sets variables of the environment
