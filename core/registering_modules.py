"""Which modules add names to a registry when they are imported."""

from __future__ import annotations

REGISTERING_MODULES: dict[str, tuple[str, ...]] = {}
"""By the registry's name. The package's front door fills it in: it knows the layers above this one."""
