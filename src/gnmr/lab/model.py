"""The model of a recipe: a seeded LLaMA or Mixtral of its shapes, or a pre-trained causal LM."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from gnmr.errors import RecipeError
from gnmr.lab.pretrained import load_model
from gnmr.lab.sections import Adapter, Model


def make_model(model: Model, vocab_size: int, sequence_length: int, seed: int) -> Any:
    """Return the model; a new one's weights depend on the seed and nothing else.

    Args:
        model: the recipe's section.
        vocab_size: of the tokenizer.
        sequence_length: the longest sequence.
        seed: of the initialisation.

    Raises:
        gnmr.RecipeError: ``name_or_path`` cannot be loaded, or its vocabulary is smaller than the tokenizer's.
    """
    dtype = getattr(torch, model.dtype)
    if model.name_or_path is not None:
        return _pretrained(model, vocab_size)
    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads or model.num_attention_heads,
        "max_position_embeddings": sequence_length,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model.num_experts is None:
        return LlamaForCausalLM(LlamaConfig(**shape)).to(dtype)
    # Without the auxiliary loss that balances the experts, so that the loss is the language model's.
    experts = {"num_local_experts": model.num_experts, "num_experts_per_tok": model.num_experts_per_tok}
    return MixtralForCausalLM(MixtralConfig(**shape, **experts)).to(dtype)


def with_adapters(model: Any, adapter: Adapter, seed: int) -> Any:
    """Return the model under LoRA adapters, which alone are trained.

    Args:
        model: a causal LM; it is frozen.
        adapter: the recipe's section.
        seed: of the adapters' initialisation.

    Raises:
        gnmr.RecipeError: ``peft`` is missing, or ``target_modules`` names nothing in the model.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise RecipeError("a recipe with an adapter needs peft: pip install 'gnmr[finetune]'") from error
    targets = adapter.target_modules
    config = LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise RecipeError(f"adapter.target_modules = {targets!r}: {error}") from error


_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _pretrained(model: Model, vocab_size: int) -> Any:
    name = model.name_or_path
    assert name is not None  # noqa: S101 (asked before)
    try:
        loaded = load_model(name, dtype=model.dtype)
    except ValueError as error:
        raise RecipeError(f"model.name_or_path = {name!r} cannot be loaded: {error}") from error
    for key in _SHAPE:
        given, found = getattr(model, key), getattr(loaded.config, key, None)
        if key in model.model_fields_set and found is not None and given not in (None, found):
            raise RecipeError(f"model.{key} = {given}, and {name!r} has {found}: leave it out, or leave out the name")
    rows = loaded.get_input_embeddings().num_embeddings
    if rows < vocab_size:
        raise RecipeError(
            f"model.name_or_path = {name!r} has {rows} embeddings, and the tokenizer {vocab_size} tokens: set "
            "data.tokenizer to the model's own"
        )
    loaded.config.use_cache = False
    return loaded
