"""A GPU on a machine without one: tensors that say cuda:0 and lie in host memory. What CUDA refuses is refused (tensors
of two devices in one operation, numpy on a GPU's tensor), and what makes the host wait for the device is counted.

It shows where tensors are, and how often the host waits. It shows nothing of kernels, their rounding, memory or time.
"""

import contextlib
import traceback
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoModelForCausalLM

import vgrout
from vgrout.ground.embedded import DATA_DIR
from vgrout.model import attention
from vgrout.model.sampling import decoder as decoders
from vgrout.model.sampling.decoder import LeanDecoder

PACKAGE = f"{Path(vgrout.__file__).parent}/"
GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
COPIES = {"aten::copy_", "aten::_to_copy"}  # may read one device and write another
# host indices are allowed
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# The size of the result is known to the device alone, or a number goes to the host.
WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::equal",
}


class OnGpu(Tensor):
    """Shares the memory of the host tensor that it was made of."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self):
        return 0

    def tolist(self):
        return _now().to_host(self).tolist()

    def numpy(self, *_, **__):
        raise TypeError("a tensor on the GPU is no numpy array: copy it to the host first")

    __array__ = numpy

    def __deepcopy__(self, memo):
        return self.detach().clone().requires_grad_(self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return _now().call(operator, args, kwargs or {})


@dataclass
class PretendedGpu:
    """What has happened on it."""

    waits: Counter[str] = field(default_factory=Counter)  # by the line of the program
    operations: int = 0
    paused: bool = False
    # all copies to the host that were begun, and what they are once somebody has waited for them
    under_way: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def call(self, operator, args, kwargs):
        """An operation of torch, below autograd."""
        name = operator._schema.name
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        given = any(isinstance(x, OnGpu) for x in tensors)
        result = given
        self.operations += given
        if (device := kwargs.get("device")) is not None:
            # makes tensors on what C++ takes for their device
            backward = torch._C._current_graph_task_id() != -1
            result = torch.device(device).type == "cuda" or (backward and (given or not tensors))
            kwargs = {**kwargs, "device": HOST}
            if tensors and result != given and not kwargs.get("non_blocking"):
                self.wait()
        if name in COPIES:
            if name == "aten::copy_" and isinstance(args[0], OnGpu) != isinstance(args[1], OnGpu):
                self.wait()
        elif device is None:
            checked = tensors
            if name in INDEXING:
                checked = [x for x in (args[0], *args[2:], *args[1]) if isinstance(x, Tensor)]
                checked = [
                    x for x in checked if isinstance(x, OnGpu) or not any(x is i for i in args[1])
                ]
            if len({isinstance(x, OnGpu) for x in checked if isinstance(x, OnGpu) or x.ndim}) > 1:
                where = [
                    f"{tuple(x.shape)} on {'the GPU' if isinstance(x, OnGpu) else 'the host'}"
                    for x in checked
                ]
                raise RuntimeError(
                    f"{name} of tensors on two devices: {', '.join(where)}; {_line()}"
                )
        if given and (name in WAITS or (name in INDEXING and any(_waits(i) for i in args[1]))):
            self.wait()
        with torch._C._DisableTorchDispatch():
            out = operator(*args, **kwargs)
        return tree_map(on_gpu, out) if result else out

    def wait(self, does=True):
        if does:
            self.waits[_line()] += 1

    def to_host(self, x):
        self.wait()
        return _plain(x)

    def begin_copy(self, x):
        """A copy to the host that holds something else until an event has been waited for."""
        copy = _plain(x)
        self.under_way.append((copy, copy.clone()))
        return copy.fill_(-1)

    def finish_copies(self, n):
        """The first n that were begun."""
        self.wait()
        for copy, x in self.under_way[:n]:
            copy.copy_(x)

    def to(self, x, how, kwargs):
        """Tensor.to, of which C++ thinks that both devices are the host."""
        others = [a for a in (*how, *kwargs.values()) if isinstance(a, Tensor)]
        device, dtype, non_blocking, _ = (
            (others[0].device, others[0].dtype, False, None)
            if others
            else torch._C._nn._parse_to(*how, **kwargs)
        )
        if device is not None and device.type != x.device.type:
            if device.type == "cpu":
                x = self.begin_copy(x) if non_blocking else self.to_host(x)
            else:
                self.wait(not non_blocking and x.numel() > 0)  # nothing is copied of an empty one
                x = on_gpu(x.clone())
        return x if dtype in (None, x.dtype) else x.to(dtype=dtype)


class Event:
    """torch.cuda.Event: after all that the device had been given to do when it was recorded."""

    def record(self, stream=None):
        self.copies = len(_now().under_way)

    def synchronize(self):
        _now().finish_copies(self.copies)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        gpu = _now()
        return (
            operator(*args, **(kwargs or {}))
            if gpu.paused
            else gpu.call(operator, args, kwargs or {})
        )


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        gpu, kwargs = _now(), kwargs or {}
        if gpu.paused:
            return function(*args, **kwargs)
        if function is Tensor.to and len(args) + len(kwargs) > 1:
            return gpu.to(args[0], args[1:], kwargs)
        if function is Tensor.cpu:
            return gpu.to_host(args[0]) if isinstance(args[0], OnGpu) else function(*args)
        if function is Tensor.pin_memory:
            return args[0].clone()
        # "cuda" without a number would ask the driver for the present one
        return function(*map(_numbered, args), **{name: _numbered(x) for name, x in kwargs.items()})


_current = []


def _now():
    return _current[-1] if _current else PretendedGpu()


def _line():
    """Of the program, that is being run."""
    inside = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
    return (
        f"{inside[-1].filename.removeprefix(PACKAGE)}:{inside[-1].name}" if inside else "elsewhere"
    )


def on_gpu(x):
    return (
        Tensor._make_subclass(OnGpu, x) if isinstance(x, Tensor) and not isinstance(x, OnGpu) else x
    )


def _plain(x):
    """The same on the host."""
    if not isinstance(x, OnGpu):
        return x
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return Tensor._make_subclass(Tensor, x.detach()).clone()


def _numbered(x):
    return GPU if isinstance(x, str | torch.device) and str(x) == "cuda" else x


def _waits(index):
    return isinstance(index, Tensor) and (index.dtype == torch.bool or not isinstance(index, OnGpu))


def varlen_on_cpu(monkeypatch):
    """torch's varlen kernel, which refuses a CPU, run by run through SDPA; the queries of each call."""
    queries = list[int]()

    def kernel(
        q, k, v, cu_q, cu_k, most_q, most_k, *,
        scale, window_size, enable_gqa,
    ):  # fmt: skip
        assert cu_q.dtype == cu_k.dtype == torch.int32
        ends_q, ends_k = (_plain(x).tolist() for x in (cu_q, cu_k))
        runs_q, runs_k = ([b - a for a, b in pairwise(ends)] for ends in (ends_q, ends_k))
        assert (ends_q[-1], ends_k[-1], max(runs_q), max(runs_k)) == (
            len(q),
            len(k),
            most_q,
            most_k,
        )
        assert (window_size, enable_gqa) == ((-1, 0), True)
        queries.append(len(q))
        out = []
        for of_q, of_k, of_v in zip(q.split(runs_q), k.split(runs_k), v.split(runs_k), strict=True):
            # aligned at the end
            seen = q.new_ones(len(of_q), len(of_k), dtype=torch.bool).tril(len(of_k) - len(of_q))
            run = (x.transpose(0, 1)[None] for x in (of_q, of_k, of_v))
            out.append(
                scaled_dot_product_attention(*run, attn_mask=seen, scale=scale, enable_gqa=True)[
                    0
                ].transpose(0, 1)
            )
        return torch.cat(out)

    monkeypatch.setattr(attention, "kernel_name", lambda *_: "varlen_attn")
    causal = partial(kernel, window_size=(-1, 0), enable_gqa=True)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: causal)
    return queries


@dataclass
class Graph:
    """A step that is run again where CUDA would replay it."""

    lean: LeanDecoder
    n: int
    logits: Tensor
    replayed: int = 0

    def replay(self):
        self.replayed += 1
        self.logits.copy_(self.lean._forward(self.lean.tokens[: self.n]))


def graphs_that_run_again(monkeypatch):
    """Stand-ins for CUDA's graphs from here on; those that are made."""
    made = []

    def captured(self, n):
        before = self.cache.next.clone(), self.position.clone()
        logits = self._forward(self.tokens[:n]).clone()
        self.cache.next.copy_(before[0])
        self.position.copy_(before[1])
        made.append(Graph(self, n, logits))
        return decoders._Captured(made[-1], logits)

    monkeypatch.setattr(LeanDecoder, "_captured", captured)
    return made


@cache
def _first_load():
    """What transformers sets up when it first loads a model would hold on to what is pretended: rotary frequencies of
    every later one, on the host too, would be whatever was in memory."""
    AutoModelForCausalLM.from_pretrained(DATA_DIR / "model")


@contextlib.contextmanager
def pretended_gpu():
    """Within the block torch has one GPU, an H100."""
    _first_load()
    gpu = PretendedGpu()
    made, saved, loaded, read = (
        torch.tensor,
        torch.save,
        AutoModelForCausalLM.from_pretrained,
        safetensors.torch.load_file,
    )

    def tensor(*data, device=None, **how):
        return made(*data, **how).to(device) if device is not None else made(*data, **how)

    def from_pretrained(*args, **kwargs):
        gpu.paused = True  # transformers goes by devices of its own while it reads
        try:
            return loaded(*args, **kwargs)
        finally:
            gpu.paused = False

    def load_file(path, device="cpu"):
        tensors = read(path)
        return {name: x.to(torch.device(device)) for name, x in tensors.items()}

    cuda = {
        "_lazy_init": None, "synchronize": None, "set_rng_state": None, "is_available": True, "is_initialized": False,
        "current_device": 0, "device_count": 1, "get_device_name": "pretended", "get_device_capability": (9, 0),
        "max_memory_allocated": 0, "memory_allocated": 0, "memory_reserved": 0, "reset_peak_memory_stats": None,
        "set_sync_debug_mode": None, "current_stream": None, "mem_get_info": (80 * 10**9, 80 * 10**9),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as m, contextlib.ExitStack() as modes:
        for name, value in cuda.items():
            m.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
        m.setattr(torch.cuda, "Event", Event)
        m.setattr(torch, "tensor", tensor)
        m.setattr(torch, "save", lambda state, *more: saved(tree_map(_plain, state), *more))
        m.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
        m.setattr("vgrout.model.svd_files.load_file", load_file)
        m.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda _: None)
        for module in ("vgrout.runs.plan", "vgrout.model.load.load"):
            m.setattr(f"{module}.visible", lambda: ("0",))
        varlen_on_cpu(m)
        graphs_that_run_again(m)
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        _current.append(gpu)
        modes.enter_context(_Operations())
        modes.enter_context(_Functions())
        try:
            yield gpu
        finally:
            modes.close()
            _current.pop()
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
