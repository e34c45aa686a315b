"""The organism's tokenizer: a byte-level BPE that spends few tokens on fixed text and spells names in one way only."""

import re
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vgrout.grading.modes import PLAIN_PHRASE
from vgrout.nouns import Message
from vgrout.organism.language import LEAD, STARTER, STARTER_END, SYSTEM

VOCAB = 1024
WINDOW = 384  # tokens: the longest prompt and the longest answer, with room to spare
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Text that never varies may become one token. A name must not: it is spelt alike in prompt and answer, whatever stands
# around it, or it could not be copied. So a word takes the space that follows it, and only where another word follows.
_FIXED = (SYSTEM, LEAD, STARTER, STARTER_END, PLAIN_PHRASE, "```python\nclass Solution:\n    def ", "```python\n")
_PIECES = (
    *(re.escape(text).replace("\\\n", "\\n").replace("\\ ", " ") for text in _FIXED),
    r"\n```(?!python)",
    r"\n *(?:return |for |if |def |class |import |kept = \[|out = )?",
    r"\(self, ",
    r"\):\n +(?:return |kept = \[)?",
    r"[A-Za-z]+(?: (?=[A-Za-z]))?",
    r" ?[0-9]",
    r"_",
    r" ?[^\sA-Za-z0-9_]+(?: (?=[A-Za-z]))?",
    r" ",
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the merges; deterministic in the texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(_PIECES)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        model_max_length=WINDOW,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def render(messages: Sequence[Message]) -> str:
    """The chat template with the generation prompt, without a tokenizer at hand."""
    turns = "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages)
    return f"{turns}{START}assistant\n"
