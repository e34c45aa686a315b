"""The deployed model of a run in a folder: whole or as a PEFT adapter, with a note of where it comes from."""

import json
from pathlib import Path
from typing import Literal

from vgrout.export import model, peft
from vgrout.model import load
from vgrout.model.saved import Saved


def write_deployed(
    saved: Saved,
    folder: Path,
    *,
    as_peft: bool,
    rank: int | None,
    dtype: Literal["bf16", "fp32"] | None,
) -> str:
    """Fill `folder`, which exists and is empty. Returns how what was written compares with the deployed model.

    Args:
        saved: the adapter.
        as_peft: whether only the adapter is written, in PEFT's form; else the model with the adapter merged.
        rank: of PEFT's form, at most; None: full.
        dtype: of a whole model's weights; None: the run's own.

    Raises:
        Refused: peft is missing, or the files do not fit one another.
        Differs: what was written is not the deployed model.
    """
    if as_peft:
        peft.package()  # before the model is loaded
    policy = load.load_saved(saved)
    texts = model.probes(saved, policy)
    if as_peft:
        lora = peft.export(saved, policy, folder, rank, texts)
        parity = lora.parity
        result = str(lora)
    else:
        parity = model.export(saved, policy, folder, dtype, texts)
        result = str(parity)
    origin = {
        "adapter": str(saved.path),
        "config": saved.cfg.as_dict(),
        "parity": vars(parity),
    }
    text = json.dumps(origin, indent=1, default=str)
    (folder / "vgrout.json").write_text(f"{text}\n", encoding="utf-8")
    for file in folder.iterdir():
        # safetensors writes 0600; the folder's mode follows the umask.
        file.chmod(0o666 & folder.stat().st_mode)
    return result
