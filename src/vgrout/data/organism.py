"""The embedded model organism, a complete miniature of the experiment: where its files lie, and its constants.

A small language of programming problems, a Qwen3 model of about a million parameters that has learnt it imperfectly, a
pool of demonstrations and contrastive pairs. `python -m vgrout.organism build` makes all of it from one seed.
"""

from pathlib import Path

MAX_NEW = 128  # tokens: the longest answer of the corpus, with room to spare
COMPILE_REWARD = 0.1
PASS_REWARD = 1.0


class Files:
    """Paths of an organism's parts: the shipped one's, or those of another build."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = root / "model"  # loads with AutoModelForCausalLM and AutoTokenizer, offline
        self.problems = root / "problems.jsonl"
        self.pool = root / "pool"
        self.pairs = root / "pairs"  # <mode>.json, and placebo_<contrast>.json
        self.known_correct = root / "anchors.json"  # correct solutions in unusual styles


EMBEDDED = Files(Path(__file__).resolve().parents[1] / "organism" / "data")
DATA_DIR, MODEL_DIR, PROBLEMS = EMBEDDED.root, EMBEDDED.model, EMBEDDED.problems
POOL_DIR, PAIRS_DIR, KNOWN_CORRECT = EMBEDDED.pool, EMBEDDED.pairs, EMBEDDED.known_correct
