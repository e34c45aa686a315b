"""What is in memory at a time, by torch's dispatcher."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """The most bytes at a time of tensors that were made inside, or seen there."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self._seen = 0, 0, set[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if (
                isinstance(t, torch.Tensor)
                and (key := id(storage := t.untyped_storage())) not in self._seen
            ):
                self._seen.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return out

    def _gone(self, key, n):
        self._seen.discard(key)
        self.now -= n
