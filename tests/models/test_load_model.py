"""From what a user calls a model to a model on pages, and one sentence where that fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from huggingface_hub import constants as hub
from paged_driver import paged_logits
from tiny_models import tiny, tiny_tokenizer
from transformers.utils import logging as transformers_logging

from pagedkv.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from pagedkv.models import gguf, load
from pagedkv.models.embedded import default_model_path
from pagedkv.models.load import load_model, resolve_dtype
from pagedkv.models.loaded import adopt


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder as `save_pretrained` leaves it, of a tiny Llama."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)


def one_sentence(caught: pytest.ExceptionInfo[Exception]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    return message


def test_a_folder_with_safetensors(saved):
    model = load_model(str(saved), dtype="float32")
    tokens = list(range(3, 12))
    expected = tiny("llama")(input_ids=torch.tensor([tokens])).logits[0]
    assert model.name == "tiny-llama"
    assert model.dtype == torch.float32
    assert model.eos_token_ids == {2}
    torch.testing.assert_close(paged_logits(model, [tokens], [[4, 5]])[0], expected, rtol=1e-4, atol=1e-4)


def test_weights_are_counted_once_where_tied():
    plain = adopt(tiny("llama"), tiny_tokenizer(), "plain")
    tied = adopt(tiny("llama", tie_word_embeddings=True), tiny_tokenizer(), "tied")
    assert plain.weight_bytes - tied.weight_bytes == 61 * 32 * 4


def test_a_model_without_a_chat_template_gets_a_plain_one(saved):
    tokenizer = load_model(str(saved), dtype="float32").tokenizer
    messages = [{"role": "user", "content": "w3 w4"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "User: w3 w4\nAssistant:"


def test_eos_comes_from_generation_config_tokenizer_and_chat_template():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|eot_id|>"]})
    tokenizer.chat_template = "{{ messages[0]['content'] + '<|im_end|>' }}"
    model = tiny("llama")
    model.generation_config.eos_token_id = [5, 7]
    assert adopt(model, tokenizer, "tiny").eos_token_ids == {2, 5, 7, tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_dtype_names():
    assert resolve_dtype("float32") == torch.float32
    assert resolve_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype is 'int8'; it must be one of auto, float32, bfloat16"):
        resolve_dtype("int8")


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_only_where_the_cpu_multiplies_it(monkeypatch, native, expected):
    monkeypatch.setattr(load, "_cpu_multiplies_bfloat16", lambda: native)
    assert resolve_dtype("auto") == expected


def test_bfloat16_is_loaded_as_such(saved):
    assert load_model(str(saved), dtype="bfloat16").dtype == torch.bfloat16


def test_a_missing_hugging_face_id_offline_is_one_sentence(offline):
    with pytest.raises(ModelNotFoundError) as caught:
        load_model("nobody/no-such-model")
    message = one_sentence(caught)
    assert message.startswith("nobody/no-such-model is neither a folder here nor in the Hugging Face cache ")
    assert "HF_HUB_OFFLINE=1 forbids fetching it" in message


@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder", "model.gguf", "a/b/c"])
def test_a_missing_path_is_one_sentence(name):
    with pytest.raises(ModelNotFoundError, match="there is no file or folder"):
        load_model(name)


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"is a file, but not a \.gguf file"):
        load_model(str(tmp_path / "weights.bin"))


def test_a_folder_with_nothing_in_it(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"holds neither config\.json"):
        load_model(str(tmp_path))


def test_a_folder_with_several_gguf_files_names_the_choice(tmp_path):
    for name in ("b.Q8.gguf", "a.Q4.gguf"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"holds 2 \.gguf files; .* one of them: a\.Q4\.gguf, b\.Q8\.gguf"):
        load_model(str(tmp_path))


def test_a_damaged_gguf_file_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"not a gguf file at all, but long enough to have a header" * 10)
    with pytest.raises(UnsupportedModelError, match=r"model\.gguf cannot be read as a causal LM") as caught:
        load_model(str(tmp_path / "model.gguf"))
    one_sentence(caught)


def test_a_folder_without_weights(saved, tmp_path, offline):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    with pytest.raises(ModelNotFoundError, match="cannot be read as a model") as caught:
        load_model(str(tmp_path))
    one_sentence(caught)


def test_missing_weights_are_refused_instead_of_made_up(tmp_path):
    """transformers fills a missing weight with random numbers and only warns."""
    model = tiny("llama")
    weights = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"lacks model\.layers\.1\.mlp.*3 weights missing"):
        load_model(str(tmp_path))


def test_a_model_that_is_no_causal_language_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UnsupportedModelError, match="vit is no causal language model"):
        load_model(str(tmp_path))


def test_an_unknown_architecture_is_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "of-the-future"}')
    with pytest.raises(UnsupportedModelError, match="of-the-future") as caught:
        load_model(str(tmp_path))
    one_sentence(caught)


def test_code_that_comes_with_a_model_is_never_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "evil.Config"}}')
    (tmp_path / "evil.py").write_text("raise SystemExit('code of the model was run')")
    with pytest.raises(UnsupportedModelError):
        load_model(str(tmp_path))


def test_loading_is_quiet_and_leaves_the_loggers_as_they_were(saved, capfd):
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    load_model(str(saved))
    assert capfd.readouterr() == ("", "")
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before


@pytest.mark.model
def test_the_default_model_answers_in_chat_form():
    model = load_model(dtype="float32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert model.name == "SmolLM2-135M-Instruct"
    assert (len(model.spec.layers), model.spec.max_seq_len, model.spec.vocab_size) == (30, 8192, 49152)
    assert model.tokenizer.convert_tokens_to_ids("<|im_end|>") in model.eos_token_ids
    answer: list[int] = []
    while not answer or answer[-1] not in model.eos_token_ids:
        sequence = [*tokens, *answer]
        answer.append(int(paged_logits(model, [sequence], [[len(sequence)]], page_size=16)[0][-1].argmax()))
    assert model.tokenizer.decode(answer[:-1]) == "The capital of France is Paris."


@pytest.mark.model
@pytest.mark.slow
def test_the_gguf_file_in_a_folder_is_the_same_model(tmp_path, monkeypatch):
    """Dequantised at load (no converted copy is kept for a large file) or read from the copy: the same weights."""
    (tmp_path / "model.gguf").symlink_to(default_model_path())
    converted = load_model(str(tmp_path), dtype="float32")
    monkeypatch.setattr(gguf, "_CONVERT_UP_TO_BYTES", 0)
    direct = load_model(str(tmp_path / "model.gguf"), dtype="float32")
    assert direct.name == "model"
    assert direct.spec.layers == converted.spec.layers
    theirs = dict(converted.model.named_parameters())
    for name, weight in direct.model.named_parameters():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.model
def test_a_second_process_loads_from_the_cache_without_pip_or_network():
    load_model()
    code = (
        "import subprocess, pagedkv.models.load as load\n"
        "subprocess.run = None\n"
        "lines = []\n"
        "print(load.load_model(report=lines.append).spec.name, lines)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "SmolLM2-135M-Instruct []\n", done.stderr
    assert done.stderr == ""
