"""Repositories of the Hugging Face Hub: `hf://ORG/NAME` for models and tokenizers, `hf://datasets/ORG/NAME` for texts.

The local cache is asked first, so that what was downloaded once needs no network; for texts the Hub, if there is one, since
a cached copy may have a part of them. `huggingface_hub` is imported only then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ultrascale.specs.errors import SpecError

PREFIX = "hf://"
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID = re.compile(rf"hf://(?P<datasets>datasets/)?(?P<id>{_WORD}/{_WORD})(?:@(?P<revision>{_WORD}(?:/{_WORD})*))?")


@dataclass(frozen=True)
class HubRepo:
    """A repository, and a branch, tag or commit of it; None: its main branch."""

    id: str
    kind: Literal["model", "dataset"] = "model"
    revision: str | None = None

    @classmethod
    def parse(cls, text: str, kind: Literal["model", "dataset"] = "model") -> HubRepo:
        """`hf://ORG/NAME`, `hf://datasets/ORG/NAME`, each with `@REVISION`; SpecError if it is not of that kind."""
        example = "hf://datasets/ORG/NAME" if kind == "dataset" else "hf://ORG/NAME"
        found = _ID.fullmatch(text.strip())
        if found is None or (found["datasets"] is not None) != (kind == "dataset"):
            raise SpecError(f"{text!r:.100} names no {kind} of the Hub: write {example}, or {example}@REVISION")
        return cls(found["id"], kind, found["revision"])

    @property
    def name(self) -> str:
        return self.id.partition("/")[2]

    def download(self, *patterns: str, needed: Sequence[str]) -> Path:
        """The folder with the files of these patterns, from the local cache or the Hub.

        A cached copy counts if it has a file of each pattern of `needed`. With none, the Hub is asked first: nothing else
        tells whether the cached copy is complete.
        """
        try:
            from huggingface_hub import snapshot_download
        except ImportError:
            raise SpecError(
                f"{self} needs huggingface_hub, which is not installed: try pip install 'ultrascale[hub]', or name a local path"
            ) from None
        failure: Exception | None = None
        for cached in (True, False) if needed else (False, True):
            try:
                folder = Path(
                    snapshot_download(
                        self.id,
                        repo_type=self.kind,
                        revision=self.revision,
                        allow_patterns=list(patterns),
                        local_files_only=cached,
                    )
                )
            except Exception as error:  # of the cache, the network, the server, or access: the package has many classes
                failure = error
                continue
            if all(any(folder.rglob(pattern)) for pattern in needed):
                return folder
        if failure is None:
            raise SpecError(f"{self} has no {' or '.join(needed)}: name a repository with it, or a local path")
        raise SpecError(
            f"{self} is not in the local cache and cannot be downloaded ({_reason(failure)}): "
            f"run `hf download {self.id}{' --repo-type dataset' if self.kind == 'dataset' else ''}` with a network, "
            "or name a local path"
        )

    def __str__(self) -> str:
        kind = "datasets/" if self.kind == "dataset" else ""
        return f"{PREFIX}{kind}{self.id}{f'@{self.revision}' if self.revision else ''}"


def is_hub(text: str | os.PathLike[str]) -> bool:
    return os.fspath(text).startswith(PREFIX)


def tokenizer_file(text: str | os.PathLike[str], config: str | None = None, *others: str) -> Path:
    """A path to a `tokenizer.json`: the given one, or a repository's, downloaded with its config and these other files."""
    if not is_hub(text):
        return Path(text)
    needed = ["tokenizer.json", *([] if config is None else [config])]
    return HubRepo.parse(os.fspath(text)).download(*needed, *others, needed=needed) / needed[0]


def text_folder(text: str | os.PathLike[str], suffixes: Sequence[str]) -> str:
    """A path to texts: the given one, or the files with these suffixes of a repository of datasets."""
    if not is_hub(text):
        return os.fspath(text)
    patterns = [f"*{suffix}" for suffix in suffixes]
    repo = HubRepo.parse(os.fspath(text), "dataset")
    return str(repo.download(*patterns, *(f"**/{one}" for one in patterns), needed=[]))


def model_folder(text: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """A path to a Hugging Face folder with weights, and the model's name if it is not the folder's."""
    if not is_hub(text):
        return Path(text), None
    repo = HubRepo.parse(os.fspath(text))
    return repo.download("*.json", "*.safetensors", "*.txt", "*.model", needed=["config.json", "*.safetensors"]), repo.name


def _reason(error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    known = {"RepositoryNotFoundError": "no such repository, or no access to it", "GatedRepoError": "access must be requested"}
    return known.get(type(error).__name__, "no connection")
