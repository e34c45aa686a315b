"""The embedded organism: a complete miniature of the experiment, shipped in the package.

A small language of programming problems, a Qwen3 model of about a million parameters that has learnt it imperfectly, a
pool of demonstrations and contrastive pairs. `python -m vgrout.organism build` makes all of it from one seed.
"""

from importlib.resources import files
from pathlib import Path

MAX_NEW = 128  # tokens: the longest answer of the corpus, with room to spare
COMPILE_REWARD = 0.1
PASS_REWARD = 1.0


def data_dir() -> Path:
    """The folder of shipped files."""
    return Path(str(files(__name__))) / "data"


DATA_DIR = data_dir()
MODEL_DIR = DATA_DIR / "model"  # loads with AutoModelForCausalLM and AutoTokenizer, offline
PROBLEMS = DATA_DIR / "problems.jsonl"
POOL_DIR = DATA_DIR / "pool"
PAIRS_DIR = DATA_DIR / "pairs"  # <mode>.json, and placebo_<contrast>.json
ANCHORS = DATA_DIR / "anchors.json"  # correct solutions in unusual styles
