"""`vgrout export RUN --out DIR [--to peft|inspect]`

model    the deployed model as a Hugging Face folder, adapter merged, quarantine left out
peft     the same as a LoRA adapter beside the base model, exact at full rank
inspect  the answers of the final evaluation as inspect_ai logs

The folder is written under a temporary name; a model is compared with the deployed one before it
gets its own.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from loguru import logger
from safetensors import SafetensorError

from vgrout import console
from vgrout.cli import cli_exit
from vgrout.config.checks import check, setting
from vgrout.config.names import parse_command
from vgrout.errors import Refused
from vgrout.export import Differs
from vgrout.export.answers import to_inspect
from vgrout.files import existing, require_new
from vgrout.model.saved import find_adapter


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
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=existing(out.parent)) as work:
            folder = Path(work) / out.name
            folder.mkdir()
            write = _write_answers if settings.to == "inspect" else _write_model
            content = write(settings, folder)
            out.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder, out)
    except (OSError, SafetensorError) as e:  # the latter too where a disk is full
        why = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise Refused(f"--out {out}: cannot be written ({why}); choose another folder") from None
    return content


def _write_answers(settings: ExportSettings, folder: Path) -> str:
    """Write the final answers, and return how many there are."""
    return to_inspect(settings.run, folder)


def _write_model(settings: ExportSettings, folder: Path) -> str:
    """Write a model or an adapter, and return how it compares with the deployed one."""
    saved = find_adapter(settings.run, settings.step, settings.model)
    # Here and not above: torch takes seconds to import, and a wrong flag never waits for it.
    from vgrout.export.deployed import write_deployed

    as_peft = settings.to == "peft"
    return write_deployed(saved, folder, as_peft=as_peft, rank=settings.rank, dtype=settings.dtype)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 written · 1 the model is not the deployed one · 2 refused, in one line."""
    console.setup(None)

    def command() -> int:
        settings = parse_command(ExportSettings, argv, "vgrout export")
        try:
            content = export_run(settings)
        except Differs as e:
            logger.error(str(e))
            return 1
        files = [path for path in settings.out.rglob("*") if path.is_file()]
        size = sum(file.stat().st_size for file in files)
        print(f"{content}\n{size / 1e6:.1f} MB -> {settings.out}")
        return 0

    return cli_exit(command)


if __name__ == "__main__":
    sys.exit(main())
