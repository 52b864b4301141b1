"""The cheat-sheet's overlap ratios: printed forms as printed, corrected forms against bytes over bandwidth and FLOPs over peak.

Example throughout: H100, 989 TFLOP/s, 450 GB/s; Llama-3-8B (N = 8.03e9, h = 4096, 32 layers of 218,103,808 matrix elements)
with one 8192-token sequence. peak/bw = 2197.8 FLOP/byte.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ultrascale.cost import cheatsheet
from ultrascale.cost.cheatsheet import OverlapRatio

PEAK, BW = 989e12, 450e9
N, H, LAYERS, LAYER, TOKENS = 8_030_261_248, 4096, 32, 218_103_808, 8192


def over(sent_bytes: float, flops: float) -> float:
    """Transfer time over compute time."""
    return (sent_bytes / BW) / (flops / PEAK)


def test_data() -> None:
    """A ring all-reduce of 2N bytes sends 2·(7/8)·2N; backward computes 4N·tokens. 7/8 · 2197.8 / 8192 = 0.2348."""
    ratio = cheatsheet.data_ratio(8, N, TOKENS, PEAK, BW)
    assert ratio.corrected == pytest.approx(over(2 * 7 / 8 * 2 * N, 4 * N * TOKENS)) == pytest.approx(0.23475, abs=1e-4)
    # (7 · 8.03e9 · 989e12) / (2 · 450e9 · 8192 · 8) = 9.425e8: parameters, not a ratio
    assert ratio.printed == pytest.approx(9.4255e8, rel=1e-4)
    assert ratio.printed == pytest.approx(ratio.corrected * N / 2)


def test_zero_1_is_the_same_as_data() -> None:
    """'Same as above': the cheat-sheet lets ZeRO-1 all-reduce its gradients."""
    assert cheatsheet.data_ratio(64, N, TOKENS, PEAK, BW).corrected == pytest.approx(over(2 * 63 / 64 * 2 * N, 4 * N * TOKENS))


def test_zero_2() -> None:
    """A reduce-scatter sends half of it: 7/8 · 2N bytes against 4N·tokens. 0.1174."""
    ratio = cheatsheet.zero_2_ratio(8, N, TOKENS, PEAK, BW)
    assert ratio.corrected == pytest.approx(over(7 / 8 * 2 * N, 4 * N * TOKENS)) == pytest.approx(0.11738, abs=1e-4)
    assert ratio.printed == pytest.approx(9.4255e8 / 2, rel=1e-4)
    assert ratio.printed == pytest.approx(ratio.corrected * N / 2)


def test_zero_3() -> None:
    """An all-gather of a layer's 2P bytes sends 7/8 of them; the next forward computes 2P·tokens. 0.2348.

    Printed 7 · 2197.8 / (2 · 8192) = 0.939: DP/2 = 4 times too much.
    """
    ratio = cheatsheet.zero_3_ratio(8, TOKENS, PEAK, BW)
    assert ratio.corrected == pytest.approx(over(7 / 8 * 2 * LAYER, 2 * LAYER * TOKENS)) == pytest.approx(0.23475, abs=1e-4)
    assert ratio.printed == pytest.approx(0.93900, abs=1e-4)
    # The misprint: one byte a parameter, and DP − 1 whole layers.
    assert ratio.printed == pytest.approx(over(7 * 1 * LAYER, 2 * LAYER * TOKENS))


def test_tensor() -> None:
    """One gather of s·h bf16 elements sends 7/8 of 2·s·h; the next region, half a layer, computes 2·(P/2)·s/8.

    2·4096·7·2197.8 / 218,103,808 = 0.5778; with P = 12h² it would be (TP−1)·peak / (6·h·bw), four times the printed 0.1565.
    """
    ratio = cheatsheet.tensor_ratio(8, H, LAYER, PEAK, BW)
    assert ratio.corrected == pytest.approx(over(7 / 8 * 2 * TOKENS * H, 2 * LAYER / 2 * TOKENS / 8))
    assert ratio.corrected == pytest.approx(0.57785, abs=1e-4)
    assert ratio.printed == pytest.approx(0.15650, abs=1e-4)
    assert cheatsheet.tensor_ratio(8, H, 12 * H**2, PEAK, BW).corrected == pytest.approx(4 * ratio.printed)
    # The misprint: one byte an element, against a whole layer.
    assert ratio.printed == pytest.approx(over(7 / 8 * TOKENS * H, 2 * 12 * H**2 * TOKENS / 8))


def test_pipeline() -> None:
    """A hop of 2·s·h bytes against a stage of 8 layers, 2·8·P·s FLOPs. 4·4096·2197.8 / (32·218,103,808) = 0.00516.

    With P = 16h² the corrected form is twice the printed one, which counts a byte an element.
    """
    ratio = cheatsheet.pipeline_ratio(4, H, LAYERS, LAYER, PEAK, BW)
    assert ratio.corrected == pytest.approx(over(2 * TOKENS * H, 2 * 8 * LAYER * TOKENS)) == pytest.approx(0.0051593, abs=1e-6)
    assert ratio.printed == pytest.approx(4 * 2197.778 / (32 * 4096 * 32), rel=1e-5)
    assert ratio.printed == pytest.approx(over(TOKENS * H, 2 * 8 * 16 * H**2 * TOKENS))


def test_context() -> None:
    """A ring step of 8 ranks at 128k: 2·2·16384·1024 bytes against half of 4·16384²·4096 FLOPs. 0.0671.

    Printed: 7 · 131072/8 · 1024 · 2 = 234,881,024 elements that a rank sends for a layer.
    """
    ratio = cheatsheet.context_ratio(8, 131_072, 1, 1024, 4096, PEAK, BW)
    assert (
        ratio.corrected
        == pytest.approx(over(2 * 2 * 16384 * 1024, 4 * 16384**2 * 4096 / 2))
        == pytest.approx(0.06707, abs=1e-4)
    )
    assert ratio.printed == 234_881_024
    assert cheatsheet.context_ratio(1, 131_072, 1, 1024, 4096, PEAK, BW).corrected == 0


def test_expert() -> None:
    """Mixtral, ep 8: a routed token leaves and returns, 2·2·4096 bytes of which 7/8 are sent, and needs 2·176,160,768 FLOPs.

    7/8 · 2 · 4096 · 2197.8 / 176,160,768 = 0.0894. Printed: 7 · 2197.8 / (12·8·4096) = 0.0391.
    """
    parameters = 3 * 4096 * 14336
    ratio = cheatsheet.expert_ratio(8, 8, H, parameters, PEAK, BW)
    assert ratio.corrected == pytest.approx(over(7 / 8 * 2 * 2 * H, 2 * parameters)) == pytest.approx(0.08943, abs=1e-4)
    assert ratio.printed == pytest.approx(0.039124, abs=1e-5)
    # The misprint: one byte, one move, every token at all E/EP = 1 experts of a rank, 6h² each.
    assert ratio.printed == pytest.approx(over(7 / 8 * TOKENS * H, 2 * 1 * 6 * H**2 * TOKENS))


FORMS: dict[str, Callable[[float, float], OverlapRatio]] = {
    "data": lambda peak, bw: cheatsheet.data_ratio(8, N, TOKENS, peak, bw),
    "zero-2": lambda peak, bw: cheatsheet.zero_2_ratio(8, N, TOKENS, peak, bw),
    "zero-3": lambda peak, bw: cheatsheet.zero_3_ratio(8, TOKENS, peak, bw),
    "tensor": lambda peak, bw: cheatsheet.tensor_ratio(8, H, LAYER, peak, bw),
    "pipeline": lambda peak, bw: cheatsheet.pipeline_ratio(4, H, LAYERS, LAYER, peak, bw),
    "context": lambda peak, bw: cheatsheet.context_ratio(8, 131_072, 1, 1024, 4096, peak, bw),
    "expert": lambda peak, bw: cheatsheet.expert_ratio(8, 8, H, 3 * 4096 * 14336, peak, bw),
}


@pytest.mark.parametrize("name", FORMS)
def test_corrected_forms_do_not_change_with_the_unit_of_time(name: str) -> None:
    """In milliseconds peak and bandwidth are both a thousandth: a ratio of two times stays."""
    assert FORMS[name](PEAK, BW).corrected == pytest.approx(FORMS[name](PEAK / 1e3, BW / 1e3).corrected)
    assert FORMS[name](2 * PEAK, BW).corrected == pytest.approx(2 * FORMS[name](PEAK, BW).corrected)


@pytest.mark.parametrize("name", ["data", "zero-2"])
def test_printed_forms_with_num_params_are_no_ratios(name: str) -> None:
    """The same layers twice: a model of twice the parameters has the same ratio of times. The printed form doubles."""
    law = {"data": cheatsheet.data_ratio, "zero-2": cheatsheet.zero_2_ratio}[name]
    small, large = law(8, N, TOKENS, PEAK, BW), law(8, 2 * N, TOKENS, PEAK, BW)
    assert large.corrected == small.corrected
    assert large.printed == 2 * small.printed


def test_the_printed_context_entry_ignores_the_hardware() -> None:
    assert FORMS["context"](PEAK, BW).printed == FORMS["context"](2 * PEAK, BW).printed


def test_a_group_of_one_moves_nothing() -> None:
    assert cheatsheet.data_ratio(1, N, TOKENS, PEAK, BW).corrected == 0
    assert cheatsheet.zero_2_ratio(1, N, TOKENS, PEAK, BW).corrected == 0
    assert cheatsheet.zero_3_ratio(1, TOKENS, PEAK, BW).corrected == 0
    assert cheatsheet.tensor_ratio(1, H, LAYER, PEAK, BW).corrected == 0
    assert cheatsheet.expert_ratio(1, 8, H, 1.0, PEAK, BW).corrected == 0


@pytest.mark.parametrize("name", FORMS)
def test_every_misprint_is_named(name: str) -> None:
    ratio = FORMS[name](PEAK, BW)
    assert ratio.correction.startswith("the printed")
    assert "peak_flops" in ratio.corrected_form
    assert "peak_bw" in ratio.corrected_form
