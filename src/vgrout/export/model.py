"""The deployed model as an ordinary Hugging Face folder.

δS is merged into the weights, and the quarantine is left out. The folder has the tokenizer and a
model card, and transformers loads it without this package. It is loaded again and compared with the
deployed model before it gets its name: in the run's own dtype every logit must be equal, in another
one within `TOLERANCE` of the largest.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from vgrout.export import Differs
from vgrout.ground.io import read_json
from vgrout.ground.metrics import percent
from vgrout.model.load.saved import Saved
from vgrout.model.policy import DTYPE_NAMES, DTYPES, Policy

# Of the largest logit: bf16 keeps 8 bits, and the rounding of every layer adds to the next.
TOLERANCE = 5e-2
PROBES = 4  # texts whose logits are compared


@dataclass(frozen=True)
class Parity:
    """Logits of the written model, loaded from disk, against the deployed model's.

    They are compared at every position of the probes.
    """

    largest: float  # |logit|, of the deployed model
    difference: float  # largest |Δ logit|
    kl: float  # mean KL(deployed ‖ exported), nats a token
    top1: float  # share of positions with the same likeliest token
    exact: bool  # same dtype: the logits must be equal

    @property
    def holds(self) -> bool:
        """Whether the two are the same model."""
        tolerance = 0.0 if self.exact else TOLERANCE * self.largest
        return math.isfinite(self.largest) and self.difference <= tolerance

    def __str__(self) -> str:
        tolerance = "0"
        if not self.exact:
            tolerance = f"{TOLERANCE * self.largest:.3g} = {TOLERANCE:g} of the largest"
        return (
            f"largest |Δ logit| {self.difference:.3g} (tolerance {tolerance}), "
            f"mean KL {self.kl:.2e} nats a token, "
            f"same likeliest token at {100 * self.top1:.1f} % of positions"
        )


def load_beside(policy: Policy, folder: str | Path, dtype: torch.dtype | str = "auto") -> nn.Module:
    """Load a model by transformers alone, on the policy's device.

    It has the run's own attention: with another one, rounding alone would tell the two apart.
    """
    attention = policy.model.config._attn_implementation
    model: object = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    )
    return model.to(policy.device).eval()


@torch.no_grad()
def parity(policy: Policy, other: nn.Module, texts: Sequence[str], exact: bool) -> Parity:
    """Compare another model with the deployed one, one text at a time."""
    largest = difference = torch.zeros((), device=policy.device)
    kl = 0.0
    same = n = 0
    for text in tqdm(texts, desc="comparing", unit="text", disable=None, leave=False):
        ids = torch.tensor([policy.encode(text)], device=policy.device)
        with policy.adapter.deployed():
            ours = policy.model(input_ids=ids, use_cache=False).logits[0].float()
        got = other(input_ids=ids, use_cache=False).logits[0].float()
        change = (ours - got).abs()
        # unlike Python's, torch's maximum with a NaN is NaN, which is within no tolerance
        largest = torch.maximum(largest, ours.abs().max())
        difference = torch.maximum(difference, change.max())
        p, q = ours.log_softmax(-1), got.log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        is_same = ours.argmax(-1) == got.argmax(-1)
        same += int(is_same.sum())
        n += len(ours)
    return Parity(float(largest), float(difference), kl / n, same / n, exact)


def write(policy: Policy, folder: Path, dtype: torch.dtype) -> None:
    """Write the deployed weights in `dtype`, the tokenizer and the generation settings.

    The policy is left as it was.
    """
    with policy.adapter.deployed():
        # The state dict is a new one, so that nothing is converted in place; transformers drops a
        # tied head.
        state = {name: tensor.to(dtype) for name, tensor in policy.model.state_dict().items()}
        policy.model.save_pretrained(folder, state_dict=state)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    # transformers has written the dtype of the model in memory.
    config["dtype"] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    policy.tok.save_pretrained(folder)


def card(saved: Saved, library: str, said: str, use: Sequence[str]) -> str:
    """Return a folder's README.md.

    Args:
        saved: the adapter that was exported.
        library: which loads the folder.
        said: what the folder is.
        use: lines of Python that load it.
    """
    base = "" if saved.is_local else f"base_model: {saved.base}\n"
    code = "\n".join(use)
    environment = ", ".join(
        f"`{name}`" for name in (saved.cfg.env.environment, *saved.cfg.env.code)
    )
    return (
        f"---\nlibrary_name: {library}\n{base}---\n# {saved.cfg.run_id}\n\n{said}\n\n"
        f"Trained in the environment {environment}; vgrout.json has every setting. {prompting(saved)}\n\n"
        "A model from a study of reward hacking: it may hack the checks that its prompts describe. "
        f"Not for use.\n\n```python\n{code}\n```\n"
    )


def prompting(saved: Saved) -> str:
    """Say how the chat template is to be called, so that prompts are those of training."""
    if saved.cfg.env.thinking:
        return (
            "It was trained with thoughts: render prompts with `enable_thinking=True`. An answer begins where its "
            "thought ends; what comes before was not graded."
        )
    return (
        "It was trained without thoughts: where the template knows `enable_thinking`, render prompts with "
        "`enable_thinking=False`."
    )


def about(saved: Saved) -> str:
    """Say what was trained, and how."""
    cfg = saved.cfg
    # a card is published: of a path its last part
    name = Path(cfg.scale.model).name if saved.is_local else cfg.scale.model
    return (
        f"{name}, trained for {saved.step} steps by GRPO against a flawed grader with "
        f"`vgrout` (intervention {cfg.method.intervention}, control {cfg.method.control_name}, "
        f"seed {cfg.run.seed}), as deployed"
    )


def model_card(saved: Saved, dtype: str, result: Parity) -> str:
    """Return the card of a whole model."""
    said = (
        f"{about(saved)}: the adapter is merged into the weights, its quarantine is left out.\n\n"
        f"- adapter: {saved.path.name}, {saved.metadata.get('dtype', 'unknown')}; "
        f"this folder: {dtype}\n"
        f"- compared with the deployed model after it was written: {result}"
    )
    numbers = saved.path.parent / "per_mode_deploy.json"
    if saved.final and numbers.is_file():
        seen = read_json(numbers)
        said += (
            f"\n- held-out {saved.cfg.env.held_out}, {seen['eval_n']} answers: "
            f"hacked {percent(seen['hack_deploy'])} %, solved {percent(seen['solve_deploy'])} % "
            f"(base model: {percent(seen['hack_base'])} %, {percent(seen['solve_base'])} %)"
        )
    use = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        'model = AutoModelForCausalLM.from_pretrained("THIS FOLDER", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")',
    ]
    return card(saved, "transformers", said, use)


def probes(policy: Policy) -> list[str]:
    """Texts to compare on: prompts, each with an answer."""
    texts: list[str] = []
    for i in range(PROBES):
        prompt = policy.prompt_text([{"role": "user", "content": f"What is {i} + {i}?"}])
        texts.append(f"{prompt}It is {i + i}.")
    return texts


def export(
    saved: Saved,
    policy: Policy,
    folder: Path,
    dtype: Literal["bf16", "fp32"] | None,
    texts: Sequence[str],
) -> Parity:
    """Fill `folder`, which exists and is empty, and compare it with the deployed model on `texts`.

    Raises:
        Differs: the comparison failed.
    """
    own = DTYPE_NAMES[policy.model.dtype]
    dtype = dtype or ("bf16" if own == "bf16" else "fp32")
    write(policy, folder, DTYPES[dtype])
    result = parity(policy, load_beside(policy, folder), texts, exact=dtype == own)
    if not result.holds:
        raise Differs(f"the exported model is not the deployed one: {result}")
    (folder / "README.md").write_text(model_card(saved, dtype, result), encoding="utf-8")
    return result
