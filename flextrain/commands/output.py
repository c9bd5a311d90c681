"""Output for machines."""

from __future__ import annotations

import json
import sys


def print_json(value: object) -> None:
    """Print plain values as indented JSON."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
