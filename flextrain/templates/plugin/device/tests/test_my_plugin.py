import pytest
from my_plugin import DEVICE

from flextrain import DeviceSpec, SingleDeviceStrategy, StrategyError, register_device


def test_it_is_a_device():
    assert isinstance(DEVICE, DeviceSpec)
    assert DEVICE.group_backend == "cpu:gloo,my_plugin:my_backend"


def test_a_machine_without_its_package_says_what_to_install():  # where it is installed, train on the device here instead
    register_device(DEVICE)
    with pytest.raises(StrategyError, match="install torch_my_plugin"):
        SingleDeviceStrategy(device="my_plugin").join()
