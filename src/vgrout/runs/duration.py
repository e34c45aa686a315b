"""How long a run takes here: its work over what this machine does in a second, which is timed. An estimate."""

import math
import time
from collections.abc import Callable

from vgrout.config.run import Config
from vgrout.model.memory import KV_BUDGET
from vgrout.model.source import ITEMSIZE, Shapes

# Share of a large matrix product's speed that a run reaches, with every answer taken to be of the greatest length: what
# small products, shared prompts and shorter answers come to in `mini` on two cores.
EFFICIENCY = 0.5


def speed(gpu: bool) -> tuple[float, float]:
    """FLOP and bytes a second, of a product of two matrices and of a copy: the best of a few, in under a second."""
    if gpu:
        import torch

        a = torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
        product, copy, wait = (lambda: a @ a), a.clone, torch.cuda.synchronize
        n, size = 8192, 2 * a.numel() * a.element_size()
    else:
        import numpy as np

        n, b, to = 1024, np.ones(2**23, np.float32), np.empty(2**23, np.float32)
        m = np.ones((n, n), np.float32)
        product, copy, wait, size = (lambda: m @ m), (lambda: np.copyto(to, b)), (lambda: None), 2 * b.nbytes
    return 2 * n**3 / _fastest(product, wait), size / _fastest(copy, wait)


def _fastest(work: Callable[[], object], wait: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)


def seconds(cfg: Config, shapes: Shapes, prompt_tokens: int, answers: tuple[int, int], gpu: bool, dtype: str) -> float:
    """Of the whole run. prompt_tokens: of the longest prompt. answers: in an evaluation on the way, in the last. dtype:
    of the weights."""
    flops, bytes_ = speed(gpu)
    flops *= 2 if dtype == "bf16" and not gpu else 1  # a CPU that has bf16 products does at least twice as many
    s, size, device = cfg.scale, ITEMSIZE[dtype], "cuda" if gpu else "cpu"
    row = prompt_tokens + s.max_new

    def sampling(n: int) -> float:
        """Every token of a batch reads all weights; a batch is as large as its keys and values may be."""
        batches = math.ceil(n * row * shapes.kv_bytes(size) / KV_BUDGET[device])
        reading = batches * shapes.parameters * size / bytes_
        return s.max_new * max(reading, n * 2 * shapes.parameters / flops)

    # forward, gradient of the activations, and as much again for the adapter and every answer's own gradient
    update = cfg.generations * row * 8 * shapes.parameters / flops
    reading = cfg.method.forwards * cfg.generations * row * 2 * shapes.parameters / flops
    step = sampling(cfg.generations - cfg.n_teacher * s.prompts_per_step) + update + reading
    on_the_way = sum(map(cfg.evaluates, range(s.steps))) * sampling(answers[0])
    return (s.steps * step + on_the_way + sampling(answers[1])) / EFFICIENCY


def in_words(s: float) -> str:
    """Two digits and a unit."""
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "min")):
        if s >= 1.5 * size:
            return f"{s / size:.2g} {unit}" if s < 100 * size else f"{s / size:,.0f} {unit}"
    return f"{s:.2g} s"
