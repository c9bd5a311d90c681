"""The modules that register names when they are imported."""

from __future__ import annotations

REGISTERING_MODULES: dict[str, dict[str, tuple[str, ...]]] = {}
"""By the registry's name: modules, each with the names it registers, short names included. Such a module is imported when one
of its names is asked for, one without names at the registry's first look-up. ``flextrain/__init__.py`` fills the table in,
because it knows the layers above core."""
