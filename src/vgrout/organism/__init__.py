"""The embedded organism: a complete miniature of the experiment, shipped in the package.

A small language of programming problems, a Qwen3 model of about a million parameters that has learnt it imperfectly, a
pool of demonstrations and contrastive pairs. `python -m vgrout.organism build` makes all of it from one seed.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

MAX_NEW = 128  # tokens: the longest answer of the corpus, with room to spare
COMPILE_REWARD = 0.1
PASS_REWARD = 1.0


def data_dir() -> Path:
    """The folder of shipped files."""
    return Path(str(files(__name__))) / "data"


@dataclass(frozen=True)
class Files:
    """Where an organism's parts lie, the shipped one's or those of another build."""

    root: Path

    @property
    def model(self) -> Path:
        """Loads with AutoModelForCausalLM and AutoTokenizer, offline."""
        return self.root / "model"

    @property
    def problems(self) -> Path:
        return self.root / "problems.jsonl"

    @property
    def pool(self) -> Path:
        return self.root / "pool"

    @property
    def pairs(self) -> Path:
        """<mode>.json, and placebo_<contrast>.json."""
        return self.root / "pairs"

    @property
    def anchors(self) -> Path:
        """Correct solutions in unusual styles."""
        return self.root / "anchors.json"


EMBEDDED = Files(data_dir())
DATA_DIR, MODEL_DIR, PROBLEMS = EMBEDDED.root, EMBEDDED.model, EMBEDDED.problems
POOL_DIR, PAIRS_DIR, ANCHORS = EMBEDDED.pool, EMBEDDED.pairs, EMBEDDED.anchors
