"""A model of lm-evaluation-harness (`lm_eval`) that evaluates our runs, checkpoints and Hugging Face folders.

    python -m ultrascale.measure.lm_eval_harness --model ultrascale --model_args path=runs/first --tasks lambada_openai

takes the options of `lm_eval`, which looks for models in its own package only. From Python: `lm_eval.simple_evaluate(
UltrascaleLM(path="runs/first"), tasks=[…])`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ultrascale.generate import Sampling, load
from ultrascale.specs.errors import SpecError

MAX_LENGTH = 2048  # tokens, where neither the model nor the user gives a limit
MAX_GEN_TOKENS = 256  # as other models of the harness

Scored = tuple[Any, list[int], list[int]]
"""a key of the request, the tokens of its context, and those of its continuation"""


@register_model("ultrascale")
class UltrascaleLM(TemplateLM):  # type: ignore[misc, unused-ignore]
    def __init__(
        self,
        path: str,
        tokenizer: str | None = None,
        device: str | None = None,
        batch_size: int | str = 8,
        max_length: int | None = None,
        add_bos_token: bool = False,
        **unknown: Any,
    ) -> None:
        """`path`: a run, a checkpoint, a Hugging Face folder or hf://ORG/NAME; the rest as in the harness's own models."""
        super().__init__()
        if others := sorted(set(unknown) - {"max_batch_size"}):
            raise SpecError(
                f"--model_args has {others[0]}, which ultrascale does not take: leave it out, or try max_length=2048"
            )
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # the harness's default is cuda:0
        self.model = load(path, tokenizer, device)
        self.batch_size = int(batch_size) if str(batch_size).isdigit() else 8
        limits = [self.model.longest, max_length and int(max_length)]
        known = [limit for limit in limits if limit]
        self.max_length = min(known) if known else self.model.module.model.max_positions or MAX_LENGTH
        self.add_bos_token = add_bos_token

    @property
    def eot_token_id(self) -> int:
        return min(self.model.ends, default=self.model.tokenizer.eod)

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens or (add_special_tokens is None and self.add_bos_token):
            return self.model.encode(string)
        tokens: list[int] = self.model.tokenizer.encode([string])[0].tolist()
        return tokens

    def _loglikelihood_tokens(self, requests: Sequence[Scored], **_: Any) -> list[tuple[float, bool]]:
        """Of each continuation: its log-probability, and whether greedy decoding gives it. Long contexts lose their start."""
        found: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number][1]) - len(requests[number][2]))
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            texts = [(requests[number][1] + requests[number][2])[-(self.max_length + 1) :] for number in numbers]
            batch = self.model.logits([text[:-1] for text in texts])
            for number, text, logits in zip(numbers, texts, batch, strict=True):
                count = min(len(requests[number][2]), len(text) - 1)
                own = logits[len(text) - 1 - count : len(text) - 1].log_softmax(-1)
                wanted = torch.tensor(text[len(text) - count :], device=own.device)
                total = float(own.gather(1, wanted[:, None]).sum())
                found[number] = total, bool((own.argmax(-1) == wanted).all())
        for number, request in enumerate(requests):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], found[number])
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, in windows as long as the model's, each token predicted once."""
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(self.tok_encode(request.args[0]), self.eot_token_id, self.max_length, 1)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to the first of its stop strings."""
        return [self._until(*request.args) for request in requests]

    def _until(self, context: str, options: dict[str, Any]) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        count = int(options.get("max_gen_toks", MAX_GEN_TOKENS))
        sampling = Sampling(float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0, seed=0)
        prompt = self.tok_encode(context)[-max(1, self.max_length - count) :] or [self.eot_token_id]
        tokens: list[int] = []
        text = ""
        for token in self.model.generate(prompt, count, sampling, self.model.ends):
            tokens.append(token)
            text = self.model.tokenizer.decode(tokens)
            if places := [text.find(stop) for stop in stops if stop and stop in text]:
                text = text[: min(places)]
                break
        self.cache_hook.add_partial("generate_until", (context, options), text)
        return text


def main() -> None:
    """The command line of the harness, with this model."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except SpecError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
