"""The points at which hooks are called, and which of them a hook overrides."""

from __future__ import annotations

_MODES = ("train", "val", "test")
HOOK_POINTS: dict[str, tuple[str, ...]] = {
    **{f"{when}_run": () for when in ("before", "after")},
    **{f"{when}_{mode}": () for when in ("before", "after") for mode in _MODES},
    **{
        f"{when}_{mode}_{what}": (f"_{when}_{what}", f"{when}_{what}")
        for when in ("before", "after")
        for mode in _MODES
        for what in ("epoch", "iter")
    },
    "on_exception": (),
    "before_save_checkpoint": (),
    "after_load_checkpoint": (),
}
"""Each hook point with the group forms that it falls back to."""
POINTS = tuple(HOOK_POINTS)
NOWHERE = 1000


def depth(hook: object, name: str, base: type) -> int:
    """Return the position in the method resolution order that defines ``name``; ``NOWHERE`` if only ``base`` does."""
    if name in vars(hook):
        return 0
    return next((i for i, kind in enumerate(type(hook).__mro__, 1) if kind is not base and name in vars(kind)), NOWHERE)


def overridden_points(hook: object, base: type) -> list[str]:
    """Return the points at which ``hook`` does something that ``base`` does not, itself or by a group form."""
    return [
        point
        for point, groups in HOOK_POINTS.items()
        if any(depth(hook, name, base) < NOWHERE for name in (point, *groups))
    ]
