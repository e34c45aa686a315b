"""The type of what autograd hands to a Function's `forward` and `backward`."""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Context(Protocol):
    """The `ctx` of a Function that keeps tensors alone."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...
