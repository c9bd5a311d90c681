"""A project on top of MMEngine, as downstream repositories have it: it knows nothing of flextrain.

As in them, nobody imports its modules: the registries do, when they look for a name.
"""
