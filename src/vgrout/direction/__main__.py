"""`vgrout direction --model M --pairs F`: extract a hack direction stand-alone, and say how good it is."""

import sys
from dataclasses import dataclass
from pathlib import Path

from vgrout.cli import cli_exit, parse_args
from vgrout.config.checks import Dtype, check, refuse, setting
from vgrout.config.run import PLACEBOS
from vgrout.data import organism
from vgrout.direction.pairs import PairSet, handwritten, handwritten_placebo, load_pairs
from vgrout.files import probe_writable, require_new
from vgrout.model.source import require_model


@dataclass(frozen=True)
class ExtractionSettings:
    """Extract a hack direction from contrastive pairs and say how good it is."""

    model: str
    """Hub id, local model folder, or 'organism'."""
    pairs: Path | None = None
    """Pair file (JSON); none: the organism's run_tests pairs, or the hand-written set."""
    top_k: int = setting(12, low=1)
    """Axes per module kept in the file."""
    tau_axis: float = setting(0.0, low=0, high=1)
    """Axes with S_i/S_0 below this are zeroed."""
    k: int = setting(5, low=1, high="top_k")
    """Axes per module that a run would use: shown, and compared with the controls'."""
    drop_bottom_frac: float = setting(0.25, low=0, below=1)
    """Noise floor that a run would use, for the comparison."""
    controls: bool = False
    """Extract the placebo sets too, draw Haar directions, and print their |cos| with this one."""
    out: Path | None = None
    """Where the direction goes; none: where a run with these pairs looks for it."""
    dtype: Dtype = "auto"
    """Of the model's weights: as in the run that is to read the direction."""
    svd_cache: Path = Path("out/svd_cache")
    """Decomposed weights."""

    def __post_init__(self) -> None:
        check(self)
        bad = self.out is not None and self.out.suffix != ".safetensors"
        refuse(bad, f"--out {self.out}: should end in .safetensors")
        require_new(self.out)
        probe_writable(self.svd_cache, "--svd-cache")


def main(argv: list[str] | None = None) -> int:
    """0: done. 2: refused, in one line on stderr."""
    return cli_exit(lambda: _command(parse_args(ExtractionSettings, argv, "vgrout direction")))


def _command(settings: ExtractionSettings) -> int:
    embedded = settings.model == "organism"
    if settings.pairs is not None:
        pairs = load_pairs(settings.pairs, "--pairs")
    else:
        pairs = load_pairs(organism.PAIRS_DIR / "run_tests.json") if embedded else handwritten()
    if embedded:
        organism.EMBEDDED.require_sound("--model organism:")
    model = str(organism.MODEL_DIR) if embedded else settings.model
    require_model(model)
    # Here and not above: torch takes seconds to import, and a wrong flag never waits for it.
    from vgrout.direction.examine import compare_controls, control_table, module_table
    from vgrout.direction.extract import default_path, extract, model_key, model_name, save
    from vgrout.model.load import load_policy, pick_device

    device, dtype = pick_device(model, settings.dtype)
    policy = load_policy(model, device=device, dtype=dtype, cache_dir=settings.svd_cache)
    direction = extract(policy, pairs, settings.top_k, settings.tau_axis)
    key = model_key(policy, pairs, settings.top_k, settings.tau_axis)
    out = settings.out or default_path(pairs, key, model_name(policy), settings.top_k, settings.tau_axis)
    save(direction, out)
    print(module_table(direction, settings.k))
    if settings.controls:
        placebos = _placebos(settings.model)
        print(control_table(compare_controls(policy, direction, placebos, settings.k, settings.drop_bottom_frac)))
    print(f"direction {out}")
    return 0


def _placebos(model: str) -> dict[str, PairSet]:
    """The sets that `--control placebo` would use on this model."""
    if model == "organism":
        return {c: load_pairs(organism.PAIRS_DIR / f"placebo_{c}.json") for c in PLACEBOS}
    return {c: handwritten_placebo(c) for c in PLACEBOS}


if __name__ == "__main__":
    sys.exit(main())
