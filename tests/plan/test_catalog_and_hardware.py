"""Models and devices by name, and what a name that is neither gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedkv.errors import ConfigError, ModelNotFoundError
from pagedkv.plan import hardware
from pagedkv.plan.catalog import built_in_models, find_model
from pagedkv.plan.hardware import find_device


@pytest.mark.parametrize("name", built_in_models())
def test_every_built_in_model_can_be_read(name: str) -> None:
    model = find_model(name)
    assert model.spec.vocab_size > 30_000
    assert model.spec.max_seq_len >= 2048


def test_a_hub_id_of_a_built_in_model_needs_no_network() -> None:
    assert find_model("meta-llama/Llama-3.1-8B").spec.layers == find_model("llama-3.1-8b").spec.layers


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean llama-3-8b"):
        find_model("llama-3-9b")


def test_an_id_that_cannot_be_fetched_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match=r"nobody/qwen3-9b is not in the Hugging Face cache.*qwen3-8b"):
        find_model("nobody/qwen3-9b")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config.json"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_config_is_refused_by_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read as a model's config"):
        find_model(str(path))


def test_a_multimodal_config_is_read_at_its_language_model(tmp_path: Path) -> None:
    """Gemma 3's published configs state only what differs from the architecture's defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(str(tmp_path)).spec.layers == find_model("gemma-3-4b").spec.layers


@pytest.mark.parametrize(("text", "name"), [("h100", "H100"), ("A100 40GB", "A100-40GB"), ("a100", "A100-80GB")])
def test_devices_by_name(text: str, name: str) -> None:
    assert find_device(text).name == name


def test_a_device_can_be_a_number_of_bytes() -> None:
    assert find_device("80GiB").memory == 80 * 1024**3


def test_an_unknown_device_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'H300' is not a GPU known here; did you mean H"):
        find_device("H300")


class FakeDriver:
    """As much of nvidia-ml-py as detection uses: one H100 of which 10 GiB are used."""

    class NVMLError(Exception):
        pass

    class memory:  # noqa: N801
        total, used = 81559 * 1024**2, 10 * 1024**3

    nvmlInit = nvmlShutdown = staticmethod(lambda: None)  # noqa: N815
    nvmlDeviceGetCount = staticmethod(lambda: 1)  # noqa: N815
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)  # noqa: N815
    nvmlDeviceGetName = staticmethod(lambda handle: "NVIDIA H100 80GB HBM3")  # noqa: N815
    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: FakeDriver.memory)  # noqa: N815


def test_detection_reads_what_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeDriver)
    (device,) = hardware.detect()
    assert (device.name, device.memory, device.used) == ("NVIDIA H100 80GB HBM3", 81559 * 1024**2, 10 * 1024**3)
    assert device.bandwidth == find_device("H100").bandwidth


def test_detection_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise FakeDriver.NVMLError("no driver")

    monkeypatch.setattr(FakeDriver, "nvmlInit", staticmethod(no_driver))
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeDriver)
    with pytest.raises(ConfigError, match=r"no driver.*--gpu"):
        hardware.detect()
