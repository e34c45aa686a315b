"""TRL's step on a GPU: `python -m benchmarks.gpu_peer '{…}'`, in a process of its own that leaves the card as it was.

The model has random weights in the shape that is given, the prompts are random tokens, and answers
are as long as they may be: the load of `benchmarks.gpu`. Seconds of each step but the first, and the
peak, are a JSON line on standard output.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import rig, trl_peer
from benchmarks.rig import Load

RANK = 32  # of LoRA: a usual one, and what its gradients cost hardly depends on it
STEPS = 3  # of which the first warms up
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass(frozen=True)
class Contestant:
    """How TRL is set."""

    shape: dict[str, int]  # of the model
    load: Load
    rows: int  # of a forward
    checkpointing: bool = False  # activations are computed again in the backward
    vllm: bool = False  # samples, in this process; else transformers does

    def __str__(self) -> str:
        sampler = "vLLM" if self.vllm else "transformers"
        checkpointing = ", checkpointing" if self.checkpointing else ""
        return f"TRL, {sampler}, {self.rows} rows a forward{checkpointing}"


def of_words(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words t0 … of these numbers."""
    words = {f"t{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="t0",
        eos_token="t1",
        pad_token="t2",
        padding_side="left",
    )
    made.chat_template = CHAT
    return made


def prompts_of(load: Load, vocabulary: int, steps: int) -> Iterator[list[dict[str, str]]]:
    """Random words, as conversations."""
    for group in rig.noise_groups(vocabulary, 1, load.prompts * steps, load.prompt, 1):
        words = " ".join(f"t{token}" for token in group.rollouts[0].prompt_ids)
        yield [{"role": "user", "content": words}]


def differing(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward by which answers differ, so that every group has a signal."""
    return [rig.differing(completion[0]["content"]) for completion in completions]


def measure(contestant: Contestant) -> list[float]:
    """Seconds of TRL's steps, without the first.

    Raises:
        Refused: a library is missing.
        Exception: whatever the libraries raise, where memory does not suffice for example.
    """
    lib = trl_peer.libraries()
    load = contestant.load
    vocabulary = contestant.shape["vocab_size"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = rig.random_model(device=device, dtype=torch.bfloat16, **contestant.shape)
    model.config._attn_implementation = "sdpa"
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 2
    tokenizer = of_words(vocabulary)
    sampler: dict[str, Any] = {}
    if contestant.vllm:
        # it reads the model from a folder
        folder = Path("random-model").resolve()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model.config._name_or_path = model.name_or_path = str(folder)
        sampler = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": load.prompt + load.answer + 64,
        }
    args = trl_peer.settings(
        load.answer,
        load.group,
        per_device_train_batch_size=contestant.rows,
        gradient_accumulation_steps=load.answers // contestant.rows,
        max_steps=STEPS,
        gradient_checkpointing=contestant.checkpointing,
        **sampler,
    )
    conversations = list(prompts_of(load, vocabulary, STEPS))
    clock = trl_peer.Clock(per_block=1, other=lambda: None)
    peer = lib["trl"].GRPOTrainer(
        model=model,
        reward_funcs=differing,
        args=args,
        train_dataset=lib["datasets"].Dataset.from_dict({"prompt": conversations}),
        processing_class=tokenizer,
        peft_config=trl_peer.lora(RANK),
        callbacks=[clock],
    )
    peer.train()
    return clock.blocks[1:]


def argument(contestant: Contestant) -> str:
    """The command line's one word for it."""
    return json.dumps(asdict(contestant))


def main(argv: Sequence[str]) -> int:
    """Measure the contestant that the one argument describes."""
    (described,) = argv
    with rig.workplace():
        torch.backends.cuda.enable_cudnn_sdp(False)
        given = json.loads(described)
        seconds = measure(Contestant(**given | {"load": Load(**given["load"])}))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(json.dumps({"seconds": seconds, "peak": peak}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
