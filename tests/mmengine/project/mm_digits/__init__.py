"""A project on top of MMEngine, as downstream repositories have it: it knows nothing of flextrain."""

from . import constructors, datasets, hooks, metrics, models, transforms, visualizers  # noqa: F401
