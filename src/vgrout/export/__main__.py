"""`python -m vgrout.export RUN --out DIR [--to peft|inspect|datasets] [--push-to-hub OWNER/NAME]`

model     the deployed model as a Hugging Face folder, adapter merged, quarantine left out
peft      the same as a LoRA adapter beside the base model, exact at full rank
inspect   the answers of the final evaluation as inspect_ai logs
datasets  every answer, during training and at the end, as a data set

The folder is written under a temporary name; a model is compared with the deployed one before it gets its own.
"""

import contextlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from loguru import logger

from vgrout import console
from vgrout.cli import cli_exit, parse_args
from vgrout.config.checks import check, setting
from vgrout.export import answers, hub
from vgrout.files import require_new

MODELS, LOGS = ("model", "peft"), {"inspect": answers.to_inspect, "datasets": answers.to_datasets}


@dataclass(frozen=True)
class Cli:
    """Write a run for other programs."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory, or (model, peft) a saved adapter (.safetensors)."""
    out: Path
    """Folder to make."""
    to: Literal["model", "peft", "inspect", "datasets"] = "model"
    """model: a Hugging Face folder of the deployed model · peft: the same as a LoRA adapter · inspect: the final
    answers as inspect_ai logs · datasets: all answers as a data set."""
    step: int | None = setting(None, low=0)
    """model, peft: the adapter saved after this many steps; none: train.safetensors."""
    dtype: Literal["bf16", "fp32"] | None = None
    """model: of the weights; none: the run's own."""
    rank: int | None = setting(None, low=1)
    """peft: ranks a module, at most; none: all, which is exact."""
    model: str | None = None
    """model, peft: where the base model lies, if not where the run had it."""
    push_to_hub: str | None = None
    """OWNER/NAME: upload the folder too, into a private repository."""

    def __post_init__(self) -> None:
        for name, formats in (("step", MODELS), ("model", MODELS), ("dtype", ("model",)), ("rank", ("peft",))):
            if getattr(self, name) is not None and self.to not in formats:
                raise ValueError(f"--{name}: not read by --to {self.to}; leave it out")
        check(self)
        require_new(self.out)
        if self.to in LOGS and not (self.run / "run.json").is_file():
            raise ValueError(f"{self.run}: no run.json in it; --to {self.to} takes a run's folder")


def command(cli: Cli) -> str:
    """Write the folder; returns a sentence about its content.

    Raises:
        ValueError: one line: nothing was written, or the folder is written and the hub did not take it.
        RuntimeError: the written model is not the deployed one; nothing is left behind.
    """
    if cli.push_to_hub is not None:
        hub.require_token(cli.push_to_hub)
    missing_parents = [p for p in cli.out.parents if not p.exists()]  # nearest first
    temporary = cli.out.with_name(f".{cli.out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        content = LOGS[cli.to](cli.run, temporary) if cli.to in LOGS else _write_model(cli, temporary)
        os.replace(temporary, cli.out)
    except OSError as e:
        raise ValueError(f"--out {cli.out}: cannot be written ({e.strerror or e}); choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if not cli.out.exists():
            for folder in missing_parents:  # created for nothing
                with contextlib.suppress(OSError):
                    folder.rmdir()
    if cli.push_to_hub is not None:
        kind = "dataset" if cli.to in LOGS else "model"
        content += f"; {hub.push(cli.out, cli.push_to_hub, kind, f'vgrout {cli.run.name}')}"
    return content


def _write_model(cli: Cli, folder: Path) -> str:
    from vgrout.model.saved import find_adapter, load_saved

    saved = find_adapter(cli.run, cli.step, cli.model)
    from vgrout.export import model, peft  # torch takes seconds to import

    policy = load_saved(saved)
    texts = model.probes(saved, policy)
    if cli.to == "peft":
        result = peft.export(saved, policy, folder, cli.rank, texts)
        parity = result.parity
    else:
        result = parity = model.export(saved, policy, folder, cli.dtype, texts)
    origin = {"adapter": str(saved.path), "config": saved.cfg.as_dict(), "parity": vars(parity)}
    (folder / "vgrout.json").write_text(json.dumps(origin, indent=1, default=str) + "\n", encoding="utf-8")
    for file in folder.iterdir():
        file.chmod(0o666 & ~_umask())  # safetensors writes 0600
    return str(result)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 written · 1 the written model was not the deployed one · 2 refused, in one line."""
    console.setup(None)

    def run() -> int:
        cli = parse_args(Cli, argv, "python -m vgrout.export")
        try:
            content = command(cli)
        except RuntimeError as e:
            logger.error(str(e))
            return 1
        size = sum(f.stat().st_size for f in cli.out.rglob("*") if f.is_file())
        print(f"{content}\n{size / 1e6:.1f} MB -> {cli.out}")
        return 0

    return cli_exit(run)


if __name__ == "__main__":
    sys.exit(main())
