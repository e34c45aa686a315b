"""Check of an organism: the first losses of training from its seed."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from vgrout.data.language import MODES, Shares
from vgrout.organism.build import first_losses
from vgrout.organism.recipe import Recipe, Shape

TOLERANCE = 0.02  # nats; other processors and thread counts sum in another order, a wrong corpus differs by tenths


def check_training(folder: Path, steps: int | None = None) -> list[str]:
    """Faults of the first training steps, run again with the shipped tokenizer, against the recorded losses.

    steps: how many, at most those recorded.
    """
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    recorded: list[float] = manifest["first_losses"][:steps]
    stored = manifest["recipe"]
    recipe = Recipe(**stored | {"betas": tuple(stored["betas"])})  # JSON has no tuples
    shape, stored = Shape(**manifest.get("shape", {})), manifest["shares"]  # the shipped manifest leaves defaults out
    shares = Shares(**stored | {"modes": tuple(stored.get("modes", MODES))})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    losses = first_losses(tokenizer, manifest["seed"], len(recorded), recipe, shape, shares)
    return [
        f"training step {i}: loss {now:.4f}, recorded {then:.4f}; language, recipe or library changed"
        for i, (now, then) in enumerate(zip(losses, recorded, strict=True))
        if abs(now - then) > TOLERANCE
    ]
