"""The device that tests of several processes train on: "cpu", or what FLEXTRAIN_TEST_DEVICE names."""

import os

DEVICE = os.environ.get("FLEXTRAIN_TEST_DEVICE", "cpu")
