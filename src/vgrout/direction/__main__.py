"""`vgrout direction --model M --pairs F`: extract a hack direction, and say how good it is."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from vgrout.config.checks import Dtype, check, flag, setting
from vgrout.config.cli import run_command
from vgrout.direction.pairs import (
    DIRECTIONS,
    PairDetector,
    PairSet,
    handwritten,
    load_pairs,
    pairs_from_pool,
)
from vgrout.ground import embedded
from vgrout.ground.io import make_folder, probe_writable, refuse, require_new, write_atomic
from vgrout.model.load.source import require_model


@dataclass(frozen=True)
class ExtractionSettings:
    """Extract a hack direction from contrastive pairs and say how good it is."""

    model: str
    """Hub id, local model folder, or 'organism'."""
    pairs: Path | None = None
    """Pair file (JSON); none: the organism's run_tests pairs, or the hand-written set."""
    rollouts: Path | None = None
    """Take the pairs from this rollouts.jsonl instead; needs --detector."""
    detector: PairDetector | None = None
    """The detector that says which rollout is a hack: C, D or E,
    or 'oracle' (true labels: an upper bound)."""
    top_k: int = setting(12, low=1)
    """Axes per module kept in the file."""
    tau_axis: float = setting(0.0, low=0, high=1)
    """Axes with S_i/S_0 below this are zeroed."""
    k: int = setting(5, low=1, high="top_k")
    """Axes per module that a run would use, and that are shown."""
    pairs_out: Path | None = None
    """Write the pairs here (JSON), for --vhack-pairs-path: those of --rollouts have no file."""
    out: Path | None = None
    """Where the direction goes; none: where a run with these pairs looks for it."""
    dtype: Dtype = "auto"
    """Of the model's weights: as in the run that is to read the direction."""

    def __post_init__(self) -> None:
        check(self)
        from_log = self.rollouts is not None
        without_detector = from_log != (self.detector is not None)
        with_pairs = from_log and self.pairs is not None
        refuse(
            without_detector or with_pairs,
            "--rollouts: goes with --detector, and not with --pairs",
        )
        for name, suffix in (("pairs_out", ".json"), ("out", ".safetensors")):
            path = getattr(self, name)
            refuse(
                path is not None and path.suffix != suffix,
                f"{flag(name)} {path}: should end in {suffix}",
            )
            require_new(path, flag(name))
        if self.out is None:
            probe_writable(DIRECTIONS)


def main(argv: list[str] | None = None) -> int:
    """0: done. 2: refused, in one line on stderr."""
    return run_command(_command, ExtractionSettings, argv, "vgrout direction")


def _command(settings: ExtractionSettings) -> None:
    """Extract the direction, write its files and print its tables."""
    pairs = _pairs_of(settings)
    is_organism = settings.model == "organism"
    if is_organism:
        embedded.EMBEDDED.require_sound("--model organism:")
    model = str(embedded.MODEL_DIR) if is_organism else settings.model
    require_model(model)
    # Imported late because torch takes seconds to load: a wrong flag must not wait for it.
    from vgrout.direction import extract
    from vgrout.model.load.load import load_policy, pick_device

    device, dtype = pick_device(model, settings.dtype)
    policy = load_policy(model, device=device, dtype=dtype)
    if settings.rollouts is not None and settings.detector is not None:
        pairs = pairs_from_pool(settings.rollouts, settings.detector, policy.prompt_text)
    assert pairs is not None
    if settings.pairs_out is not None:
        # A direction is cached by the content and the source of its pairs. The run that loads this
        # file has the file as its source, so the direction is extracted from the file too.
        make_folder(settings.pairs_out.parent)
        write_atomic(settings.pairs_out, pairs.to_file().encode())
        pairs = load_pairs(settings.pairs_out)
    direction = extract.extract(policy, pairs, settings.top_k, settings.tau_axis)
    usual = extract.default_path(policy, pairs, settings.top_k, settings.tau_axis)
    out = settings.out or usual
    extract.save(direction, out)
    print(extract.module_table(direction, settings.k))
    print(f"direction {out}")
    if settings.pairs_out is not None:
        print(f"pairs     {settings.pairs_out}")


def _pairs_of(settings: ExtractionSettings) -> PairSet | None:
    """The pairs to extract from; None if they come from a rollout log.

    Those need the model's chat template. Until it is loaded the log is read without it, so that a
    wrong line is refused before.
    """
    if settings.rollouts is not None:
        assert settings.detector is not None
        pairs_from_pool(settings.rollouts, settings.detector, render=json.dumps)
        return None
    if settings.pairs is not None:
        return load_pairs(settings.pairs, "--pairs")
    if settings.model == "organism":
        return load_pairs(embedded.PAIRS_DIR / "run_tests.json")
    return handwritten()


if __name__ == "__main__":
    sys.exit(main())
