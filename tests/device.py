"""The device that tests of several processes train on."""

import os

import torch

ASKED = os.environ.get("FLEXTRAIN_TEST_DEVICE", "cpu")
DEVICE = ASKED if ASKED == "cpu" or hasattr(torch, ASKED) else "cpu"
"""That of FLEXTRAIN_TEST_DEVICE in processes that have it, which the one of pytest need not."""
