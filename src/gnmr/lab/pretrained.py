"""A causal language model and its tokenizer, from where they are: a folder, a hub, a GGUF file, a run, an adapter."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from gnmr.errors import RunError
from gnmr.lab import runs

DTYPES = ("auto", "float32", "bfloat16", "float16")
_UNREADABLE = (OSError, ValueError, KeyError, SafetensorError)
_END = {"eos_token": "<|end|>"}
_ADAPTER, _CONFIG = "adapter_config.json", "config.json"


@dataclass(frozen=True)
class Pretrained:
    """A model in evaluation mode, and what speaks its language.

    Attributes:
        model: a causal language model of ``transformers``, perhaps with a PEFT adapter around its projections.
        tokenizer: of ``transformers``.
        name: what it was loaded by.
    """

    model: Any
    tokenizer: Any
    name: str

    @property
    def max_length(self) -> int:
        """Tokens that the model takes at once: its configuration's, the tokenizer's, or 2048 where neither says."""
        config = self.model.config.get_text_config()
        for key in ("n_positions", "max_position_embeddings", "n_ctx"):
            if getattr(config, key, None):
                return int(getattr(config, key))
        said = self.tokenizer.model_max_length
        return int(said) if said and said < 10**18 else 2048

    def facts(self) -> dict[str, Any]:
        """Return JSON-able facts that tell this model and tokenizer from any other."""
        return {
            "name": self.name,
            "architecture": type(_bare(self.model)).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "weights": fingerprint(self.model),
            "tokenizer": hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16],
        }


def load_pretrained(
    name: str | Path, *, dtype: str = "auto", device: str | torch.device | None = None, base: str | None = None
) -> Pretrained:
    """Load a causal language model and its tokenizer.

    Args:
        name: a folder of ``transformers``; a ``.gguf`` file, or a folder with one, whose weights are dequantised, so
            that the model is a plain one that can be trained and saved; a folder of a finished run of gnmr; a folder
            with a PEFT adapter, which is loaded on its base model; or the name of a model on the hub.
        dtype: of the parameters: ``auto`` is as they were saved, and float32 for what is dequantised.
        device: by default the GPU if there is one.
        base: the base model of an adapter, if it is not where ``adapter_config.json`` says.

    Raises:
        ValueError: the name leads to none of these, a file in it cannot be read, ``base`` is given without an adapter,
            or the device cannot be used.
        gnmr.RunError: a run's folder that has not come to its end.
        ModuleNotFoundError: a GGUF file without ``gguf``, an adapter without ``peft``.

    Examples:
        >>> load_pretrained("./nowhere")
        Traceback (most recent call last):
        ...
        ValueError: the model './nowhere' is not there: name a folder, a .gguf file, or a model on the hub
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    path, inner = locate(name, base)
    place = _usable(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, tokenizer = _load(path, inner, dtype, base)
    return Pretrained(model.to(place).eval().requires_grad_(False), tokenizer, str(name))


def load_model(name: str | Path, *, dtype: str = "auto") -> Any:
    """Load a plain causal language model, to be trained, without its tokenizer.

    Args:
        name: see :func:`load_pretrained`; not an adapter.
        dtype: see there.

    Raises:
        ValueError, gnmr.RunError: see there.
    """
    _, inner = locate(name)
    if is_adapter(inner):
        raise ValueError(f"{name} is a PEFT adapter: name its base model")
    return _from_gguf(inner, dtype)[0] if inner.suffix == ".gguf" else _from_transformers(str(inner), dtype)


def locate(name: str | Path, base: str | None = None) -> tuple[Path, Path]:
    """Check that a name leads to a model, as far as can be told without loading it.

    Returns:
        The path, and the file or folder that the model itself is in. For a name on the hub both are the name.

    Raises:
        ValueError, gnmr.RunError: see :func:`load_pretrained`.
    """
    path = Path(name)
    if not path.exists() and (str(name).startswith((".", "/", "~")) or path.suffix == ".gguf"):
        raise ValueError(f"the model {str(name)!r} is not there: name a folder, a .gguf file, or a model on the hub")
    inner = path / runs.MODEL if (path / runs.RECIPE).exists() else path
    if inner is not path and not (path / runs.RESULT).exists():
        raise RunError(f"{path} holds a run that has not come to its end: its model is not there yet")
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(f"{path} is a file, and not a .gguf: name the folder of the model")
    if base is not None and not (inner / _ADAPTER).exists():
        raise ValueError(f"{name} is no PEFT adapter, so it has no base model: leave --base out")
    if inner.is_dir() and not any((inner / file).exists() for file in (_CONFIG, _ADAPTER)):
        found = sorted(file.name for file in inner.glob("*.gguf"))
        if not found:
            raise ValueError(f"{inner} is no model: it holds no {_CONFIG}, no {_ADAPTER}, and no .gguf file")
        if len(found) > 1:
            raise ValueError(f"{inner} holds several models: name one of {', '.join(found)}")
        inner = inner / found[0]
    return path, inner


def load_tokenizer(name: str | Path) -> Any:
    """Load a tokenizer of ``transformers``: from a folder, a ``.gguf`` file or a folder with one, or the hub.

    Raises:
        ValueError: it cannot be loaded, is no fast one, or has no end-of-text token.
    """
    path = Path(name)
    found = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(found) == 1 and not (path / _CONFIG).exists():
        return _tokenizer_of(str(found[0].parent), gguf_file=found[0].name)
    return _tokenizer_of(str(name))


def is_adapter(name: str | Path) -> bool:
    """Return whether a name leads to a folder with a PEFT adapter, or to a run that trained one."""
    return any((Path(name) / inner / _ADAPTER).exists() for inner in (".", runs.MODEL))


def fingerprint(model: Any) -> str:
    """Return a hash of the names, shapes, dtypes and bits of a model's weights; the same on every device.

    Examples:
        >>> one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(other)
        (True, False)
    """
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        bits = tensor.detach().contiguous().reshape(-1).view(words[tensor.element_size()])
        # A sum of integers does not depend on its order; the second one does on where they stand.
        halves = bits[::2].sum(dtype=torch.int64).item(), bits[1::2].sum(dtype=torch.int64).item()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {halves}\n".encode())
    return digest.hexdigest()[:32]


def byte_tokenizer() -> Any:
    """Return the lab's tokenizer ``bytes`` as one of ``transformers``: ids 0 to 255 are bytes, 256 ends a document.

    Examples:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer.encode("hé"), tokenizer.decode([104, 195, 169]), tokenizer.eos_token_id
        ([104, 195, 169], 'hé', 256)
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    # The alphabet of byte-level BPE: a visible byte is its own character, the others are moved above 255.
    letters = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrapped(backend)


def _wrapped(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **_END)


def _usable(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # of another build of torch
        raise ValueError(f"the device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from error


def _load(path: Path, inner: Path, dtype: str, base: str | None) -> tuple[Any, Any]:
    if inner.suffix == ".gguf":
        return _from_gguf(inner, dtype)
    if (inner / _ADAPTER).exists():
        return _adapted(inner, dtype, base)
    model = _from_transformers(str(inner), dtype)
    if inner == path or (inner / "tokenizer_config.json").exists():
        return model, _tokenizer_of(str(inner))
    return model, _tokenizer_of_run(path)


def _from_transformers(name: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except _UNREADABLE as error:
        raise _unreadable("model", name, error) from error


def _tokenizer_of(name: str, **options: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except _UNREADABLE as error:
        raise _unreadable("tokenizer", name, error) from error
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name!r} must be a fast one with an end-of-text token")
    return tokenizer


def _from_gguf(file: Path, dtype: str) -> tuple[Any, Any]:
    import gguf  # noqa: F401 (what transformers reads the file with, asked for by name where it is missing)
    from transformers import AutoModelForCausalLM, GgufConfig

    wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    plain = GgufConfig(gguf_file=file.name, dequantize=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=wanted, quantization_config=plain
        )
    except _UNREADABLE as error:
        raise _unreadable("model", str(file), error) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it is plain now, and can be saved as such
    return model, _tokenizer_of(str(file.parent), gguf_file=file.name)


def _adapted(folder: Path, dtype: str, base: str | None) -> tuple[Any, Any]:
    from peft import PeftModel

    try:
        config = json.loads((folder / _ADAPTER).read_text())
    except (OSError, ValueError) as error:
        raise _unreadable("adapter", str(folder), error) from error
    below = base or config.get("base_model_name_or_path")
    if not below:
        raise ValueError(f"{folder}/{_ADAPTER} names no base model: give it with --base")
    loaded = load_pretrained(below, dtype=dtype, device="cpu")
    try:
        return PeftModel.from_pretrained(loaded.model, folder), loaded.tokenizer
    except (*_UNREADABLE, RuntimeError) as error:
        raise _unreadable("adapter", str(folder), error) from error


def _tokenizer_of_run(folder: Path) -> Any:
    """Return the tokenizer that a run was trained with, which its recipe names."""
    from gnmr.lab.data import training_tokenizer
    from gnmr.lab.recipe import load_recipe
    from gnmr.lab.tokens import FastTokenizer

    data = load_recipe(folder / runs.RECIPE).text
    if data.tokenizer == "bytes":
        return byte_tokenizer()
    if data.tokenizer != "bpe":
        return load_tokenizer(data.tokenizer)
    trained, wanted = training_tokenizer(data), runs.read_json(folder / runs.ENVIRONMENT)["data"]["tokenizer"]
    assert isinstance(trained, FastTokenizer)  # noqa: S101 (the recipe says so)
    if trained.name != wanted:
        raise RunError(f"{folder}: the text {data.name!r} has changed, and with it the tokenizer of the run")
    return _wrapped(trained.backend)


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _unreadable(what: str, name: str, error: Exception) -> ValueError:
    said = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"the {what} of {name!r} cannot be loaded: {said}")
