"""Repositories of the Hub: found in the local cache without a network, and named in one sentence where they are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ultrascale.specs.errors import SpecError
from ultrascale.specs.hub import HubRepo, model_folder, text_folder, tokenizer_file
from ultrascale.specs.model import Model

hub, constants = (pytest.importorskip(name) for name in ("huggingface_hub", "huggingface_hub.constants"))
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def cached(cache: Path, kind: str, files: dict[str, str]) -> Path:
    """A repository org/name as huggingface_hub keeps it."""
    repo = cache / f"{kind}s--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    folder = repo / "snapshots" / COMMIT
    for name, content in files.items():
        blob = repo / "blobs" / name.replace("/", "-")
        blob.parent.mkdir(exist_ok=True)
        blob.write_text(content)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(blob)
    return folder


def test_a_cached_model_needs_no_network(offline: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}
    folder = cached(offline, "model", {"config.json": json.dumps({**config, "num_attention_heads": 4}), "a.safetensors": ""})
    found = Model.load("hf://org/name")
    assert (found.name, found.layers, found.hidden) == ("name", 2, 64)
    assert model_folder("hf://org/name") == (folder, "name")
    assert model_folder(f"hf://org/name@{COMMIT}") == (folder, "name")


def test_a_cached_tokenizer_and_cached_texts(offline: Path) -> None:
    folder = cached(offline, "model", {"tokenizer.json": "{}"})
    assert tokenizer_file("hf://org/name") == folder / "tokenizer.json"
    texts = cached(offline, "dataset", {"data/a.jsonl": '{"text": "one"}\n', "README.md": ""})
    assert Path(text_folder("hf://datasets/org/name", (".jsonl",))) == texts


def test_paths_stay_paths(tmp_path: Path) -> None:
    assert tokenizer_file("a/tokenizer.json") == Path("a/tokenizer.json")
    assert text_folder(tmp_path, (".txt",)) == str(tmp_path)
    assert model_folder("runs/first") == (Path("runs/first"), None)


@pytest.mark.parametrize(
    "text", ["hf://", "hf://name", "hf://a/b/c", "hf://../b", "hf://datasets/a/b", "hf://a/b@", "hf://a/b@../c", "hf://a/b c"]
)
def test_a_wrong_name_is_refused_before_any_network(text: str) -> None:
    with pytest.raises(SpecError, match="names no model of the Hub: write hf://ORG/NAME"):
        HubRepo.parse(text)


def test_what_is_not_cached_is_one_sentence(offline: Path) -> None:
    sentence = r"hf://org/name is not in the local cache and cannot be downloaded \(HF_HUB_OFFLINE is set\): run `hf download"
    with pytest.raises(SpecError, match=sentence):
        Model.load("hf://org/name")
    with pytest.raises(SpecError, match="run `hf download org/name --repo-type dataset` with a network, or name a local path"):
        text_folder("hf://datasets/org/name", (".txt",))
    cached(offline, "model", {"config.json": "{}"})  # without its weights
    with pytest.raises(SpecError, match=r"hf://org/name has no config.json or \*\.safetensors|not in the local cache"):
        model_folder("hf://org/name")


def test_no_connection_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise ConnectionError("name resolution\nfailed")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(SpecError, match=r"cannot be downloaded \(no connection\)"):
        tokenizer_file("hf://org/name")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SpecError, match=r"try pip install 'ultrascale\[hub\]', or name a local path"):
        tokenizer_file("hf://org/name")
