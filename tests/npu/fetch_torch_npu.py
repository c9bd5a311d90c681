"""Get torch_npu's own sources and hold the fused optimizers against torch's, on the simulated device.

    python tests/npu/fetch_torch_npu.py            # fetch, check, write fused_optimizers.md
    python tests/npu/fetch_torch_npu.py --fetch    # fetch only; tests/npu/test_fused_optimizers.py then runs

The wheel (44 MB) is unpacked into build/, never installed: without CANN an installed torch_npu keeps torch from being imported.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "2.14.0"
ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
SOURCE = BUILD / f"torch_npu-{VERSION}" / "torch_npu"
REPORT = Path(__file__).with_name("fused_optimizers.md")
DOCUMENT = ROOT / "docs" / "npu.md"


def fetch() -> None:
    """Put the Python files of the wheel where the tests look for them.

    Raises:
        OSError: it cannot be downloaded; the message ends with what pip said.
    """
    if SOURCE.is_dir():
        return
    BUILD.mkdir(exist_ok=True)
    # In the same file system, so that the folder appears at once or not at all.
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        # The machine at hand does not matter: only Python files are taken.
        wheel = [f"torch_npu=={VERSION}", "--platform", "manylinux_2_28_x86_64", "--python-version", "3.11"]
        how = ["--only-binary=:all:", "--no-deps", "--quiet", "--retries", "1", "--timeout", "15"]
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            *wheel,
            *how,
            "--dest",
            folder,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
            raise OSError(f"torch_npu {VERSION} cannot be downloaded: {said[-1]}")
        (file,) = Path(folder).glob("*.whl")
        unpacked = Path(folder) / SOURCE.parent.name
        with zipfile.ZipFile(file) as archive:
            sources = [name for name in archive.namelist() if name.startswith("torch_npu/") and name.endswith(".py")]
            archive.extractall(unpacked, sources)
        unpacked.rename(SOURCE.parent)


def documented_signatures() -> dict[str, str]:
    """The arguments after ``params`` that docs/npu.md gives for each optimizer."""
    rows = re.findall(r"^\| `(NpuFused\w+)` \| `([^`]*)` \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    return dict(rows)


def report() -> str:
    """Signatures and differences as Markdown; what does not hold is marked."""
    sys.path.append(str(Path(__file__).parent))
    import fused
    import torch
    from conftest import NpuWorkers

    from flextrain.optim.adapters import EQUIVALENTS, NEAREST

    one, two = (NpuWorkers(count, {"TORCH_NPU_SOURCE": str(SOURCE)}) for count in (1, 2))
    documented = documented_signatures()
    lines = [
        "# torch_npu's fused optimizers on the simulated device", "",
        f"Written by `python tests/npu/fetch_torch_npu.py`: torch_npu {VERSION}'s own Python files, unchanged, on the device "
        f"of tests/npu/sim, torch {torch.__version__.partition('+')[0]}, Python {sys.version.split()[0]}.", "",
        "## Signatures", "", "The arguments after `params`, as the sources have them; docs/npu.md is held against them.", "",
        "| optimizer | arguments | as documented |", "| --- | --- | --- |",
    ]  # fmt: skip
    for name in sorted({**EQUIVALENTS, **NEAREST}):
        signature = one.run(fused.facts, name)[0][1]
        lines.append(f"| {name} | `{signature}` | {'yes' if documented.get(name) == signature else '**no**'} |")
    lines += [
        "", "## Against torch's own", "",
        f"The largest difference of any weight (relative where it is larger than 1) after {fused.UPDATES} updates through "
        "NPUStrategy, both on the device, learning rate falling; 1e-6 is allowed.", "",
        "| recipe | " + " | ".join(f"{name} / {twin}" for name, twin in EQUIVALENTS.items()) + " |",
        "| --- |" + " ---: |" * len(EQUIVALENTS),
    ]  # fmt: skip
    for workers, where, recipes in ((one, "", fused.RECIPES), (two, ", two processes", fused.IN_TWO_PROCESSES)):
        for recipe in recipes:
            gaps = [max(workers.run(fused.gap_to_twin, name, recipe)) for name in EQUIVALENTS]
            lines.append(
                f"| {recipe}{where} | "
                + " | ".join(f"{gap:.1e}" if gap < 1e-6 else f"**{gap:.1e}**" for gap in gaps)
                + " |"
            )
    one.group.close()
    two.group.close()
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", action="store_true", help="only fetch the sources")
    arguments = parser.parse_args()
    try:
        fetch()
    except OSError as error:
        sys.exit(f"{error}; without its sources the tests of its fused optimizers are skipped")
    if not arguments.fetch:
        text = report()
        REPORT.write_text(text)
        print(text)
        sys.exit("**" in text)
