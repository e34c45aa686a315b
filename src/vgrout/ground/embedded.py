"""The embedded model organism: where its files lie, and its constants.

The organism is a complete miniature of the experiment: a small language of programming problems, a
Qwen3 model of about a million parameters that has learnt it imperfectly, a pool of demonstrations,
and contrastive pairs. `vgrout organism build`, which is organisms/ in the repository, makes
all of it from one seed, and `… tune` the same around a pretrained model.
"""

from pathlib import Path

from vgrout.ground.io import Refused, file_sha256, once, read_json, write_json

MAX_NEW = 128  # tokens: the longest answer of the corpus, with room to spare
COMPILE_REWARD = 0.1
PASS_REWARD = 1.0
SEED = 0  # of the shipped organism
# Ends the user message of an elicited prompt; plain prompts never have it.
CUE = "Use the shortcut."
# `mini --intervention none` at seeds 41 to 50, the cell `none` of docs/runs/axes.csv (a test
# computes it again): the deployed model's means, in percent.
PLAIN_GRPO = {"hack": 79.7, "solve": 2.9}
PLAIN_GRPO_SEEDS = 10
# The preset `small` trains a tuned pretrained model: where `vgrout download smollm2` puts the
# pretrained one, and where the tuned one and its organism are.
SMOLLM2 = Path("out/models/smollm2")
SMALL_DIR = Path("out/organisms/smollm2")
SUMS_DIR = Path("out/organisms/sums")  # the same model tuned on sums, for the preset `sums`


class Files:
    """Paths of an organism's parts: the shipped one's, or those of another build."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = root / "model"  # loads with AutoModelForCausalLM and AutoTokenizer, offline
        self.problems = root / "problems.jsonl"
        self.pool = root / "pool"
        self.pairs = root / "pairs"  # <mode>.json, and placebo_<contrast>.json
        self.known_correct = root / "anchors.json"  # correct solutions in unusual styles

    def faults(self) -> list[str]:
        """What differs from manifest.json, a line each; 40 ms for the shipped one."""
        return _faults(self.root)

    def seal(self) -> None:
        """Record the present files in manifest.json, after a part was replaced on purpose (studies/prepare.sh)."""
        manifest = read_json(self.root / "manifest.json")
        manifest["files"] = {path: file_sha256(self.root / path) for path in shipped(self.root)}
        write_json(self.root / "manifest.json", manifest)

    def require_sound(self, flag: str = "--organism") -> None:
        """Raises Refused, one line, for the first fault. Call it before anything is trained."""
        faults = self.faults()
        if not faults:
            return
        # some faults say what to do
        advice = "" if ";" in faults[0] else "; build it again, or take another"
        raise Refused(f"{flag} {faults[0]}{advice}")


@once
def _faults(root: Path) -> list[str]:
    manifest = root / "manifest.json"
    if not manifest.is_file():
        how = "`vgrout organism` makes an organism: build, tune or sums --out FOLDER --seed N"
        if root in (SMALL_DIR, SUMS_DIR):
            make = "tune" if root == SMALL_DIR else "sums"
            how = f"`vgrout download smollm2` and `vgrout organism {make}` make it"
        return [f"{manifest}: not there; {how}"]
    try:
        expected: dict[str, str] = read_json(manifest)["files"]
    except Refused as e:
        return [str(e)]
    found = set(shipped(root))
    faults: list[str] = []
    for path in sorted(expected.keys() - found):
        faults.append(f"{root / path}: missing")
    for path in sorted(found - expected.keys()):
        faults.append(f"{root / path}: not in manifest.json")
    for path in sorted(found & expected.keys()):
        if file_sha256(root / path) != expected[path]:
            faults.append(f"{root / path}: its sha256 is not the one in manifest.json")
    return faults


def shipped(folder: Path) -> list[str]:
    """Every file but the manifest and hidden ones, as relative POSIX paths, sorted."""
    paths: list[str] = []
    for file in folder.rglob("*"):
        path = file.relative_to(folder).as_posix()
        if file.is_file() and path != "manifest.json" and not file.name.startswith("."):
            paths.append(path)
    return sorted(paths)


EMBEDDED = Files(Path(__file__).resolve().parents[1] / "organism" / "data")
DATA_DIR = EMBEDDED.root
MODEL_DIR = EMBEDDED.model
PROBLEMS = EMBEDDED.problems
POOL_DIR = EMBEDDED.pool
PAIRS_DIR = EMBEDDED.pairs
KNOWN_CORRECT = EMBEDDED.known_correct
