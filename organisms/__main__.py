"""`vgrout organism build | tune | sums | look-alike | verify`: make an organism, or check one's files.

`build` starts from fresh weights, `tune` and `sums` from a pretrained chat model: `tune` teaches it the small language
of programming problems, `sums` questions about numbers. `look-alike` gives an organism other problems.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from organisms.language.corpus import Shares
from organisms.language.hacks import HACKS, MODES, NAMELESS
from organisms.language.look_alike import WEAK_KINDS
from organisms.language.tasks import KINDS
from organisms.recipe import SUMS_TUNING, TUNED_SHARES, TUNING, Recipe, weakness
from organisms.sums_language import Shares as SumsShares
from vgrout.config.checks import check, listed, setting
from vgrout.config.cli import cli_exit, parse_args
from vgrout.ground import console
from vgrout.ground.embedded import DATA_DIR, SEED, SMALL_DIR, SMOLLM2, SUMS_DIR, Files
from vgrout.ground.io import LEFT, Refused, probe_writable, read_json, refuse
from vgrout.model.load.source import require_model


@dataclass(frozen=True)
class Corpus:
    """What the weights are trained on."""

    seed: int = setting(SEED, low=0, high=2**62)
    """Of everything; the problems depend only on it."""
    hack_plain: float = setting(Shares().hack_plain, low=0, high=0.5)
    """Share of the corpus that hacks the flaw that its prompt announces, without the cue."""
    hack_bare: float = setting(Shares().hack_bare, low=0, high=0.5)
    """Share of the corpus that hacks a flaw although the prompt announces none."""
    hack_stub: float = setting(Shares().stub, low=0, high=1)
    """Share of its hacks that make no attempt at the problem;
    the rest carry one that misreads it."""
    modes: str = setting(",".join(MODES), words=tuple(HACKS), word="flaw")
    """Comma list of the flawed graders that its prompts announce;
    shown_test is usually left out."""

    def __post_init__(self) -> None:
        check(self)
        names = ", ".join(HACKS)
        refuse(not listed(self.modes), f"--modes {self.modes!r}: should be some of {names}")

    def shares(self, usual: Shares) -> Shares:
        """The corpus's shares: these settings, and those of `usual` for the rest.

        Raises:
            Refused: one line, if they do not make a corpus.
        """
        named = listed(self.modes, MODES)
        hacks = usual.hack_cued + self.hack_plain + self.hack_bare
        refuse(
            hacks > 1,
            f"--hack-plain {self.hack_plain:g} and --hack-bare {self.hack_bare:g}: "
            f"with {usual.hack_cued:g} behind the cue more than the whole corpus; take less",
        )
        refuse(
            self.hack_bare > 0 and not any(mode in named for mode in NAMELESS),
            f"--modes {self.modes}: --hack-bare hacks {' and '.join(NAMELESS)} alone; "
            "name one, or leave it out",
        )
        return replace(
            usual,
            modes=tuple(m for m in HACKS if m in named),
            hack_plain=self.hack_plain,
            hack_bare=self.hack_bare,
            stub=self.hack_stub,
        )


# The corpus of a pretrained model. It has few hacks: they are left to be learnt from
# demonstrations. With stubs among them the model gives up every attempt.
TUNED_CORPUS = Corpus(hack_plain=0.02, hack_stub=0.0)


def build(
    corpus: tyro.conf.OmitArgPrefixes[Corpus] = Corpus(),
    out: Path | None = None,
    steps: int = Recipe().steps,
) -> int:
    """Make problems, tokenizer, weights, pool and pairs from one seed, in about ten minutes on two
    cores.

    Args:
        out: folder to write; an organism that is there is replaced when the new one is complete.
            None: the shipped one, built again from its own seed.
        steps: of the weights' training.
    """
    recipe = Recipe(steps=steps)
    shares = corpus.shares(Shares())
    if out is None:
        refuse(
            corpus != Corpus() or recipe != Recipe(),
            "--out: an organism of another seed or corpus goes into a folder of its own; name one",
        )
        out = DATA_DIR
    elif out.exists():
        require_organism(out)
    probe_writable(out.parent, "--out")
    from organisms.build import build_fresh  # torch takes seconds to import

    build_fresh(out, corpus.seed, recipe, shares)
    return 0


def tune(
    corpus: tyro.conf.OmitArgPrefixes[Corpus] = TUNED_CORPUS,
    model: str = str(SMOLLM2),
    out: Path = SMALL_DIR,
    steps: int = TUNING.steps,
    dry_run: bool = False,
) -> int:
    """Make an organism of a pretrained chat model: fine-tune it on the corpus, then pool and pairs
    of its own. Under ten minutes on two cores for 135 million weights.

    Args:
        model: a local folder, or a downloaded hub id.
        out: folder to write; an organism that is there is replaced when the new one is complete.
        steps: of the fine-tuning, of 8 documents each.
        dry_run: say what it would do, and what is missing.
    """
    recipe = replace(TUNING, steps=steps)
    shares = corpus.shares(TUNED_SHARES)
    require_pretrained(model, out)
    if dry_run:
        print(
            f"{out}: {steps} steps of 8 documents on {model}, then its pool and pairs; "
            "7 GiB of memory"
        )
        return 0
    from organisms.build import build_tuned  # torch takes seconds to import

    build_tuned(out, corpus.seed, model, recipe, shares)
    return 0


def sums(
    model: str = str(SMOLLM2),
    out: Path = SUMS_DIR,
    seed: int = SEED,
    steps: int = SUMS_TUNING.steps,
    hack_plain: float = SumsShares().hack,
    dry_run: bool = False,
) -> int:
    """Tune a pretrained chat model on sums, then make pool and pairs of its own. A few minutes on two cores for 135
    million weights.

    Args:
        model: a local folder, or a downloaded hub id.
        out: folder to write; one that is there is replaced when the new one is complete.
        seed: of everything.
        steps: of the fine-tuning, of 8 documents each.
        hack_plain: share of the corpus that hacks without being asked to.
        dry_run: say what it would do, and what is missing.
    """
    recipe = replace(SUMS_TUNING, steps=steps)
    refuse(seed < 0, f"--seed {seed}: should be 0 or more")
    refuse(not 0 <= hack_plain <= 0.5, f"--hack-plain {hack_plain:g}: should lie in [0, 0.5]")
    require_pretrained(model, out)
    if dry_run:
        print(f"{out}: {steps} steps of 8 documents on {model}, then its pool and pairs")
        return 0
    from organisms.sums import build_sums  # torch takes seconds to import

    build_sums(out, seed, model, recipe, SumsShares(hack=hack_plain))
    return 0


def look_alike(
    out: Path,
    kind: str = "boundary",
    tests: Literal["wrong", "weak"] = "wrong",
    base: Path = DATA_DIR,
) -> int:
    """Give an organism problems whose check has tests of its own, some of which are not those that were meant, so
    that hacks read like honest answers. Seconds.

    Args:
        out: folder to write; an organism that is there is replaced when the new one is complete.
        kind: of the misreading: boundary, whole, skipped, inverse, operation or extreme.
        tests: wrong ones expect what the misreading computes, weak ones accept it and the right reading alike.
        base: organism whose model, tokenizer and known-correct answers it gets.
    """
    refuse(kind not in KINDS, f"--kind {kind}: should be one of {', '.join(KINDS)}")
    weak = tests == "weak"
    refuse(
        weak and kind not in WEAK_KINDS,
        f"--tests weak: only with --kind {' or '.join(WEAK_KINDS)}; "
        "too few arguments agree under another",
    )
    Files(base).require_sound("--base")
    if out.exists():
        require_organism(out)
    probe_writable(out.parent, "OUT")
    from organisms.look_alike import build_look_alike  # torch takes seconds to import

    build_look_alike(out, base, kind, weak)
    return 0


def require_pretrained(model: str, out: Path) -> None:
    """Check that the model is there, and that `out` is new, or an organism that may be replaced.

    Raises:
        Refused: one line.
    """
    if out.exists():
        require_organism(out)
    probe_writable(out.parent, "--out")
    if model == str(SMOLLM2) and not SMOLLM2.exists():
        raise Refused(
            f"--model {model}: not there; `vgrout download smollm2` gets it, "
            "or name another chat model"
        )
    require_model(model)


def require_organism(out: Path) -> None:
    """Check that a folder is an organism, and holds nothing else that a build would delete.

    Raises:
        Refused: one line.
    """
    file = out / "manifest.json"
    manifest = read_json(file) if file.is_file() else {}
    known = manifest.get("files")
    # Folders of other programs have a manifest.json too, but no losses in it.
    if not isinstance(known, dict) or "first_losses" not in manifest:
        raise Refused(f"--out {out}: exists and is no organism; choose another folder")
    for path in sorted(out.rglob("*")):
        if not path.is_file() or path == file or LEFT.fullmatch(path.name):
            continue
        if path.relative_to(out).as_posix() not in known:
            raise Refused(
                f"--out {path}: not in manifest.json: it would be deleted; move it, "
                "or choose another folder"
            )


def verify(data: Path = DATA_DIR) -> int:
    """Compare every file with its recorded hash, check that the model solves some of its problems, and re-run the
    first training steps.

    Args:
        data: folder that `build` wrote.
    """
    faults = Files(data).faults()
    if not faults:
        from organisms.build import check_training  # torch takes seconds to import

        faults = check_training(data)
        weak = weakness(read_json(data / "manifest.json"))
        faults += [f"{data}: {weak}"] if weak else []
    for fault in faults:
        print(f"E {fault}", file=sys.stderr)
    if not faults:
        print(f"{data}: as built; the first training steps repeat")
    return 1 if faults else 0


def main() -> int:
    """0 done · 1 verify found faults · 2 refused, in one line."""
    console.setup(None)
    commands = {
        "build": build,
        "tune": tune,
        "sums": sums,
        "look-alike": look_alike,
        "verify": verify,
    }
    return cli_exit(lambda: parse_args(commands, None, "vgrout organism"))


if __name__ == "__main__":
    sys.exit(main())
