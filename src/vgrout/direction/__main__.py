"""`python -m vgrout.direction --model M --pairs F`: extract a hack direction stand-alone, and say how good it is."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from vgrout.cli import cli_exit, parse_args
from vgrout.config.checks import Dtype, check, flag, refuse, setting
from vgrout.config.run import PLACEBOS
from vgrout.data import organism
from vgrout.direction.pairs import (
    Detector,
    PairSet,
    check_file,
    handwritten,
    handwritten_placebo,
    load_pairs,
    pairs_from_pool,
)
from vgrout.files import probe_writable, require_new, write_atomic
from vgrout.model.source import find_shapes, require_model


@dataclass(frozen=True)
class Cli:
    """Extract a hack direction from contrastive pairs and say how good it is."""

    model: str
    """Hub id, local model folder, or 'organism'."""
    pairs: Path | None = None
    """Pair file (JSON); none: the organism's run_tests pairs, or the hand-written set."""
    rollouts: Path | None = None
    """Take the pairs from this rollouts.jsonl instead; needs --detector."""
    detector: Detector | None = None
    """The detector that says which rollout is a hack: C, D or E, or 'oracle' (true labels: an upper bound)."""
    shuffle_seed: int | None = setting(None, low=0)
    """The control: exchange hack and clean in half of the pairs."""
    top_k: int = setting(12, low=1)
    """Axes per module kept in the file."""
    tau_axis: float = setting(0.0, low=0, high=1)
    """Axes with S_i/S_0 below this are zeroed."""
    k: int = setting(5, low=1, high="top_k")
    """Axes per module that a run would use, for the table."""
    drop_bottom_frac: float = setting(0.25, low=0, below=1)
    """Noise floor that a run would use, for the table."""
    compare: tuple[Path, ...] = ()
    """Other direction files of this model: their |cos| with this one is printed."""
    controls: bool = False
    """Extract the placebo and shuffled sets too, draw Haar directions, and print and plot their |cos| with this one."""
    pairs_out: Path | None = None
    """Write the pairs here (JSON), for --vhack-pairs-path: those of --rollouts or --shuffle-seed have no file."""
    out: Path | None = None
    """Where the direction goes; none: where a run with these pairs looks for it."""
    figure: Path | None = None
    """Where the figure (png) goes; none: beside the direction."""
    dtype: Dtype = "auto"
    """Of the model's weights: as in the run that is to read the direction."""
    svd_cache: Path = Path("out/svd_cache")
    """Decomposed weights."""

    def __post_init__(self) -> None:
        check(self)
        refuse(self.pairs is not None and self.rollouts is not None, "--rollouts: not together with --pairs")
        refuse(
            (self.rollouts is None) != (self.detector is None), "--detector: goes with --rollouts, give both or neither"
        )
        for name, suffix in (("pairs_out", ".json"), ("figure", ".png"), ("out", ".safetensors")):
            path = getattr(self, name)
            refuse(path is not None and path.suffix != suffix, f"{flag(name)} {path}: should end in {suffix}")
            require_new(path, flag(name))
        probe_writable(self.svd_cache, "--svd-cache")


def main(argv: list[str] | None = None) -> int:
    """0: done. 2: refused, in one line on stderr."""
    return cli_exit(lambda: _command(parse_args(Cli, argv, "python -m vgrout.direction")))


def _command(cli: Cli) -> int:
    pairs = _pairs_of(cli)
    for path in cli.compare:
        refuse(not path.is_file(), f"--compare {path}: no such file; give a direction that this command wrote")
    if cli.model == "organism":
        organism.EMBEDDED.require_sound("--model organism:")
    folder = require_model(organism.MODEL_DIR if cli.model == "organism" else cli.model)
    for path in cli.compare:
        check_file(path, "--compare", find_shapes(folder), None)
    # Here and not above: torch takes seconds to import, and a wrong flag never waits for it.
    from vgrout.direction.controls import cosine_to_real
    from vgrout.direction.examine import compare_controls, control_table, draw, report
    from vgrout.direction.extract import default_path, extract, load, model_key, model_name, save
    from vgrout.model.policy import load_policy, pick_device

    model = str(organism.MODEL_DIR) if cli.model == "organism" else cli.model
    device, dtype = pick_device(model, cli.dtype)
    policy = load_policy(model, device=device, dtype=dtype, cache_dir=cli.svd_cache)
    if cli.rollouts is not None and cli.detector is not None:
        pairs = pairs_from_pool(cli.rollouts, cli.detector, policy.prompt_text)
    assert pairs is not None
    if cli.shuffle_seed is not None:
        pairs = pairs.shuffled(cli.shuffle_seed)
    if cli.pairs_out is not None:
        # a pair set is known by content and source: the run that loads this file finds the direction by its name
        cli.pairs_out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cli.pairs_out, pairs.to_file().encode())
        pairs = load_pairs(cli.pairs_out)
    direction = extract(policy, pairs, cli.top_k, cli.tau_axis)
    key = model_key(policy, pairs, cli.top_k, cli.tau_axis)
    out = cli.out or default_path(pairs, key, model_name(policy), cli.top_k, cli.tau_axis)
    save(direction, out)
    print(report(direction, cli.k, cli.drop_bottom_frac))
    for path in cli.compare:
        if (close := cosine_to_real(load(path, policy, None).v_grad(), direction.v_grad())) is not None:
            print(f"{path}: {close.line()}")
    controls = (
        compare_controls(policy, direction, pairs, _placebos(cli), cli.k, cli.drop_bottom_frac) if cli.controls else {}
    )
    if controls:
        print(control_table(controls))
    figure = cli.figure or out.with_suffix(".png")
    draw(direction, cli.k, figure, {name: close[0] for name, close in controls.items()})
    print(f"direction {out}\nfigure    {figure}")
    if cli.pairs_out is not None:
        print(f"pairs     {cli.pairs_out}")
    return 0


def _placebos(cli: Cli) -> dict[str, PairSet]:
    """The sets that `--control placebo_…` would use on this model."""
    if cli.model == "organism":
        return {c: load_pairs(organism.PAIRS_DIR / f"placebo_{c}.json") for c in PLACEBOS}
    return {c: handwritten_placebo(c) for c in PLACEBOS}


def _pairs_of(cli: Cli) -> PairSet | None:
    """None: they come from a rollout log and need the tokenizer's chat template."""
    if cli.rollouts is not None:
        if not cli.rollouts.is_file():
            raise ValueError(f"--rollouts {cli.rollouts}: no such file; give a run's rollouts.jsonl")
        assert cli.detector is not None
        pairs_from_pool(cli.rollouts, cli.detector, json.dumps)  # its lines are checked without the template
        return None
    if cli.pairs is not None:
        return load_pairs(cli.pairs, "--pairs")
    return load_pairs(organism.PAIRS_DIR / "run_tests.json") if cli.model == "organism" else handwritten()


if __name__ == "__main__":
    sys.exit(main())
