"""Direction files: one safetensors file with the hashes of all that it was made of."""

import hashlib
from pathlib import Path

from loguru import logger
from safetensors.torch import save as to_safetensors

from vgrout.direction.extract import N_HELDOUT, Axes, Direction, extract, mean_of, model_name
from vgrout.direction.meta import SCHEMA, Meta
from vgrout.direction.pairs import HANDWRITTEN, PairSet
from vgrout.files import write_atomic
from vgrout.model.policy import Policy
from vgrout.model.svd_adapter import fingerprint_from_string, read_safetensors, weights_sha256

FOLDER = Path("out/vhack")

# key in the file → field of Axes; the bare module name holds V
_TENSORS = {"": "V", "_sv/": "sv", "_mean/": "mean", "_hack/": "hack", "_clean/": "clean", "_heldout/": "heldout"}


def default_path(pairs: PairSet, meta_key: str, model: str, top_k: int, tau_axis: float, folder: Path = FOLDER) -> Path:
    """Where a direction is cached: by pair set, or, for the hand-written one, by model slug, k and τ.

    meta_key: `model_key`, the last part of the name, so that nothing stale is ever found there.
    """
    if pairs.source == HANDWRITTEN:
        slug = Path(model).name.lower()
        name = f"v_hack_{slug}_k{top_k}" + (f"_tau{tau_axis:g}" if tau_axis else "")
    else:
        name = f"v_hack_pairset_{pairs.stem}"
    return folder / f"{name}_{meta_key}.safetensors"


def model_key(policy: Policy, pairs: PairSet, top_k: int, tau_axis: float) -> str:
    """Hash, ten digits, of all that a direction depends on."""
    weights = weights_sha256(policy.model, policy.adapter)
    text = f"{SCHEMA} {weights} {pairs.sha256} {top_k} {tau_axis} {N_HELDOUT}"
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def save(direction: Direction, path: Path) -> None:
    """Write a direction file, atomically."""
    tensors = {
        prefix + m: getattr(axes, field).contiguous()
        for m, axes in direction.axes.items()
        for prefix, field in _TENSORS.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, to_safetensors(tensors, direction.meta.to_strings()))


def load(path: Path, policy: Policy, pairs: PairSet | None) -> Direction:
    """A direction file that belongs to this model and, where given, to these pairs.

    Raises:
        ValueError: one line: not readable, another schema, model, basis, pair content, module set or shape, or a NaN.
    """
    tensors, raw = read_safetensors(path)
    meta = Meta.from_strings(raw, str(path))
    if meta.weights_sha256 != (own := weights_sha256(policy.model, policy.adapter)):
        raise ValueError(
            f"{path}: direction of another model ({meta.model}, weights {meta.weights_sha256[:12]}); "
            f"this one is {model_name(policy)}, {own[:12]}: extract it again"
        )
    if pairs is not None:
        meta.require_pairs(pairs, str(path))
    axes: dict[str, Axes] = {}
    n = meta.n_pairs - meta.n_heldout
    sizes = policy.adapter.by_module(policy.adapter.δS.detach())
    for m in policy.adapter.names:
        r = sizes[m].numel()
        k = min(meta.top_k, n, r)
        shapes = {"V": (k, r), "sv": (k,), "mean": (r,), "hack": (r,), "clean": (r,), "heldout": (meta.n_heldout, r)}
        for prefix, field in _TENSORS.items():
            if (tensor := tensors.get(prefix + m)) is None:
                raise ValueError(f"{path}: no tensor {prefix + m!r}; extract it again")
            if tensor.shape != shapes[field]:
                raise ValueError(f"{path}: {prefix + m} has shape {[*tensor.shape]}, needs {[*shapes[field]]}")
            if not tensor.isfinite().all():
                raise ValueError(f"{path}: {prefix + m} holds a NaN or an infinity; extract it again")
        axes[m] = Axes(**{field: tensors[prefix + m].float() for prefix, field in _TENSORS.items()})
    if extra := len(tensors) - len(_TENSORS) * len(axes):
        raise ValueError(f"{path}: {extra} tensors that this model has no module for; extract it again")
    if meta.basis:
        fingerprint = fingerprint_from_string(meta.basis, str(path))
        policy.adapter.require_basis(mean_of(axes, policy.adapter), fingerprint, str(path))
    return Direction(axes, meta)


def obtain(
    policy: Policy,
    pairs: PairSet | None,
    path: Path | None,
    top_k: int,
    tau_axis: float,
    folder: Path = FOLDER,
) -> Direction:
    """The direction at `path`; without one, the cached file for these pairs and this model, extracted if it is missing.

    Raises:
        ValueError: as `load`, or neither a path nor pairs.
    """
    assert not policy.adapter.δS.any(), "a direction on file belongs to the base model: obtain it before training"
    if path is not None:
        return load(path, policy, pairs)
    if pairs is None:
        raise ValueError("--v-hack-path: no direction file and no pairs to extract one from; give --vhack-pairs-path")
    key = model_key(policy, pairs, top_k, tau_axis)
    path = default_path(pairs, key, model_name(policy), top_k, tau_axis, folder)
    if path.exists():
        logger.debug(f"direction from {path}")
        return load(path, policy, pairs)
    direction = extract(policy, pairs, top_k, tau_axis)
    try:
        save(direction, path)
    except OSError as error:
        logger.warning(f"direction cannot be kept in {path} ({error}): this run works without the file")
    return direction
