"""Priority: the order in which hooks run at one hook point."""

from __future__ import annotations

from enum import IntEnum

from ...core.errors import ConfigError, one_of, suggest


class Priority(IntEnum):
    """Named priorities: a hook with a lower number runs earlier."""

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


def get_priority(priority: int | str | Priority, where: str = "priority") -> int:
    """Return the number from 0 (first) to 100 (last) for ``priority``.

    Raises:
        ConfigError: unknown name, or a number outside 0 to 100.
    """
    if isinstance(priority, str):
        names = Priority.__members__
        if priority.upper() not in names:
            raise ConfigError(f'{where}: "{priority}" is not allowed, choose {one_of(names)}{suggest(priority, names)}')
        return int(names[priority.upper()])
    if type(priority) not in (int, Priority) or not 0 <= priority <= 100:
        raise ConfigError(f"{where}: {priority!r} is not allowed, give a name or a number from 0 to 100")
    return int(priority)
