"""Plug-ins are found beside each other without being installed, by these processes and those that they start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGES = sorted(str(path.parent) for path in Path(__file__).parent.glob("*/pyproject.toml"))
sys.path[:0] = PACKAGES
os.environ["PYTHONPATH"] = os.pathsep.join([*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])
