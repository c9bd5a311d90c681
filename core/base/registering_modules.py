"""The modules that register names when they are imported."""

from __future__ import annotations

REGISTERING_MODULES: dict[str, tuple[str, ...]] = {}
"""Modules by the registry's name. ``flextrain/__init__.py`` fills it in, because it knows the layers above core."""
