"""Every figure of plans against real runs of two processes: ``python -m tests.planning.accuracy`` writes the table in docs/planning_accuracy.md."""

from pathlib import Path

from flextrain.testing import WorkerGroup

from .allocator import compiled
from .real_runs import compared, sent

MODELS = ("mlp", "llama", "llama ac", "resnet", "vit", "mixtral")
STRATEGIES = {
    "ddp": MODELS,
    "fsdp": MODELS,
    "mesh:tp2": MODELS,
    "mesh:pp2": tuple(model for model in MODELS if model != "resnet"),  # several chains of layers
    "mesh:ep2": ("mixtral",),
    "mesh:cp2": ("llama", "llama ac", "mixtral"),  # the others have no sequences of tokens
}
GRID = [(strategy, model) for strategy, models in STRATEGIES.items() for model in models]
LIMITS = {"ddp": (0.01, 0.01)}
"""How far a plan may be from the ledger and from the allocator."""
LIMIT = 0.05, 0.10
DOCUMENT = Path(__file__).parents[2] / "docs" / "planning_accuracy.md"
BEGIN, END = "<!-- accuracy: made by python -m tests.planning.accuracy -->\n", "<!-- end of accuracy -->\n"
HEAD = """
| strategy | model | plan MiB | ledger MiB | | allocator MiB | | sent KiB | | MFLOP | |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | --- |
"""


def changes_for(strategy, model):
    """The changes of the runner's arguments that a row of the grid needs: recomputation is an option of the strategy."""
    return {"strategy.activation_checkpointing": {"classes": ["LlamaDecoderLayer"]}} if "ac" in model.split() else {}


def run(group, strategy, model):
    """Return (plan, ledger's figures, allocator's peak) by rank."""
    return group.run(compared, strategy, 2, *model.split(), changes=changes_for(strategy, model))


def line(strategy, model, planned, real, peak):
    """A line of the table."""
    sent_bytes = sum(row[1] for row in sent(planned).values())
    cells = [f"`{strategy}`", model.replace(" ac", ", recomputed")]
    if planned.index.get("pp") is not None:
        cells[1] += f", stage {planned.index['pp']}"
    cells += [f"{planned.peak.total / 2**20:.3f}"]
    for measured in (real.peak.total, peak):
        cells += [f"{measured / 2**20:.3f}", f"{planned.peak.total / measured - 1:+.2%}"]
    cells += [f"{sent_bytes / 2**10:,.1f}", "equal" if sent(planned) == sent(real) else "**differ**"]
    same = (planned.flops, planned.repeated_flops) == (real.flops, real.repeated_flops)
    cells += [f"{planned.flops / 1e6:,.1f}", "equal" if same else "**differ**"]
    return "| " + " | ".join(cells) + " |\n"


def main():
    compiled()
    lines = []
    with WorkerGroup(2, timeout_s=600) as group:
        for strategy, model in GRID:
            found = run(group, strategy, model)
            several = strategy == "mesh:pp2"
            shown = found if several else [max(found, key=lambda each: each[0].peak.total)]
            lines += [line(strategy, model, *each) for each in shown]
            print(*lines[-len(shown) :], sep="", end="", flush=True)
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + HEAD + "".join(lines) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
