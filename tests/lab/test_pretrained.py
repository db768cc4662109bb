"""A model and its tokenizer from wherever they may lie."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from evaluate_toys import llama, saved
from gnmr import RunError
from gnmr.lab.pretrained import byte_tokenizer, fingerprint, is_adapter, load_pretrained, locate
from gnmr.lab.tokens import ByteTokenizer
from gnmr.lab.train import train_arm

TEXT = torch.tensor([list(b"water and fire")])


def test_a_folder_of_transformers(tmp_path):
    loaded = load_pretrained(saved(tmp_path / "model"))

    assert torch.equal(loaded.model(TEXT).logits, llama()(TEXT).logits)
    assert loaded.tokenizer.encode("a") == [97]
    assert loaded.max_length == 512
    facts = loaded.facts()
    assert (facts["architecture"], facts["dtype"]) == ("LlamaForCausalLM", "float32")
    assert json.loads(json.dumps(facts)) == facts
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert not loaded.model.training


def test_the_dtype_is_as_saved_or_as_wanted(tmp_path):
    llama().bfloat16().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)

    assert load_pretrained(tmp_path).model.dtype == torch.bfloat16
    assert load_pretrained(tmp_path, dtype="float32").model.dtype == torch.float32


def test_a_fingerprint_is_of_names_shapes_and_bits():
    model = llama()
    before = fingerprint(model)

    assert fingerprint(llama()) == before
    assert fingerprint(llama(seed=1)) != before
    assert fingerprint(llama().bfloat16()) != before
    rows = model.model.embed_tokens.weight.data
    rows[[0, 1]] = rows[[1, 0]]  # the same numbers, in other places
    flat = model.lm_head.weight.data.view(-1)
    flat[[0, 1]] = flat[[1, 0]]
    assert fingerprint(model) != before


def test_the_byte_tokenizer_is_the_lab_s():
    text = bytes(range(256)).decode("latin-1") + "é€😀 \n\t  x"
    tokenizer = byte_tokenizer()

    assert [*tokenizer.encode(text), tokenizer.eos_token_id] == ByteTokenizer().encode([text.encode()]).tolist()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == ByteTokenizer.vocab_size


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_run_of_gnmr(tokenizer, recipe, tmp_path, text):
    made = recipe("run.steps=2", f"data.tokenizer={tokenizer}", "data.vocab_size=300", "policy.alpha=1.1")
    folder = tmp_path / "high-s0"
    train_arm(made, "high", 0, folder, say=lambda line: None)
    loaded = load_pretrained(folder)
    document = text.read_text()[:2000]
    from gnmr.lab.data import training_tokenizer

    ids = loaded.tokenizer.encode(document)
    assert [*ids, loaded.tokenizer.eos_token_id] == training_tokenizer(made.data).encode([document.encode()]).tolist()
    assert loaded.tokenizer.decode(ids) == document
    assert loaded.model.get_input_embeddings().num_embeddings == len(loaded.tokenizer)
    if tokenizer == "bpe":
        text.write_text(text.read_text() + "\nanother text altogether " * 40)
        with pytest.raises(RunError, match="has changed, and with it the tokenizer of the run"):
            load_pretrained(folder)
    (folder / "result.json").unlink()
    with pytest.raises(RunError, match="has not come to its end"):
        load_pretrained(folder)


@pytest.fixture
def adapter(tmp_path):
    from peft import LoraConfig, get_peft_model

    base = saved(tmp_path / "base")
    adapted = get_peft_model(
        load_pretrained(base).model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", base, adapted.eval()(TEXT).logits


def test_an_adapter_on_its_base(adapter, tmp_path):
    folder, base, logits = adapter
    loaded = load_pretrained(folder)

    assert is_adapter(folder)
    assert not is_adapter(base)
    assert torch.equal(loaded.model(TEXT).logits, logits)
    assert not torch.equal(logits, llama()(TEXT).logits)
    assert loaded.facts()["architecture"] == "LlamaForCausalLM"
    assert loaded.facts()["weights"] != load_pretrained(base).facts()["weights"]
    other = load_pretrained(folder, base=saved(tmp_path / "other", seed=3))
    assert not torch.equal(other.model(TEXT).logits, logits)


def test_an_adapter_without_a_base(adapter, tmp_path):
    folder, _, _ = adapter
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="names no base model: give it with --base"):
        load_pretrained(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="the adapter of .* cannot be loaded"):
        load_pretrained(folder)


@pytest.mark.skipif(find_spec("gguf") is None, reason="needs gguf: pip install 'gnmr[evaluate]'")
@pytest.mark.parametrize("whole", [False, True])
def test_a_gguf_file_is_dequantised_and_can_be_saved(whole, tmp_path):
    model = llama()
    write_gguf(tmp_path / "toy.gguf", model)
    loaded = load_pretrained(tmp_path / "toy.gguf" if whole else tmp_path)

    exact, found = model(TEXT).logits, loaded.model(TEXT).logits
    assert 0 < (found - exact).norm() / exact.norm() < 0.05  # the weights were rounded to eight bits
    assert loaded.tokenizer.encode("héat then") == [*"héat ".encode(), 255, *b"en"]
    loaded.model.save_pretrained(tmp_path / "plain")
    loaded.tokenizer.save_pretrained(tmp_path / "plain")
    assert torch.equal(load_pretrained(tmp_path / "plain").model(TEXT).logits, found)


def write_gguf(path, model):
    """Write a LLaMA as llama.cpp's converter does, its matrices in eight bits."""
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants

    config, letters = model.config, byte_tokenizer().get_vocab()
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    # The letter of the byte 255, which is in no text, makes room for a merge, which a file must have.
    writer.add_token_list(["th" if letters[letter] == 255 else letter for letter in sorted(letters, key=letters.get)])
    writer.add_token_types([TokenType.NORMAL] * 256 + [TokenType.CONTROL])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(256)
    names = {"embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm"}
    inner = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, tensor in model.state_dict().items():
        part = name.removeprefix("model.").removesuffix(".weight")
        if part.startswith("layers."):
            _, layer, rest = part.split(".", 2)
            part = f"blk.{layer}.{inner[rest]}"
        values = tensor.numpy()
        if "attn_q" in part or "attn_k" in part:
            heads = config.num_attention_heads if "attn_q" in part else config.num_key_value_heads
            # llama.cpp keeps the two halves of a rotary head interleaved.
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        kind = GGMLQuantizationType.Q8_0 if values.ndim == 2 and values.shape[1] % 32 == 0 else None
        data = quants.quantize(np.ascontiguousarray(values), kind) if kind else np.ascontiguousarray(values)
        writer.add_tensor(f"{names.get(part, part)}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_is_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).touch()
    (tmp_path / "text.txt").touch()
    broken = saved(tmp_path / "broken")
    (tmp_path / "broken/model.safetensors").write_bytes(b"x" * 100)
    bare = saved(tmp_path / "bare")
    (tmp_path / "bare/tokenizer.json").unlink()
    (tmp_path / "bare/tokenizer_config.json").unlink()
    for name, message in (
        ("empty", "is no model: it holds no config.json"),
        ("two", "holds several models: name one of a.gguf, b.gguf"),
        ("text.txt", "is a file, and not a .gguf"),
        ("none.gguf", "is not there"),
    ):
        with pytest.raises(ValueError, match=message):
            locate(tmp_path / name)
    with pytest.raises(ValueError, match="the model of .* cannot be loaded"):
        load_pretrained(broken)
    with pytest.raises(ValueError, match="the tokenizer of .* "):
        load_pretrained(bare)
    with pytest.raises(ValueError, match="is no PEFT adapter, so it has no base model"):
        locate(bare, base="other")
