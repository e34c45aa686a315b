"""Decomposed weights on disk."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from loguru import logger
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor

from vgrout.files import write_atomic

SCHEMA = "svd-1"  # part of every cache key: raise it when the decomposition changes

Decompose = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class SvdCache:
    """One file a weight, named by the sha256 of the weight's own bytes, dtype and shape."""

    def __init__(self, folder: Path | None, compute: Decompose) -> None:
        self.folder, self.compute = folder, compute
        self.writable = folder is not None

    def decompose(self, W: Float[Tensor, "d_out d_in"]) -> tuple[Tensor, Tensor, Tensor]:
        """U [d_out, r], S [r], Vh [r, d_in] of W, from the file where there is a sound one, which else is written."""
        if self.folder is None:
            return self.compute(W)
        path = self.folder / f"{weight_key(W)}.safetensors"
        if path.exists():
            try:
                return _checked(W, path)
            except (OSError, SafetensorError, ValueError, KeyError) as error:
                logger.warning(f"SVD cache file {path} is unusable ({error}): computed again")
        U, S, Vh = self.compute(W)
        if not self.writable:
            return U, S, Vh
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, to_safetensors({"U": U.cpu(), "S": S.cpu(), "Vh": Vh.cpu()}))
        except OSError as error:
            logger.warning(f"SVD cache {self.folder} cannot be written ({error}): this run works without it")
            self.writable = False
        return U, S, Vh


def svd(W: Float[Tensor, "d_out d_in"]) -> tuple[Tensor, Tensor, Tensor]:
    """(U, S, Vh) of W: computed in fp32 at least, U and Vh in W's dtype, the largest entry of each column of U > 0."""
    U, S, Vh = torch.linalg.svd(W.to(torch.promote_types(W.dtype, torch.float32)), full_matrices=False)
    sign = U.gather(0, U.abs().argmax(0, keepdim=True)).sign().squeeze(0)
    return (U * sign).to(W.dtype).contiguous(), S, (Vh * sign[:, None]).to(W.dtype).contiguous()


def weight_key(W: Float[Tensor, "d_out d_in"]) -> str:
    """sha256 over schema, dtype, shape and every byte of W."""
    digest = hashlib.sha256(f"{SCHEMA} {W.dtype} {tuple(W.shape)}".encode())
    digest.update(W.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checked(W: Float[Tensor, "d_out d_in"], path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """A cache file's content, if it reproduces W on a fixed random vector (catches a torn or foreign file)."""
    tensors = load_file(path, device=str(W.device))
    U, S, Vh = tensors["U"], tensors["S"], tensors["Vh"]
    r = min(W.shape)
    if (U.shape, S.shape, Vh.shape) != ((W.shape[0], r), (r,), (r, W.shape[1])) or {U.dtype, Vh.dtype} != {W.dtype}:
        raise ValueError("other shapes or dtype")
    z = torch.randn(W.shape[1], generator=torch.Generator().manual_seed(0), dtype=S.dtype).to(W.device)
    want, got = W.to(S.dtype) @ z, U.to(S.dtype) @ (S * (Vh.to(S.dtype) @ z))
    # rounding U and Vh to W's dtype leaves about one eps each; 16 eps is far below what any damage does
    tolerance = 16 * torch.finfo(W.dtype).eps * max(W.shape) ** 0.5
    if not (want - got).norm() <= tolerance * (S.max() * z.norm()):
        raise ValueError("does not reproduce the weight")
    return U, S, Vh
