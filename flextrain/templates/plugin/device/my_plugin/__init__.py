"""A device: what flextrain has to know of an accelerator that another package adds to torch."""

from flextrain import DeviceSpec

# The type as torch names it, the process-group back end for its tensors, and the package that adds both; docs/devices.md.
DEVICE = DeviceSpec("my_plugin", backend="my_backend", package="torch_my_plugin", install="torch_my_plugin")
