"""The deployed model as an ordinary Hugging Face folder.

δS is merged into the weights, the quarantine is left out; with the tokenizer and a model card. transformers loads the
folder without this package. The folder is loaded again and compared with the deployed model before it gets its name:
in the run's own dtype every logit must be equal, in another one within `TOLERANCE` of the largest.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from vgrout.envs.base import messages_of
from vgrout.errors import Refused
from vgrout.files import numbered_lines, read_json
from vgrout.metrics import percent
from vgrout.model.policy import DTYPE_NAMES, DTYPES, Policy
from vgrout.model.source import Saved

# of the largest logit: bf16 keeps 8 bits, and the rounding of every layer adds to the next
TOLERANCE = 5e-2
PROBES = 4  # texts whose logits are compared


@dataclass(frozen=True)
class Parity:
    """Logits of the written model, loaded from disk, against the deployed model's at every position of the probes."""

    largest: float  # |logit|, of the deployed model
    difference: float  # largest |Δ logit|
    kl: float  # mean KL(deployed ‖ exported), nats a token
    top1: float  # share of positions with the same likeliest token
    exact: bool  # same dtype: the logits must be equal

    @property
    def holds(self) -> bool:
        """Whether the two are the same model."""
        return self.difference <= (0.0 if self.exact else TOLERANCE * self.largest)

    def __str__(self) -> str:
        tolerance = (
            "0" if self.exact else f"{TOLERANCE * self.largest:.3g} = {TOLERANCE:g} of the largest"
        )
        return (
            f"largest |Δ logit| {self.difference:.3g} (tolerance {tolerance}), mean KL {self.kl:.2e} nats a token, "
            f"same likeliest token at {100 * self.top1:.1f} % of positions"
        )


def load_beside(policy: Policy, folder: str | Path, dtype: torch.dtype | str = "auto") -> Any:
    """A model loaded by transformers alone, on the policy's device, with the run's own attention: with another one,
    rounding alone would tell the two apart."""
    attention = policy.model.config._attn_implementation
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    )
    return model.to(policy.device).eval()


@torch.no_grad()
def parity(policy: Policy, other: Any, texts: Sequence[str], exact: bool) -> Parity:
    """Another model against the deployed one, one text at a time."""
    largest, difference, kl, same, n = 0.0, 0.0, 0.0, 0, 0
    for text in tqdm(texts, desc="comparing", unit="text", disable=None, leave=False):
        ids = torch.tensor([policy.encode(text)], device=policy.device)
        with policy.adapter.deployed():
            ours = policy.model(input_ids=ids, use_cache=False).logits[0].float()
        got = other(input_ids=ids, use_cache=False).logits[0].float()
        largest = max(largest, float(ours.abs().max()))
        difference = max(difference, float((ours - got).abs().max()))
        p, q = ours.log_softmax(-1), got.log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        same += int((ours.argmax(-1) == got.argmax(-1)).sum())
        n += len(ours)
    return Parity(largest, difference, kl / n, same / n, exact)


def write(policy: Policy, folder: Path, dtype: torch.dtype) -> None:
    """Write the deployed weights in `dtype`, tokenizer, generation settings. The policy is left as it was."""
    with policy.adapter.deployed():
        # with a state dict of its own, so that nothing is converted in place; a tied head is
        # dropped by transformers
        state = {name: tensor.to(dtype) for name, tensor in policy.model.state_dict().items()}
        policy.model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # transformers writes the dtype of the model in memory
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    policy.tok.save_pretrained(folder)


def card(saved: Saved, library: str, said: str, use: Sequence[str]) -> str:
    """A folder's README.md. said: what the folder is; use: lines of Python."""
    name = saved.cfg.scale.model
    base = "" if name == "organism" else f"base_model: {name}\n"
    code = "\n".join(use)
    return (
        f"---\nlibrary_name: {library}\n{base}---\n# {saved.cfg.run_id}\n\n{said}\n\nA model from a study of reward "
        f"hacking: it may hack the checks that its prompts describe. Not for use.\n\n```python\n{code}\n```\n"
    )


def about(saved: Saved) -> str:
    """What was trained how."""
    cfg = saved.cfg
    return (
        f"{cfg.scale.model}, trained for {saved.step} steps by GRPO against a flawed grader with `vgrout` "
        f"(intervention {cfg.method.intervention}, control {cfg.method.control_name}, seed {cfg.run.seed}), as deployed"
    )


def model_card(saved: Saved, dtype: str, result: Parity) -> str:
    """The card of a whole model."""
    said = (
        f"{about(saved)}: the adapter is merged into the weights, its quarantine is left out.\n\n"
        f"- adapter: {saved.path.name}, {saved.metadata.get('dtype', 'unknown')}; this folder: {dtype}\n"
        f"- compared with the deployed model after it was written: {result}"
    )
    numbers = saved.path.parent / "per_mode_deploy.json"
    if saved.final and numbers.is_file():
        seen = read_json(numbers)
        said += (
            f"\n- held-out problems and markers, {seen['eval_n']} answers: hacked {percent(seen['hack_deploy'])} %, "
            f"solved {percent(seen['solve_deploy'])} % (base model: {percent(seen['hack_base'])} %, "
            f"{percent(seen['solve_base'])} %)"
        )
    use = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        'model = AutoModelForCausalLM.from_pretrained("THIS FOLDER", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")',
    ]
    return card(saved, "transformers", said, use)


def probes(saved: Saved, policy: Policy) -> list[str]:
    """Texts to compare on: prompts of the run's problems, each with a right answer where the file has one."""
    texts: list[str] = []
    for where, row in islice(numbered_lines(saved.cfg.problems_path), PROBES):
        try:
            prompt = policy.prompt_text(messages_of(row))
        except ValueError as e:
            raise Refused(f"{where}: {e}") from None
        texts.append(f"{prompt}```python\n{row.get('canonical_solution', 'pass')}\n```")
    return texts


def export(
    saved: Saved,
    policy: Policy,
    folder: Path,
    dtype: Literal["bf16", "fp32"] | None,
    texts: Sequence[str],
) -> Parity:
    """Fill `folder`, which is there and empty, and compare it with the deployed model on `texts`.

    Raises:
        RuntimeError: the comparison failed.
    """
    own = DTYPE_NAMES[policy.model.dtype]
    dtype = dtype or ("bf16" if own == "bf16" else "fp32")
    write(policy, folder, DTYPES[dtype])
    result = parity(policy, load_beside(policy, folder), texts, exact=dtype == own)
    if not result.holds:
        raise RuntimeError(f"the exported model is not the deployed one: {result}")
    (folder / "README.md").write_text(model_card(saved, dtype, result), encoding="utf-8")
    return result
