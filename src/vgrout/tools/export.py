"""`python -m vgrout.export RUN --out DIR`: the deployed model as an ordinary Hugging Face folder.

δS is merged into the weights, the quarantine is left out; with the tokenizer and a model card. transformers loads the
folder without this package. The folder is loaded again and compared with the deployed model before it gets its name:
in the run's own dtype every logit must be equal, in another one within `TOLERANCE` of the largest.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from loguru import logger
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from vgrout import console
from vgrout.cli import parse_args
from vgrout.files import read_json
from vgrout.model.policy import Policy
from vgrout.model.saved import Saved, find_adapter, load_saved

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOLERANCE = 5e-2  # of the largest logit: bf16 keeps 8 bits, and the rounding of every layer adds to the next
PROBES = 4  # texts whose logits are compared


@dataclass(frozen=True)
class Parity:
    """Logits of the folder as loaded from disk against the deployed model's, over every position of the probes."""

    largest: float  # |logit|, of the deployed model
    difference: float  # largest |Δ logit|
    kl: float  # mean KL(deployed ‖ exported), nats a token
    top1: float  # share of positions with the same likeliest token
    exact: bool  # same dtype: equality is asked for

    @property
    def holds(self) -> bool:
        """Whether the two are the same model."""
        return self.difference <= (0.0 if self.exact else TOLERANCE * self.largest)

    def __str__(self) -> str:
        tolerance = "0" if self.exact else f"{TOLERANCE * self.largest:.3g} = {TOLERANCE:g} of the largest"
        return (
            f"largest |Δ logit| {self.difference:.3g} (tolerance {tolerance}), mean KL {self.kl:.2e} nats a token, "
            f"same likeliest token at {100 * self.top1:.1f} % of positions"
        )


@torch.no_grad()
def parity(policy: Policy, folder: Path, texts: Sequence[str], exact: bool) -> Parity:
    """`folder`, loaded by transformers, against the deployed model: on the policy's device, one text at a time."""
    # the run's own kind of attention, or rounding alone would tell the two apart
    attention = policy.model.config._attn_implementation
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation=attention)
    theirs = theirs.to(policy.device).eval()
    largest, difference, kl, same, n = 0.0, 0.0, 0.0, 0, 0
    for text in tqdm(texts, desc="comparing", unit="text", disable=None, leave=False):
        ids = torch.tensor([policy.encode(text)], device=policy.device)
        with policy.adapter.deployed():
            ours = policy.model(input_ids=ids, use_cache=False).logits[0].float()
        got = theirs(input_ids=ids, use_cache=False).logits[0].float()
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
        # with a state dict of its own, so that nothing is converted in place; a tied head is dropped by transformers
        state = {name: tensor.to(dtype) for name, tensor in policy.model.state_dict().items()}
        policy.model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")  # transformers writes the dtype of the model in memory
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    policy.tok.save_pretrained(folder)


def card(saved: Saved, dtype: str, result: Parity) -> str:
    """The folder's model card, README.md."""
    cfg = saved.cfg
    lines = [
        "---",
        "library_name: transformers",
        *([] if saved.cfg.scale.model == "organism" else [f"base_model: {cfg.scale.model}"]),
        "---",
        f"# {cfg.run_id}",
        "",
        f"{cfg.scale.model}, trained for {saved.step} steps by GRPO against a flawed grader with `vgrout` "
        f"(intervention {cfg.arm.intervention}, control {cfg.arm.control_name}, seed {cfg.run.seed}), as deployed: "
        "the adapter is merged into the weights, its quarantine is left out.",
        "",
        f"- adapter: {saved.path.name}, {saved.metadata.get('dtype', 'unknown')}; this folder: {dtype}",
        f"- compared with the deployed model after it was written: {result}",
    ]
    if (numbers := saved.path.parent / "per_mode_deploy.json").is_file() and saved.final:
        seen = read_json(numbers)
        lines.append(
            f"- held-out problems and markers, {seen['eval_n']} answers: hacked {_percent(seen['hack_deploy'])}, "
            f"solved {_percent(seen['solve_deploy'])} (base model: {_percent(seen['hack_base'])}, "
            f"{_percent(seen['solve_base'])})"
        )
    lines += [
        "",
        "A model from a study of reward hacking: it may exploit the checks that its prompts describe. Not for use.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        'model = AutoModelForCausalLM.from_pretrained("THIS FOLDER", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")',
        "```",
    ]
    return "\n".join(lines) + "\n"


def _percent(rate: float | None) -> str:
    return "·" if rate is None else f"{100 * rate:.1f} %"


def probes(saved: Saved, policy: Policy) -> list[str]:
    """Texts to compare on: prompts of the run's problems, each with its canonical solution."""
    problems = saved.problems()[:PROBES]
    return [f"{policy.prompt_text(p.messages)}```python\n{p.canonical}\n```" for p in problems]


def export(saved: Saved, policy: Policy, out: Path, dtype: Literal["bf16", "fp32"] | None) -> Parity:
    """Write the folder, under a temporary name until the comparison holds.

    Raises:
        ValueError: `out` exists.
        RuntimeError: the comparison failed; nothing is left behind.
    """
    if out.exists():
        raise ValueError(f"--out {out}: exists; choose another folder or delete it")
    own = next(name for name, d in DTYPES.items() if d == policy.model.dtype)
    dtype = dtype or ("bf16" if own == "bf16" else "fp32")
    fresh = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    fresh.mkdir(parents=True)
    try:
        write(policy, fresh, DTYPES[dtype])
        result = parity(policy, fresh, probes(saved, policy), exact=dtype == own)
        if not result.holds:
            raise RuntimeError(f"the exported model is not the deployed one: {result}")
        (fresh / "README.md").write_text(card(saved, dtype, result), encoding="utf-8")
        origin = {"adapter": str(saved.path), "config": saved.cfg.as_dict(), "parity": vars(result)}
        (fresh / "vgrout.json").write_text(json.dumps(origin, indent=1, default=str) + "\n", encoding="utf-8")
        os.replace(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return result


@dataclass(frozen=True)
class Cli:
    """Write the deployed model of a run as a Hugging Face folder."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a saved adapter (.safetensors)."""
    out: Path
    """Folder to make."""
    step: int | None = None
    """The adapter saved after this many steps; none: train.safetensors."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Of the weights; none: the run's own."""
    model: str | None = None
    """Where the base model lies, if not where the run had it."""


def main(argv: list[str] | None = None) -> int:
    """0 written · 2 refused, in one line · 1 the written model was not the deployed one."""
    console.setup(None)
    try:
        cli = parse_args(Cli, argv, "python -m vgrout.export")
        if cli.out.exists():
            raise ValueError(f"--out {cli.out}: exists; choose another folder or delete it")
        saved = find_adapter(cli.run, cli.step, cli.model)
        policy = load_saved(saved)
        result = export(saved, policy, cli.out, cli.dtype)
    except ValueError as e:
        print(f"E {e}", file=sys.stderr)
        return 2
    except RuntimeError as e:
        logger.error(str(e))
        return 1
    size = sum(f.stat().st_size for f in cli.out.iterdir())
    print(f"{result}\n{size / 1e6:.1f} MB -> {cli.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
