"""Files of the SVD basis: decomposed weights, computed once and kept, and adapters with its fingerprint."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from loguru import logger
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor

from vgrout.ground.io import Refused, regular, write_atomic
from vgrout.ground.tensor_types import at_least_fp32

# ── decompositions

Weight = Float[Tensor, "d_out d_in"]
Factors = tuple[Tensor, Tensor, Tensor]  # U [d_out, r], S [r], Vh [r, d_in]
Decompose = Callable[[Tensor], Factors]

SVD_SCHEMA = "svd-1"  # part of every cache key: change it with the decomposition


class SvdCache:
    """One file a weight, named by the sha256 of the weight's own bytes, dtype and shape."""

    def __init__(self, folder: Path | None, compute: Decompose) -> None:
        self.folder = folder
        self.compute = compute
        self.writable = folder is not None

    def decompose(self, W: Weight) -> Factors:
        """U, S and Vh of W, from its file, or else computed and written."""
        if self.folder is None:
            return self.compute(W)
        path = self._path(W)
        if path.exists():
            try:
                tensors = load_file(path, device=str(W.device))
                return tensors["U"], tensors["S"], tensors["Vh"]
            except (OSError, SafetensorError) as error:
                logger.warning(f"SVD cache file {path} is unusable ({error}): computed again")
        factors = self.compute(W)
        if self.writable:
            self._write(path, factors)
        return factors

    def fill(self, W: Weight) -> None:
        """See to it that W's file is there."""
        if self.writable and not self._path(W).exists():
            self.decompose(W)

    def _path(self, W: Weight) -> Path:
        assert self.folder is not None
        return self.folder / f"{weight_key(W)}.safetensors"

    def _write(self, path: Path, factors: Factors) -> None:
        U, S, Vh = factors
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, to_safetensors({"U": U.cpu(), "S": S.cpu(), "Vh": Vh.cpu()}))
        except OSError as error:
            logger.warning(
                f"SVD cache {self.folder} cannot be written ({error}): this run works without it"
            )
            self.writable = False


def svd(W: Weight) -> Factors:
    """Decompose W in at least fp32; U and Vh have W's dtype.

    Signs are fixed: the largest entry of each column of U is positive.
    """
    U, S, Vh = torch.linalg.svd(at_least_fp32(W), full_matrices=False)
    largest = U.abs().argmax(0, keepdim=True)
    sign = U.gather(0, largest).sign().squeeze(0)
    U = (U * sign).to(W.dtype)
    Vh = (Vh * sign[:, None]).to(W.dtype)
    return U.contiguous(), S, Vh.contiguous()


def weight_key(W: Weight) -> str:
    """sha256 over schema, dtype, shape and every byte of W."""
    digest = hashlib.sha256(f"{SVD_SCHEMA} {W.dtype} {tuple(W.shape)}".encode())
    digest.update(bytes_of(W))
    return digest.hexdigest()


def bytes_of(W: Tensor) -> memoryview:
    return W.detach().cpu().contiguous().view(torch.uint8).numpy().data


# ── adapters

Fingerprint = Float[Tensor, "modules k"]


def fingerprint_to_string(fingerprint: Fingerprint) -> str:
    """A basis fingerprint for a file's metadata.

    Numbers have six digits, a ten thousandth of the difference that counts.
    """
    rounded: list[list[float]] = []
    for row in fingerprint.tolist():
        rounded.append([float(f"{x:.6g}") for x in row])
    return json.dumps(rounded, separators=(",", ":"))


def fingerprint_from_string(text: str, where: str) -> Fingerprint:
    """Read what `fingerprint_to_string` wrote. Raises Refused, one line, on damaged metadata."""
    try:
        return torch.tensor(json.loads(text), dtype=torch.float32)
    # torch's own message has many lines
    except (ValueError, TypeError, RuntimeError, RecursionError, OverflowError):
        raise Refused(f"{where}: its basis fingerprint cannot be read") from None


def canonical(content: bytes) -> bytes:
    """A safetensors file with its metadata in alphabetical order.

    The library shuffles the metadata, and one state should be one file. Offsets count from the
    header's end, which stays aligned to 8 bytes.
    """
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n])
    metadata = header.pop("__metadata__", {})
    ordered = {"__metadata__": dict(sorted(metadata.items()))} | header
    text = json.dumps(ordered, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + n :]


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and string metadata of a file, on the CPU.

    Raises:
        Refused: no such file, or not a safetensors file.
    """
    try:
        with open(path, "rb", opener=regular), safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise Refused(f"{path}: not a readable safetensors file ({error})") from error
