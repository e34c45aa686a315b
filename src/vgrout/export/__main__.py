"""`vgrout export RUN --out DIR [--to peft|inspect]`

model    the deployed model as a Hugging Face folder, adapter merged, quarantine left out
peft     the same as a LoRA adapter beside the base model, exact at full rank
inspect  the answers of the final evaluation as inspect_ai logs

The folder is written under a temporary name; a model is compared with the deployed one before it
gets its own.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from loguru import logger
from safetensors import SafetensorError

from vgrout.config.checks import check, setting
from vgrout.config.cli import run_command
from vgrout.export import Differs
from vgrout.export.answers import to_inspect
from vgrout.ground.io import Refused, atomic_folder, require_new, write_json
from vgrout.model.load.saved import find_adapter


@dataclass(frozen=True)
class ExportSettings:
    """Write a run for other programs."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory, or (model, peft) a saved adapter (.safetensors)."""
    out: Path
    """Folder to make."""
    to: Literal["model", "peft", "inspect"] = "model"
    """model: a Hugging Face folder of the deployed model · peft: the same as a LoRA adapter · inspect: the final
    answers as inspect_ai logs."""
    step: int | None = setting(None, low=0)
    """model, peft: the adapter saved after this many steps; none: train.safetensors."""
    dtype: Literal["bf16", "fp32"] | None = None
    """model: of the weights; none: the run's own."""
    rank: int | None = setting(None, low=1)
    """peft: ranks a module, at most; none: all, which is exact."""
    model: str | None = None
    """model, peft: where the base model lies, if not where the run had it."""

    def __post_init__(self) -> None:
        read_by = {
            "step": ("model", "peft"),
            "model": ("model", "peft"),
            "dtype": ("model",),
            "rank": ("peft",),
        }
        for name, formats in read_by.items():
            if getattr(self, name) is not None and self.to not in formats:
                raise Refused(f"--{name}: not read by --to {self.to}; leave it out")
        check(self)
        require_new(self.out)


def export_run(settings: ExportSettings) -> str:
    """Write the folder, and return a sentence about its content.

    Raises:
        Refused: one line; nothing was written.
        Differs: the written model is not the deployed one; nothing is left behind.
    """
    out = settings.out
    try:
        with atomic_folder(out) as folder:
            return _write(settings, folder)
    except (OSError, SafetensorError) as e:  # the latter too where a disk is full
        why = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise Refused(f"--out {out}: cannot be written ({why}); choose another folder") from None


def _write(settings: ExportSettings, folder: Path) -> str:
    """Fill the folder, and return a sentence about its content: of a model, how it compares with the deployed one."""
    if settings.to == "inspect":
        return to_inspect(settings.run, folder)
    saved = find_adapter(settings.run, settings.step, settings.model)
    # Here and not above: torch takes seconds to import, and a wrong flag never waits for it.
    from vgrout.export import model, peft
    from vgrout.model.load.load import load_saved

    if settings.to == "peft":
        peft.package()  # before the model is loaded
    policy = load_saved(saved)
    texts = model.probes(policy)
    if settings.to == "peft":
        lora = peft.export(saved, policy, folder, settings.rank, texts)
        parity, said = lora.parity, str(lora)
    else:
        parity = model.export(saved, policy, folder, settings.dtype, texts)
        said = str(parity)
    origin = {
        "adapter": str(saved.path.resolve()),
        "config": saved.cfg.as_dict(),
        "parity": vars(parity),
    }
    write_json(folder / "vgrout.json", origin)
    for file in folder.iterdir():
        # safetensors writes 0600; the folder's mode follows the umask.
        file.chmod(0o666 & folder.stat().st_mode)
    return said


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 written · 1 the model is not the deployed one · 2 refused, in one line."""
    return run_command(_command, ExportSettings, argv, "vgrout export")


def _command(settings: ExportSettings) -> int:
    try:
        content = export_run(settings)
    except Differs as e:
        logger.error(str(e))
        return 1
    files = [path for path in settings.out.rglob("*") if path.is_file()]
    size = sum(file.stat().st_size for file in files)
    print(f"{content}\n{size / 1e6:.1f} MB -> {settings.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
